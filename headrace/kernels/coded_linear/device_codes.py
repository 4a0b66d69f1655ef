"""`DeviceCodes`: the layout in which GPU kernels read a quantised weight. O outputs, I inputs, G groups of inputs.

Codes of 8 bits are kept a byte each, row by row, so that a library's FP8 GEMM reads them too. Codes of at most 4 bits
are kept two to a byte, in blocks of `BLOCK` inputs: byte b of a block has input b in its low half and input b + 64 in
its high half. A kernel thus unpacks a tile of bytes into two tiles of consecutive inputs, and moves nothing between
threads. Tables have a value per output and group, whatever the groups' size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.kernels.coded_linear.codes import TABLES, Code, CodedMatrix
from headrace.kernels.packed_linear.blocks import BLOCK_TYPES, WeightBlocks
from headrace.kernels.packed_linear.layout import GROUP, Format

BLOCK = 128
HALF = BLOCK // 2
SHORT_CODES = tuple(TABLES)
BLOCK_CODES = {Format.E2M1_GROUP: Code.E2M1, Format.IQ4_GROUP: Code.IQ4}
"""Of GGUF's types; others are integers."""


@dataclass(frozen=True)
class DeviceCodes:
    """A weight [O, I]. ``codes``: uint8 [O, ceil(I / 128) * 64] of short codes, else int8, uint8 or float8_e4m3fn [O,
    I]. ``scales`` [ceil(O / rows), G] float16 or float32; ``zeros`` like them in float16, or None. ``order`` [I]: the
    input at each place, where groups are not consecutive inputs. ``values`` [16]: float32 values of short codes that
    are no integers, else None."""

    code: Code
    in_features: int
    codes: torch.Tensor
    scales: torch.Tensor
    group: int
    zeros: torch.Tensor | None = None
    rows: int = 1
    order: torch.Tensor | None = None
    values: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def is_short(self) -> bool:
        """Whether a byte holds two codes."""
        return self.code in SHORT_CODES or self.codes.shape[1] != self.in_features

    @property
    def num_bytes(self) -> int:
        tensors = (self.codes, self.scales, self.zeros, self.order, self.values)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def pack_for_device(matrix: CodedMatrix) -> DeviceCodes | None:
    """The matrix in this layout, on its device; None where inputs are grouped irregularly."""
    order = None
    if matrix.group_ids is not None:
        counts = torch.bincount(matrix.group_ids, minlength=matrix.scales.shape[1])
        if (counts[:-1] != matrix.group).any() or counts[-1] > matrix.group:
            return None
        order = matrix.group_ids.argsort(stable=True)
    if matrix.code is Code.E4M3 and matrix.scales.shape[1] == 1:
        matrix = matrix.by_row()  # as FP8 GEMMs of libraries take them
    codes = matrix.codes if order is None else matrix.codes[:, order]
    is_short = matrix.code in SHORT_CODES or (codes.dtype == torch.uint8 and matrix.bits <= 4)
    return DeviceCodes(
        matrix.code, matrix.shape[1], _pair_halves(codes) if is_short else codes.contiguous(),
        _narrow(matrix).contiguous(), matrix.group,
        None if matrix.zeros is None else matrix.zeros.half().contiguous(), matrix.rows, order,
        torch.tensor(TABLES[matrix.code], device=matrix.device) if matrix.code in TABLES else None,
    )


def _narrow(matrix: CodedMatrix) -> torch.Tensor:
    """Scales in float16 where that holds them exactly, else in float32, as those of 8-bit floats always are."""
    narrow, wide = matrix.scales.half(), matrix.scales.float()
    return narrow if matrix.code is not Code.E4M3 and torch.equal(narrow.float(), wide) else wide


def _pair_halves(codes: torch.Tensor) -> torch.Tensor:
    blocks = F.pad(codes, (0, -codes.shape[1] % BLOCK)).unflatten(1, (-1, 2, HALF))
    return (blocks[:, :, 0] | blocks[:, :, 1] << 4).flatten(1)


def read_codes(blocks: WeightBlocks, device: torch.device) -> CodedMatrix:
    """A weight [O, I] from blocks of a GGUF file, decoded on ``device``: in 4 bits where the type has them, else in 8.
    A zero point is ``-min / scale``."""
    kind = BLOCK_TYPES[blocks.kind]
    codes, scales, mins = kind.read(blocks.raw.to(device).reshape(-1, kind.num_bytes))
    code = BLOCK_CODES.get(kind.format, Code.INT)
    if code is Code.E2M1:
        scales = scales * 2  # the CPU's table holds twice the numbers
    shape = blocks.out_features, blocks.in_features
    codes, scales = codes.view(shape), scales.view(shape[0], -1)
    zeros = None
    if mins is not None:
        mins = mins.view(shape[0], -1)
        # a group of scale 0 is min throughout: code 0 less a zero point of 1, times -min
        is_flat = scales == 0
        zeros = torch.where(is_flat, 1.0, -mins / torch.where(is_flat, 1.0, scales))
        codes = codes.masked_fill(is_flat.repeat_interleave(GROUP, 1)[:, : shape[1]], 0)
        scales = torch.where(is_flat, -mins, scales)
    return CodedMatrix(code, codes, scales, GROUP, zeros, bits=4 if kind.format.has_nibbles else 8)

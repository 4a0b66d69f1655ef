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

BLOCK = 128
HALF = BLOCK // 2
SHORT_CODES = (Code.E2M1, Code.NF4, Code.FP4)


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
    codes = matrix.codes if order is None else matrix.codes[:, order]
    is_short = matrix.code in SHORT_CODES or (codes.dtype == torch.uint8 and matrix.bits <= 4)
    return DeviceCodes(
        matrix.code, matrix.shape[1], _pair_halves(codes) if is_short else codes.contiguous(),
        _narrow(matrix.scales).contiguous(), matrix.group,
        None if matrix.zeros is None else matrix.zeros.half().contiguous(), matrix.rows, order,
        torch.tensor(TABLES[matrix.code], device=matrix.device) if matrix.code in TABLES else None,
    )


def _narrow(scales: torch.Tensor) -> torch.Tensor:
    """float16 where that holds the scales exactly, else float32."""
    narrow = scales.half()
    return narrow if torch.equal(narrow.float(), scales.float()) else scales.float()


def _pair_halves(codes: torch.Tensor) -> torch.Tensor:
    blocks = F.pad(codes, (0, -codes.shape[1] % BLOCK)).unflatten(1, (-1, 2, HALF))
    return (blocks[:, :, 0] | blocks[:, :, 1] << 4).flatten(1)

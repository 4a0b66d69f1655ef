"""Convert GGUF's quantised blocks to packed layout, without a float copy of the weight.

A block is a run of inputs of one output with its own scales; ggml's ``ggml-quants`` defines the types. Types with a
scale for fewer than 32 inputs, or with irregular values, are rounded to 8 bits with a scale per 32 inputs, which is
finer than they are. n blocks, O outputs. Bytes are little-endian; offsets below are byte offsets in a block.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from headrace.kernels.native.loading import NATIVE, NativeOps
from headrace.kernels.packed_linear.layout import (
    PANEL,
    TABLES,
    Format,
    PackedMatrix,
    allocate,
    pad_up,
    put_codes,
    put_groups,
)
from headrace.kernels.packed_linear.quantise import round_groups

SUPER = 256
"""Inputs of a K-quant super-block."""
CHUNK_WEIGHTS = 1 << 20
"""Weights that a thread reads at a time, which bounds its temporaries."""

NATIVE_KINDS = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
    "MXFP4_PAIRS"
)
"""Types that C++ converts. The order is that of the enumeration in ``csrc/cpu/blocks.h``."""

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes [n, inputs], uint8 below 16 (raw nibbles) or int8; scales and mins float32 [n, groups of 32 inputs], mins None
for zeros. A weight is code * scale + min."""


@dataclass(frozen=True)
class BlockType:
    """A type: a block of ``num_bytes`` holds ``inputs`` weights. ``read`` decodes blocks uint8 [n, num_bytes];
    ``has_mins``: it returns mins. ``fits``: whether the scales of such blocks fit float16, for types whose may not."""

    inputs: int
    num_bytes: int
    format: Format
    read: Callable[[torch.Tensor], Parts]
    has_mins: bool = False
    fits: Callable[[torch.Tensor], bool] | None = None


@dataclass(frozen=True)
class WeightBlocks:
    """A weight [O, I] as in the file: ``kind`` is a name in `BLOCK_TYPES`, ``raw`` uint8 [O, bytes of a row]."""

    kind: str
    raw: torch.Tensor

    @property
    def out_features(self) -> int:
        return self.raw.shape[0]

    @property
    def in_features(self) -> int:
        kind = BLOCK_TYPES[self.kind]
        return self.raw.shape[1] // kind.num_bytes * kind.inputs

    @property
    def can_be_packed(self) -> bool:
        """Whether the packed layout can hold these numbers: its scales are float16."""
        kind = BLOCK_TYPES[self.kind]
        return kind.fits is None or kind.fits(self.raw.view(-1, kind.num_bytes))


def pack_blocks(parts: list[WeightBlocks]) -> PackedMatrix:
    """Pack weights of equal inputs, stacked along outputs. If their formats differ, all are rounded to 8 bits."""
    kinds = [BLOCK_TYPES[part.kind] for part in parts]
    form = kinds[0].format if len({kind.format for kind in kinds}) == 1 else Format.INT8_GROUP
    packed = allocate(
        form, sum(part.out_features for part in parts), parts[0].in_features,
        has_mins=any(kind.has_mins for kind in kinds)
    )
    ops = NATIVE.find()
    if ops is not None and all(part.kind in NATIVE_KINDS for part in parts):
        _pack_natively(ops, parts, packed)
    else:
        _pack_by_torch(parts, packed)
    return packed


def _pack_natively(ops: NativeOps, parts: list[WeightBlocks], packed: PackedMatrix) -> None:
    at = 0  # first row of the part in the stacked weight; the native library takes any
    for part in parts:
        ops.pack_blocks(part.raw, NATIVE_KINDS.index(part.kind), at, packed.words, packed.scales, packed.mins)
        at += part.out_features


def _pack_by_torch(parts: list[WeightBlocks], packed: PackedMatrix) -> None:
    step = pad_up(max(1, CHUNK_WEIGHTS // packed.in_features), PANEL)
    pieces = [(BLOCK_TYPES[part.kind], rows) for part in parts for rows in part.raw.split(step)]
    # Threads read pieces, `map` returns them in order, and this thread alone writes. A part's rows need not be a
    # multiple of 16, so pieces wait until together they fill whole panels: ``at`` is always a multiple of 16.
    waiting: list[Parts] = []
    at = num_waiting = 0
    with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="blocks") as pool:
        for read in pool.map(lambda piece: _read_rows(piece[0], piece[1], packed.format), pieces):
            waiting.append(read)
            num_waiting += len(read[0])
            if num_waiting % PANEL == 0 or at + num_waiting == packed.out_features:  # panels are written whole
                _put(packed, at, waiting)
                at, num_waiting, waiting = at + num_waiting, 0, []


def _read_rows(kind: BlockType, rows: torch.Tensor, form: Format) -> Parts:
    """Decode ``rows`` uint8 [n, bytes of a row] to codes [n, I] for format ``form``, scales and mins [n, groups]."""
    codes, scales, mins = kind.read(rows.reshape(-1, kind.num_bytes))
    mins = torch.zeros_like(scales) if mins is None else mins
    # nibbles of a part whose neighbours need 8 bits become int8 codes, through the type's table if it has one
    if not form.has_nibbles:
        codes = TABLES[kind.format][codes.int()] if kind.format in TABLES else codes.to(torch.int8)
    return codes.view(len(rows), -1), scales.view(len(rows), -1), mins.view(len(rows), -1)


def _put(packed: PackedMatrix, at: int, parts: list[Parts]) -> None:
    codes, scales, mins = (torch.cat(column) for column in zip(*parts, strict=True))
    put_codes(packed, at, codes)
    put_groups(packed, at, scales, mins)


def _nibbles(packed_bytes: torch.Tensor) -> torch.Tensor:
    """Bytes [..., b] to nibbles [..., 2 b]: all low ones, then all high ones."""
    return torch.cat((packed_bytes & 15, packed_bytes >> 4), dim=-1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte ``at`` of each block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _fifth_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The 32 bits from byte ``at`` on, as the fifth bit of codes: uint8 [n, 32] of 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[:, at : at + 4].unsqueeze(2) >> shifts & 1) << 4).flatten(1)


def _read_q4_0(blocks: torch.Tensor) -> Parts:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 2:]), scale, scale * -8


def _read_q4_1(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _read_q5_0(blocks: torch.Tensor) -> Parts:
    return (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).to(torch.int8) - 16, _half(blocks, 0), None


def _read_q5_1(blocks: torch.Tensor) -> Parts:
    return (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).to(torch.int8), _half(blocks, 0), _half(blocks, 2)


def _read_q8_0(blocks: torch.Tensor) -> Parts:
    return blocks[:, 2:].contiguous().view(torch.int8), _half(blocks, 0), None


class SuperParts(NamedTuple):
    """Super-blocks of a K type as integers: ``codes`` [n, 256], unsigned where there are mins, else signed; ``scales``
    [n, 8 or 16] of 32 or 16 inputs, int8; ``mins`` [n, 8] uint8 or None; ``factors`` of scales and ``min_factors`` of
    mins, float16 [n, 1]. A weight is factor * scale * code - min_factor * min."""

    codes: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor
    mins: torch.Tensor | None = None
    min_factors: torch.Tensor | None = None

    def read(self) -> Parts:
        """With scales multiplied."""
        scales = self.scales.float() * self.factors.float()
        if self.mins is None or self.min_factors is None:
            return self.codes, scales, None
        return self.codes, scales, self.mins.float() * -self.min_factors.float()


def _raw_half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte ``at`` of each block, [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _scales_and_mins(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and mins of Q4_K and Q5_K, uint8 [n, 8] each. A block begins with two float16, the factors of scales and
    mins, and twelve bytes that hold eight 6-bit scales and eight 6-bit mins: numbers 0 to 3 in the low six bits of the
    first eight bytes; of numbers 4 to 7 the low four bits in the last four bytes, the high two in the top bits of the
    first eight."""
    low, middle, high = (blocks[:, 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scales = torch.cat((low & 63, (high & 15) | (low >> 2 & 48)), dim=1)
    mins = torch.cat((middle & 63, (high >> 4) | (middle >> 2 & 48)), dim=1)
    return scales, mins


def _split_q4_k(blocks: torch.Tensor) -> SuperParts:
    scales, mins = _scales_and_mins(blocks)
    codes = _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).flatten(1)
    return SuperParts(codes, scales.view(torch.int8), _raw_half(blocks, 0), mins, _raw_half(blocks, 2))


def _split_q5_k(blocks: torch.Tensor) -> SuperParts:
    scales, mins = _scales_and_mins(blocks)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(8, 1)
    fifth = (blocks[:, None, 16:48] >> shifts & 1) << 4
    codes = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).flatten(1) | fifth.flatten(1)
    return SuperParts(codes, scales.view(torch.int8), _raw_half(blocks, 0), mins, _raw_half(blocks, 2))


def _split_q6_k(blocks: torch.Tensor) -> SuperParts:
    # Two halves of 128 inputs: 64 bytes of low nibbles each, then 32 bytes with the two high bits of four inputs each;
    # at 192 sixteen int8 scales, for 16 inputs each, at 208 their common float16 factor.
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64)))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(4, 1)
    high = (blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts & 3).flatten(2) << 4
    codes = ((low | high).view(torch.int8) - 32).flatten(1)
    return SuperParts(codes, blocks[:, 192:208].contiguous().view(torch.int8), _raw_half(blocks, 208))


def _split_q3_k(blocks: torch.Tensor) -> SuperParts:
    # 32 bytes with a high bit of eight inputs each, 0 for codes less 4; 64 bytes with two low bits of four inputs each;
    # at 96 twelve bytes of sixteen 6-bit scales, stored plus 32: low nibbles, then the two high bits; at 108 a factor
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(8, 1)
    low = (blocks[:, 32:96].unflatten(1, (2, 1, 32)) >> 2 * shifts[:4] & 3).flatten(1)
    is_less = (blocks[:, None, :32] >> shifts & 1).flatten(1) ^ 1
    codes = low.view(torch.int8) - (is_less << 2).view(torch.int8)
    high = (blocks[:, None, 104:108] >> 2 * shifts[:4] & 3).flatten(1) << 4
    return SuperParts(codes, (_nibbles(blocks[:, 96:104]) | high).view(torch.int8) - 32, _raw_half(blocks, 108))


SUPER_PARTS = {"Q3_K": _split_q3_k, "Q4_K": _split_q4_k, "Q5_K": _split_q5_k, "Q6_K": _split_q6_k}
"""K types whose scales come in two levels, by ggml's names: blocks uint8 [n, num_bytes] to `SuperParts`."""


def _read_q4_k(blocks: torch.Tensor) -> Parts:
    return _split_q4_k(blocks).read()


def _read_q5_k(blocks: torch.Tensor) -> Parts:
    codes, scales, mins = _split_q5_k(blocks).read()
    return codes.view(torch.int8), scales, mins


def _read_q6_k(blocks: torch.Tensor) -> Parts:
    codes, scales, _ = _split_q6_k(blocks).read()
    values = codes.float().view(-1, SUPER // 16, 16) * scales.unsqueeze(2)
    return *round_groups(values.flatten(1)), None


def _read_by_gguf(name: str, blocks: torch.Tensor) -> Parts:
    """Dequantise by the gguf package, then round to 8 bits: for types that are rare."""
    from gguf.constants import GGMLQuantizationType  # the import takes 0.1 s, and few files need it
    from gguf.quants import dequantize

    values = torch.from_numpy(dequantize(blocks.to("cpu").numpy(), GGMLQuantizationType[name]))
    return *round_groups(values.to(blocks.device)), None


ROUNDED_SIZES = {
    "Q2_K": 84, "Q3_K": 110, "IQ1_S": 50, "IQ1_M": 56, "IQ2_XXS": 66, "IQ2_XS": 74, "IQ2_S": 82, "IQ3_XXS": 98,
    "IQ3_S": 110, "TQ1_0": 54, "TQ2_0": 66,
}
"""Bytes of a super-block of 256 weights, for types that are read by `_read_by_gguf`."""


def _read_iq4_nl(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), None


def _read_iq4_xs(blocks: torch.Tensor) -> Parts:
    """A float16 factor; 16 bits with the two high bits of eight scales; 4 bytes with their low nibbles; then the codes
    of eight groups of 32 inputs, one after the other. Scales are stored plus 32."""
    shifts = torch.arange(0, 16, 2, dtype=torch.int32, device=blocks.device)
    high = (blocks[:, 2:3].int() | blocks[:, 3:4].int() << 8) >> shifts & 3
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    return (
        _nibbles(blocks[:, 8:].unflatten(1, (8, 16))).flatten(1), (low.int() | high << 4).sub(32) * _half(blocks, 0),
        None
    )


MOST_SCALE = 128 + 15
"""The largest scale byte whose halved scale, 2 ** (byte - 128), float16 can hold."""


def _read_mxfp4(blocks: torch.Tensor) -> Parts:
    """E2M1 numbers times an E8M0 scale: OCP Microscaling Formats 1.0, sections 5.3 and 5.4. `TABLES` holds twice the
    numbers, as integers, so scales are halved; those below 2^-24 become 0 in float16."""
    return _nibbles(blocks[:, 1:]), torch.exp2(blocks[:, :1].float() - 128), None


def _read_mxfp4_pairs(blocks: torch.Tensor) -> Parts:
    codes = blocks[:, 1:]
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1), *_read_mxfp4(blocks)[1:]


def _has_small_scales(blocks: torch.Tensor) -> bool:
    return not blocks.numel() or int(blocks[:, 0].amax()) <= MOST_SCALE


BLOCK_TYPES = {
    "Q4_0": BlockType(32, 18, Format.INT4_GROUP, _read_q4_0, has_mins=True),
    "Q4_1": BlockType(32, 20, Format.INT4_GROUP, _read_q4_1, has_mins=True),
    "Q5_0": BlockType(32, 22, Format.INT8_GROUP, _read_q5_0),
    "Q5_1": BlockType(32, 24, Format.INT8_GROUP, _read_q5_1, has_mins=True),
    "Q8_0": BlockType(32, 34, Format.INT8_GROUP, _read_q8_0),
    "Q4_K": BlockType(SUPER, 144, Format.INT4_GROUP, _read_q4_k, has_mins=True),
    "Q5_K": BlockType(SUPER, 176, Format.INT8_GROUP, _read_q5_k, has_mins=True),
    "Q6_K": BlockType(SUPER, 210, Format.INT8_GROUP, _read_q6_k),
    "IQ4_NL": BlockType(32, 18, Format.IQ4_GROUP, _read_iq4_nl),
    "IQ4_XS": BlockType(SUPER, 136, Format.IQ4_GROUP, _read_iq4_xs),
    "MXFP4": BlockType(32, 17, Format.E2M1_GROUP, _read_mxfp4, fits=_has_small_scales),
    "MXFP4_PAIRS": BlockType(32, 17, Format.E2M1_GROUP, _read_mxfp4_pairs, fits=_has_small_scales),
    **{
        name: BlockType(SUPER, size, Format.INT8_GROUP, partial(_read_by_gguf, name)) for name,
        size in ROUNDED_SIZES.items()
    },
}
"""By ggml's names, except MXFP4_PAIRS: there two neighbouring inputs share a byte, as in checkpoints of
transformers."""

"""`DeviceCodes`: the layout in which GPU kernels read a quantised weight. O outputs, I inputs, G groups of inputs.

Codes of 8 bits are kept a byte each, row by row, so that a library's FP8 GEMM reads them too. Codes of at most 4 bits
are kept two to a byte, in blocks of `BLOCK` inputs: byte b of a block has input b in its low half and input b + 64 in
its high half. A kernel thus unpacks a tile of bytes into two tiles of consecutive inputs, and moves nothing between
threads. Tables have a value per output and group, whatever the groups' size.

A weight of integers may be in tiles, for ``csrc/cuda/tiled_rows.cu``: eight rows share a piece of memory, in which 64
bytes of each, then the next 64 bytes of each, follow one another; so do a group's scales of eight rows. Weights whose
scales come in two levels, see `Supers`, are read by kernels in tiles alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F

from headrace.kernels.coded_linear.codes import LEAST_GROUP, TABLES, Code, CodedMatrix
from headrace.kernels.packed_linear.blocks import BLOCK_TYPES, SUPER, WeightBlocks
from headrace.kernels.packed_linear.layout import GROUP, Format

BLOCK = 128
HALF = BLOCK // 2
TILE_ROWS, MATRIX_ROWS, MOST_UNITS = 8, 16, 16
"""Rows of a tile; outputs that a kernel multiplies at a time; most units of 64 bytes that share a scale, but for one
scale of all."""
LOW = 0x0F0F0F0F0F0F0F0F
"""Of eight bytes, their low halves."""
POWER_GROUP = 32
"""Inputs that share a power of two."""
SHORT_CODES = tuple(TABLES)
LIFT = 126
"""A power of two is kept as its float32 exponent plus this: the exponent of a bfloat16 that turns the bits of an e2m1
code, at the end of bfloat16's exponent, into the code's number times that power."""
LEAST_POWER, MOST_POWER = 2.0**-126, 2.0
BLOCK_CODES = {Format.E2M1_GROUP: Code.E2M1, Format.IQ4_GROUP: Code.IQ4}
"""Of GGUF's types; others are integers."""


class Supers(NamedTuple):
    """The form of a weight of super-blocks of `SUPER` inputs, as GGUF's K types have them; I is a multiple of it.

    ``bits`` of a code: 4 as in other weights, or 6, of which 16 are kept in three words of four bytes: byte b of word
    w has code 4 * w + b in its high bits, and in its low ones two bits of code 12 + b, the highest of which are in word
    0. Of each 128 inputs, with plane p the 64 from 64 * p on, and piece q of it the 16 from 16 * q on, there are words
    0 to 2 of plane 0 and word 0 of plane 1 of all four pieces, 64 bytes, then words 1 and 2 of plane 1, 32 bytes.

    ``has_mins``: a weight is factor * scale * code - min_factor * min, of unsigned codes, and ``scales`` uint8 [O, I /
    256 * 16]: both factors in float16, then for each 128 inputs, and each half h of its planes, 24 bits with the scales
    of the 32 inputs from 32 * h on of both planes, then their mins, 6 bits each. Otherwise it is factor * scale * code,
    of signed codes (two's complement), and ``scales`` uint8 [O, I / 256 * 18]: for each 128 inputs and each piece the
    int8 scales of its inputs in both planes, then the factor in float16.

    In tiles, scales are [O / 8, I / 256, 8, 16], without mins each followed by the factors of all eight rows, and codes
    of 6 bits [O / 8, I / 128, 768]: 64 bytes of each row, then 32 of each."""

    bits: int
    has_mins: bool

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return 32 if self.has_mins else 16

    @property
    def row_bytes(self) -> int:
        """Of scales of a super-block."""
        return 16 if self.has_mins else 18

    @property
    def number(self) -> int:
        """What kernels call the form."""
        return 1 + (self.bits == 6) + 2 * (not self.has_mins)


class Place(NamedTuple):
    """``width`` elements of a row, from the ``first`` on, of each ``unit`` of them."""

    unit: int
    first: int
    width: int

    @property
    def end(self) -> int:
        return self.first + self.width


@dataclass(frozen=True)
class DeviceCodes:
    """A weight [O, I]. ``codes``: uint8 [O, ceil(I / 128) * 64] of short codes, else int8, uint8 or float8_e4m3fn [O,
    I]. ``scales`` of blocks of ``rows`` outputs and ``group`` inputs, in one of three forms, each of which kernels read
    in words of 4 bytes: float32 [ceil(O / rows), G]; int32 of the same shape, a float16 scale in the low half and its
    zero point in the high half; uint8 [ceil(O / rows), ceil(I / 128) * 4] of e2m1 codes in groups of 32, powers of two
    as `LIFT` makes them. ``zeros`` float32 like float32 scales, or None. ``order`` [I]: the input at each place, where
    groups are not consecutive inputs. ``values`` [16]: float32 values of short codes that are no integers, else None.
    ``has_whole_zeros``: zeros are whole numbers below 128, or 0 throughout. ``is_tiled``: in memory ``codes`` are
    [O / 8, bytes of a row / 64, 8, 64], and ``scales`` [O / 8, G, 8], while shapes stay as they are. ``supers``: scales
    come in two levels, and ``codes`` are uint8 [O, I * bits / 8]. ``tail``: rows that follow, counted in O, of other
    supers."""

    code: Code
    in_features: int
    codes: torch.Tensor
    scales: torch.Tensor
    group: int
    zeros: torch.Tensor | None = None
    rows: int = 1
    order: torch.Tensor | None = None
    values: torch.Tensor | None = None
    has_whole_zeros: bool = False
    is_tiled: bool = False
    supers: Supers | None = None
    tail: DeviceCodes | None = None

    @property
    def out_features(self) -> int:
        return self.codes.shape[0] + (0 if self.tail is None else self.tail.out_features)

    @property
    def parts(self) -> list[DeviceCodes]:
        """Rows of one form each, above one another."""
        return [self] if self.tail is None else [replace(self, tail=None), *self.tail.parts]

    @property
    def bits(self) -> int:
        """Of a code, as it is kept."""
        return 4 if self.is_short else 8 if self.supers is None else self.supers.bits

    @property
    def is_short(self) -> bool:
        """Whether a byte holds two codes."""
        if self.supers is not None:
            return self.supers.bits == 4
        return self.code in SHORT_CODES or self.codes.shape[1] != self.in_features

    @property
    def num_groups(self) -> int:
        """Groups of inputs with a scale each, G."""
        is_counted = self.supers is not None or self.has_powers
        return -(-self.in_features // self.group) if is_counted else self.scales.shape[1]

    @property
    def has_powers(self) -> bool:
        """Whether scales are powers of two, a byte each."""
        return self.scales.dtype == torch.uint8 and self.supers is None

    @property
    def has_pairs(self) -> bool:
        """Whether scales and zeros share words."""
        return self.scales.dtype == torch.int32

    @property
    def has_zeros(self) -> bool:
        return self.has_pairs or self.zeros is not None

    @property
    def float_scales(self) -> torch.Tensor:
        """Scales [ceil(O / rows), G] float32."""
        if self.has_powers:
            return ((self.scales.int() - LIFT) << 23).view(torch.float32)[:, : self.num_groups]
        return self.scales.view(torch.float16)[:, ::2].float() if self.has_pairs else self.scales

    @property
    def float_zeros(self) -> torch.Tensor | None:
        """Zeros [ceil(O / rows), G] float32; None for zeros."""
        return self.scales.view(torch.float16)[:, 1::2].float() if self.has_pairs else self.zeros

    def fault_of_stack(self, outputs: int) -> str | None:
        """Why kernels cannot multiply with stacked matrices of so many ``outputs`` each; None if they can."""
        if self.order is not None:
            return "its inputs are in activation order"
        if self.num_groups > 1 and self.group % LEAST_GROUP:
            return f"its scales are of {self.group} inputs, and kernels take multiples of {LEAST_GROUP}"
        if self.rows > 1 and outputs % self.rows:
            return f"scales of {self.rows} outputs do not divide the {outputs} of a matrix"
        return None

    @property
    def fault_of_tiles(self) -> str | None:
        """Why the weight cannot be kept in tiles; None if it can."""
        unit = BLOCK if self.is_short else HALF
        if self.supers is not None:
            has_whole = all(len(part.codes) % MATRIX_ROWS == 0 for part in self.parts)
            return None if has_whole else f"takes outputs in steps of {MATRIX_ROWS}"
        if self.code is not Code.INT or self.rows > 1 or self.zeros is not None:
            return "takes integers with scales of single outputs, and zero points that float16 holds"
        if self.out_features % MATRIX_ROWS or self.in_features % unit:
            return f"takes outputs in steps of {MATRIX_ROWS} and inputs in steps of {unit}"
        if self.num_groups > 1 and self.group not in (32, 64) and (
            self.group % BLOCK or self.in_features % self.group or MOST_UNITS % (self.group // unit)
        ):
            return f"takes scales of 32 or 64 inputs, or a power of two from {BLOCK} to {MOST_UNITS * unit}"
        return None

    def tile(self) -> DeviceCodes:
        """The same weight in tiles. Needs that it has no `fault_of_tiles`."""
        codes, scales = (
            torch.cat([self._part(table, place, is_tiled=False).transpose(1, 2).flatten(2) for place in places], dim=2)
            for table, places in ((self.codes, self._code_places), (self.scales, self._scale_places))
        )
        return replace(
            self, codes=codes.view(self.codes.shape), scales=scales.view(self.scales.shape), is_tiled=True,
            tail=None if self.tail is None else self.tail.tile()
        )

    def untile(self) -> DeviceCodes:
        """The same weight row by row."""
        if not self.is_tiled:
            return self
        codes, scales = (
            torch.cat([self._part(table, place, is_tiled=True).transpose(1, 2) for place in places], dim=3)
            for table, places in ((self.codes, self._code_places), (self.scales, self._scale_places))
        )
        return replace(
            self, codes=codes.reshape(self.codes.shape), scales=scales.reshape(self.scales.shape), is_tiled=False,
            tail=None if self.tail is None else self.tail.untile()
        )

    @property
    def _code_places(self) -> tuple[Place, ...]:
        """Of a unit of a row: what of all eight rows of a tile lies together."""
        if self.supers is None or self.supers.bits == 4:
            return (Place(HALF, 0, HALF),)
        return Place(96, 0, HALF), Place(96, HALF, 32)

    @property
    def _scale_places(self) -> tuple[Place, ...]:
        if self.supers is None:
            return (Place(1, 0, 1),)
        whole = Place(self.supers.row_bytes, 0, 16)
        return (whole,) if self.supers.has_mins else (whole, Place(self.supers.row_bytes, 16, 2))

    @staticmethod
    def _part(table: torch.Tensor, place: Place, *, is_tiled: bool) -> torch.Tensor:
        """A part of each unit of a table in tiles [O / 8, units, 8, width], or of one row by row [O / 8, 8, units,
        width]."""
        if not is_tiled:
            return table.view(-1, TILE_ROWS, table.shape[1] // place.unit, place.unit)[..., place.first : place.end]
        units = table.view(-1, table.shape[1] // place.unit, TILE_ROWS * place.unit)
        return units[..., TILE_ROWS * place.first : TILE_ROWS * place.end].unflatten(2, (TILE_ROWS, place.width))

    def split(self, most: int) -> list[DeviceCodes]:
        """Views of consecutive outputs, of at most about ``most`` weights each, but a tile's or a block's outputs."""
        if self.tail is not None:
            return [share for part in self.parts for share in part.split(most)]
        block = math.lcm(self.rows, TILE_ROWS)
        step = max(1, most // max(1, self.in_features) // block) * block
        if step >= self.out_features:
            return [self]
        tables = step // self.rows
        zeros = repeat(None) if self.zeros is None else self.zeros.split(tables)
        return [
            replace(self, codes=codes, scales=scales, zeros=own)
            for codes, scales, own in zip(self.codes.split(step), self.scales.split(tables), zeros, strict=False)
        ]

    def transform(self, function: Callable[[torch.Tensor], torch.Tensor]) -> DeviceCodes:
        """The same weight with ``function`` of each tensor in its place."""
        zeros, order, values = (
            None if tensor is None else function(tensor) for tensor in (self.zeros, self.order, self.values)
        )
        return replace(
            self, codes=function(self.codes), scales=function(self.scales), zeros=zeros, order=order, values=values,
            tail=None if self.tail is None else self.tail.transform(function)
        )

    def copy(self) -> DeviceCodes:
        """The same codes and tables elsewhere in memory."""
        return self.transform(torch.clone)

    def resize(self, outputs: int, inputs: int) -> DeviceCodes | None:
        """A weight of zeros of another size, in the same form; in tiles only if these hold it. None where the form has
        no such size. Of several forms, the first."""
        group = self.group if self.num_groups > 1 or self.has_powers else inputs
        num_groups, codes = -(-inputs // group), -(-inputs // BLOCK) * HALF if self.is_short else inputs
        if self.has_powers:
            num_groups = -(-inputs // BLOCK) * (BLOCK // POWER_GROUP)
        if self.supers is not None:
            if inputs % SUPER or outputs % MATRIX_ROWS:
                return None
            codes, num_groups = inputs * self.supers.bits // 8, inputs // SUPER * self.supers.row_bytes
        scales = self.scales.new_zeros(-(-outputs // self.rows), num_groups)
        resized = replace(
            self, in_features=inputs, codes=self.codes.new_zeros(outputs, codes), scales=scales, group=group,
            zeros=None if self.zeros is None else torch.zeros_like(scales), tail=None,
            order=None if self.order is None else torch.arange(inputs, device=scales.device),
        )
        return replace(resized, is_tiled=self.is_tiled and resized.fault_of_tiles is None)

    @property
    def num_bytes(self) -> int:
        tensors = (self.codes, self.scales, self.zeros, self.order, self.values)
        own = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        return own + (0 if self.tail is None else self.tail.num_bytes)


class Fp8Rows(NamedTuple):
    """Rows in FP8: ``codes`` [T, I] float8_e4m3fn and ``scales`` float32, [T] or by groups of inputs [G, T]. A value is
    code * scale."""

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, width: int, group: int, device: torch.device) -> Fp8Rows:
        """Memory for rows with scales of a ``group`` of inputs, 0: of a row."""
        codes = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=device)
        shape = (-(-width // group), rows) if group else (rows,)
        return cls(codes, torch.empty(shape, dtype=torch.float32, device=device))

    @property
    def num_rows(self) -> int:
        return self.codes.shape[0]

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """The rows [T, I] as plain numbers."""
        scales = self.scales[:, None] if self.scales.dim() == 1 else self.scales.t()
        size = -(-self.codes.shape[1] // scales.shape[1])
        size = 1 << (size - 1).bit_length() if scales.shape[1] > 1 else size  # a group is a power of two
        return (self.codes.to(dtype) * scales.to(dtype).repeat_interleave(size, 1)[:, : self.codes.shape[1]])


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
    group, scales, zeros = _make_tables(matrix)
    return DeviceCodes(
        matrix.code, matrix.shape[1], _pair_halves(codes) if is_short else codes.contiguous(), scales, group, zeros,
        matrix.rows, order, torch.tensor(TABLES[matrix.code], device=matrix.device) if matrix.code in TABLES else None,
        _are_whole(matrix.zeros),
    )


def _make_tables(matrix: CodedMatrix) -> tuple[int, torch.Tensor, torch.Tensor | None]:
    """Group, scales and zeros in the narrowest form of `DeviceCodes` that holds them exactly."""
    scales, zeros = matrix.scales.float(), matrix.zeros
    if zeros is None:
        powers = _find_powers(scales) if matrix.code is Code.E2M1 and matrix.group % POWER_GROUP == 0 else None
        if powers is None:
            return matrix.group, scales.contiguous(), None
        powers = powers.repeat_interleave(matrix.group // POWER_GROUP, 1)[:, : -(-matrix.shape[1] // POWER_GROUP)]
        return POWER_GROUP, F.pad(powers, (0, -powers.shape[1] % (BLOCK // POWER_GROUP))).contiguous(), None
    pairs = torch.stack((scales, zeros.float()), dim=-1)
    narrow = pairs.half()
    if torch.equal(narrow.float(), pairs):
        return matrix.group, narrow.view(torch.int32).squeeze(-1).contiguous(), None
    return matrix.group, scales.contiguous(), zeros.float().contiguous()


def _find_powers(scales: torch.Tensor) -> torch.Tensor | None:
    """Scales as `LIFT` keeps powers of two; None unless all are such in its bounds."""
    mantissa, exponent = torch.frexp(scales)  # a mantissa is at least 1/2
    fit = (mantissa == 0.5) & (scales >= LEAST_POWER) & (scales <= MOST_POWER)
    return (exponent + 126 + LIFT).to(torch.uint8) if bool(fit.all()) else None


def _round_pairs(scales: torch.Tensor, zeros: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both rounded to float16, as on a CPU, so that a word holds them; unchanged where they do not fit it."""
    narrow = [table.half().float() for table in (scales, zeros)]
    fits = all(
        bool(((own - table).abs() <= table.abs() * 2.0**-11).all())
        for own, table in zip(narrow, (scales, zeros), strict=True)
    )
    return (narrow[0], narrow[1]) if fits else (scales, zeros)


def _are_whole(zeros: torch.Tensor | None) -> bool:
    """Whether zero points are whole numbers that bfloat16 kernels subtract exactly."""
    return zeros is None or bool(((zeros == zeros.round()) & (zeros >= 0) & (zeros < 128)).all())


def _pair_halves(codes: torch.Tensor) -> torch.Tensor:
    blocks = F.pad(codes, (0, -codes.shape[1] % BLOCK)).unflatten(1, (-1, 2, HALF))
    return (blocks[:, :, 0] | blocks[:, :, 1] << 4).flatten(1)


def reorder_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [..., I / 2] of two neighbouring inputs each, as checkpoints have MXFP4, in the order of this layout; I a
    multiple of `BLOCK`."""
    # eight bytes at a time, as half of the operations move no bits across them: the ends of a block's halves
    words = codes.contiguous().view(torch.int64).unflatten(-1, (-1, HALF // 8))
    first, second = words[..., : HALF // 16], words[..., HALF // 16 :]
    even = (first & LOW) | (second & LOW) << 4
    odd = (first >> 4 & LOW) | second & ~LOW
    return torch.stack((even.view(torch.uint8), odd.view(torch.uint8)), dim=-1).flatten(-3).view(codes.shape)


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
        scales, zeros = _round_pairs(scales, zeros)
    return CodedMatrix(code, codes, scales, GROUP, zeros, bits=4 if kind.format.has_nibbles else 8)

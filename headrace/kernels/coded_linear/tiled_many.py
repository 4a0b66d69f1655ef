"""Products of tens to hundreds of rows with integers of 4 or 6 bits in tiles on Hopper by own CUDA C++
(``csrc/cuda/tiled_many.cu``, which says how they work), also with the gated activation after them or as partial sums.

M rows of x, N outputs, K inputs, S splits of K.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_int, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from headrace.kernels.coded_linear.cuda import arrange
from headrace.kernels.coded_linear.device_codes import BLOCK, HALF, MATRIX_ROWS, TILE_ROWS, DeviceCodes
from headrace.kernels.coded_linear.tiles import Form, describe_form
from headrace.kernels.coded_linear.triton import add_splits
from headrace.kernels.cuda_source import (
    MOST_BYTES,
    CudaKernel,
    cache_compiled,
    count_sms,
    describe_boxes,
    load_kernel,
)
from headrace.kernels.launch import ceil_div
from headrace.kernels.packed_linear.blocks import SUPER
from headrace.kernels.rowwise import Gate
from headrace.kernels.rowwise.triton import GATES

MOST_STAGES, SLACK_BYTES, BARRIER_BYTES = 8, 1024, 16
"""Of the ring in shared memory: to align it, and for each stage."""
LEAST_STAGES, LEAST_CODE_STAGES = 3, 2
"""With fewer stages of x and codes together, these have rings of their own: codes are read before products end."""
CLUSTER = 2
"""Blocks that share rows of x, as in the source."""
CODE_STEP = 512
"""Bytes that codes and scales of a stage are a multiple of, as in the source."""
WORD_BYTES = 4 * TILE_ROWS
"""Of a scale of each of eight rows."""


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in ("bias", "out", "parts")),
        *((name, c_int) for name in ("rows", "outputs", "inputs", "splits", "units_each", "head")),
    )


@dataclass(frozen=True)
class Tile:
    """A block multiplies ``rows`` rows of x by 64 * ``groups`` of the weight, decoding ``pieces`` times 16 inputs at a
    time."""

    rows: int
    groups: int
    pieces: int

    @property
    def width(self) -> int:
        """Rows of the weight."""
        return 64 * self.groups

    @property
    def x_bytes(self) -> int:
        """Of 128 inputs of x."""
        return self.rows * BLOCK * 2

    def count_room(self, form: Form) -> int:
        """Bytes for codes and scales of 128 inputs; of several forms, the most."""
        codes = max(self.count_code_bytes(own) for own in form.parts)
        return ceil_div(codes, CODE_STEP) * CODE_STEP

    def count_code_bytes(self, form: Form) -> int:
        """Of codes and scales alone that are copied at a time, of one form."""
        return self.width * count_row_bytes(form)

    def count_stages(self, form: Form) -> tuple[int, int]:
        """Of the ring in shared memory, and 0, or of codes if these have one of their own."""
        room, codes = MOST_BYTES - SLACK_BYTES, self.count_room(form) + BARRIER_BYTES
        stages = min(MOST_STAGES, room // (self.x_bytes + codes))
        apart = LEAST_STAGES * (self.x_bytes + BARRIER_BYTES) + LEAST_CODE_STAGES * codes
        return (LEAST_STAGES, LEAST_CODE_STAGES) if stages < LEAST_STAGES and apart <= room else (stages, 0)

    def count_bytes(self, form: Form) -> int:
        """Of shared memory."""
        stages, code_stages = self.count_stages(form)
        rings = stages * self.x_bytes + (code_stages or stages) * self.count_room(form)
        return SLACK_BYTES + rings + (stages + code_stages) * BARRIER_BYTES


def count_row_bytes(form: Form) -> int:
    """Of a unit of a row, with the scales that come with it: of a super-block, all."""
    return form.count_weight_bytes(SUPER // BLOCK) - form.count_codes(1) if form.super_form else HALF + 4 * form.groups


TILES = (Tile(64, 4, 2), Tile(96, 4, 2), Tile(128, 2, 4), Tile(192, 2, 4), Tile(256, 2, 2))
"""Those of sixteen that an H200 was fastest with. Each is a kernel, and another with an activation."""


class Plan(NamedTuple):
    """How a product is computed; ``units`` of 128 inputs for each of ``splits``, but fewer for the last."""

    tile: Tile
    splits: int
    units: int


def split_units(tile: Tile, units: int, splits: int) -> Plan | None:
    """The plan that splits so many units of 128 inputs; None if a block got none."""
    each = ceil_div(units, splits)
    last = units - (splits - 1) * each
    return Plan(tile, splits, each) if last >= 1 else None


class Size(NamedTuple):
    """Of a product, on a GPU of so many multiprocessors; ``outputs``: the weight's rows, of which ``tail`` are of
    another form than the others; ``super_form``: that of most of them."""

    rows: int
    outputs: int
    inputs: int
    num_sms: int
    tail: int = 0
    super_form: int = 0


SPLITS = (1, 2, 4, 8)
PRODUCT_CYCLES, DECODE_CYCLES, OVERLAP = 3.66, (370.0, 450.0, 590.0, 475.0, 570.0), 0.43
"""Of a unit of 128 inputs and a group: of its products for each row of x; of what decodes its rows of the weight, by
the form of super-blocks; and the part of the shorter of the two that is not hidden behind the longer. All are fitted to
times on an H200, but those of super-blocks, which have as many cycles for an instruction as the others."""
START_CYCLES, END_CYCLES, SUM_RATE = 6070.0, 3.1, 4800.0
"""Of a launch; of an item's end, for each row of x and group; and bytes of partial sums that are written in a cycle."""
ADD_CYCLES, ADD_RATE = 3400.0, 2000.0
"""Of another kernel that adds up partial sums, and bytes of them that it reads in a cycle."""


def estimate(size: Size, plan: Plan, *, adds: bool) -> float:
    """Cycles of a product; ``adds``: a kernel of its own adds up partial sums."""
    tile = plan.tile
    items = count_items(tile, size) * plan.splits
    products, decoding = PRODUCT_CYCLES * tile.groups * tile.rows, DECODE_CYCLES[size.super_form] * tile.groups
    step = max(products, decoding) + OVERLAP * min(products, decoding)
    item = plan.units * step + END_CYCLES * tile.groups * tile.rows
    cycles = START_CYCLES + ceil_div(items, count_clusters(size.num_sms)) * item
    if plan.splits > 1:
        num_bytes = 4 * plan.splits * size.rows * size.outputs
        cycles += num_bytes / SUM_RATE + (ADD_CYCLES + num_bytes / ADD_RATE if adds else 0.0)
    return cycles


def count_items(tile: Tile, size: Size) -> int:
    """Of a grid without splits, one for a cluster, whose outputs are of one form."""
    across = sum(ceil_div(own, CLUSTER * tile.width) for own in (size.outputs - size.tail, size.tail))
    return across * ceil_div(size.rows, tile.rows)


def measure_size(rows: int, weight: DeviceCodes, num_sms: int) -> Size:
    """Of a product of so many rows."""
    tail = 0 if weight.tail is None else weight.tail.out_features
    most = describe_form(max(weight.parts, key=lambda part: part.out_features))
    return Size(rows, weight.out_features, weight.in_features, num_sms, tail, most.super_form)


def count_clusters(num_sms: int) -> int:
    """Clusters that run at once."""
    return max(1, num_sms // CLUSTER)


@cache
def choose_plan(size: Size, *, can_split: bool, adds: bool) -> Plan:
    """That of the fewest estimated cycles; without splits where they cannot be added up."""
    units = size.inputs // BLOCK
    plans = [split_units(tile, units, splits) for tile in TILES for splits in (SPLITS if can_split else SPLITS[:1])]
    return min((plan for plan in plans if plan is not None), key=lambda plan: estimate(size, plan, adds=adds))


@cache_compiled
def find_kernel(form: Form, is_whole: bool, tile: Tile, gate: int, device: torch.device) -> CudaKernel:
    """The kernel, compiled (some seconds) unless cached; ``is_whole``: zero points are whole numbers below 128. Raises
    `CudaSourceError` and `OSError`."""
    stages, code_stages = tile.count_stages(form)
    return load_kernel(
        "tiled_many", device, MOST_BYTES, ROWS=tile.rows, GROUPS=tile.groups, PIECES=tile.pieces, STAGES=stages,
        CODE_STAGES=code_stages, GATE=gate, PAIRS=form.pairs, WHOLE=int(is_whole and not form.super_form),
        SCALE=form.group, SUPER_FORM=form.super_form, TAIL_FORM=form.tail_form,
    )


@cache_compiled
def prepare(form: Form, is_whole: bool, gate: int, device: torch.device) -> None:
    """Compile and load the kernels of all tiles: a number of rows that comes later finds its own."""
    for tile in TILES:
        find_kernel(form, is_whole, tile, gate, device)


class Boxes(NamedTuple):
    """Bytes, and how many of each dimension are copied at a time."""

    tensor: torch.Tensor
    box: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of a copy."""
        return math.prod(self.box)


def find_boxes(weight: DeviceCodes, tile: Tile, *, is_gated: bool) -> tuple[Boxes, Boxes]:
    """Units of a weight of one form [O / 16, 2, units, 8 or, of 6 bits, 12, 64], and their scales [O / 16, 2, G, 1, 32]
    or, of super-blocks, [O / 16, 2, I / 256, 4, 32] or without mins [O / 16, 2, I / 256, 1, 144]: pairs of eight rows,
    of gate and of up or one after the other."""
    units, words, pairs = weight.in_features // BLOCK, weight.scales.shape[1], weight.out_features // MATRIX_ROWS
    table_boxes = (weight.scales, words, describe_form(weight).groups, 1, WORD_BYTES)
    if weight.supers is not None:  # no copy swizzles lines of 32 bytes, or of 144
        num_bytes = TILE_ROWS * weight.supers.row_bytes
        line = WORD_BYTES if weight.supers.has_mins else num_bytes
        table_boxes = (weight.scales, words // weight.supers.row_bytes, 1, num_bytes // line, line)
    found = []
    code_boxes = (weight.codes, units, 1, TILE_ROWS * weight.codes.shape[1] // (units * HALF), HALF)
    for table, count, most, lines, line in (code_boxes, table_boxes):
        piece, eight = lines * line, count * lines * line
        near, far = (eight, pairs * eight) if is_gated else (2 * eight, eight)
        tensor = table.view(torch.uint8).as_strided((pairs, 2, count, lines, line), (near, far, piece, line, 1))
        found.append(Boxes(tensor, (tile.width // MATRIX_ROWS, 2, most, lines, line)))
    return found[0], found[1]


def launch(
    x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None, plan: Plan, *, gate: int = 0,
    keeps_sums: bool = False
) -> torch.Tensor:
    """The product [M, N] of x [M, K] with its bias and the activation ``gate`` of `GATES`, or partial sums [S, M, N]
    float32 without; with ``keeps_sums`` always these."""
    form, tile, rows = describe_form(weight), plan.tile, len(x)
    boxes: list[Boxes] = []
    for part in weight.parts:
        found = find_boxes(part, tile, is_gated=bool(gate))
        # a barrier that waited for other bytes than those that come would wait for ever
        assert sum(own.num_bytes for own in found) == tile.count_code_bytes(describe_form(part))
        boxes += found
    outputs = weight.out_features // (2 if gate else 1)
    keeps_sums = keeps_sums or plan.splits > 1
    shape, dtype = ((plan.splits, rows, outputs), torch.float32) if keeps_sums else ((rows, outputs), x.dtype)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    call = _Call(
        bias=None if bias is None else bias.data_ptr(), out=out.data_ptr(),
        parts=out.data_ptr() if keeps_sums else None, rows=rows, outputs=outputs, inputs=x.shape[1],
        splits=plan.splits, units_each=plan.units, head=len(weight.codes),
    )
    num_sms = count_sms(x.device)
    items = count_items(tile, measure_size(rows, weight, num_sms)) * plan.splits
    clusters = min(items, count_clusters(num_sms))
    find_kernel(form, weight.has_whole_zeros, tile, gate, x.device).launch(
        CLUSTER * clusters, 128 * (tile.groups + 1), describe_boxes(x, (tile.rows, HALF)),
        *(describe_boxes(own.tensor, own.box) for own in boxes), call, is_dependent=True,
    )
    return out


def _multiply(
    x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None, *, gate: int = 0, adds: bool = True,
    keeps_sums: bool = False
) -> torch.Tensor:
    """The product, or partial sums: see `launch`."""
    x = arrange(x, weight)
    size = measure_size(len(x), weight, count_sms(x.device))
    prepare(describe_form(weight), weight.has_whole_zeros, gate, x.device)
    plan = choose_plan(size, can_split=not gate, adds=adds)
    return launch(x, weight, bias, plan, gate=gate, keeps_sums=keeps_sums)


def multiply(x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None) -> torch.Tensor:
    """See `CODED_LINEAR`."""
    if not len(x):
        return x.new_empty(0, weight.out_features)
    out = _multiply(x, weight, bias)
    return out if out.dim() == 2 else add_splits(out, bias, x.dtype, pdl=True)


def multiply_sums(x: torch.Tensor, weight: DeviceCodes) -> torch.Tensor:
    """See `CODED_SUMS`."""
    return _multiply(x, weight, None, adds=False)


def multiply_float(x: torch.Tensor, weight: DeviceCodes) -> torch.Tensor:
    """See `CODED_FLOAT`."""
    sums = _multiply(x, weight, None, keeps_sums=True)
    return sums[0] if len(sums) == 1 else add_splits(sums, None, torch.float32, pdl=True)


def multiply_gated(
    x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None, gate: Gate
) -> torch.Tensor | None:
    """See `CODED_GATED`."""
    if gate.is_clamped or weight.tail is not None:
        return None
    if not len(x):
        return x.new_empty(0, weight.out_features // 2)
    return _multiply(x, weight, bias, gate=GATES[gate.kind])

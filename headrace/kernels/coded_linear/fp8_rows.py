"""Products of few rows with e4m3 weights on Hopper by own CUDA C++ (``csrc/cuda/fp8_rows.cu``, which says how they
work), also with the norm before them or the gated activation after them. Rows of x are rounded to e4m3 with a scale for
each 128 inputs.

M rows of x, O outputs, K inputs.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import asdict, dataclass, replace
from functools import cache

import torch

from headrace.kernels.coded_linear import fp8_split, grouped
from headrace.kernels.coded_linear.cuda import Addition, arrange
from headrace.kernels.coded_linear.device_codes import DeviceCodes
from headrace.kernels.cuda_source import (
    MOST_BYTES,
    CudaKernel,
    address_of,
    cache_compiled,
    count_sms,
    describe_boxes,
    fallback,
    keep_apart,
    load_kernel,
)
from headrace.kernels.launch import ceil_div
from headrace.kernels.linear import Norm
from headrace.kernels.rowwise import Gate
from headrace.kernels.rowwise.triton import GATES

BLOCK, TILE = 128, 64
"""As in the source: inputs of a block, rows of the weight in a tile, at most."""
MOST_SPLITS, MOST_X_BYTES = 8, 48 << 10
"""Programs of a cluster, and codes of x that one keeps."""
LEAST_SHARED = 2048
"""Inputs of a tile that two programs share for speed: of half as many a program's codes, 64 KB, are on their way at
once, before the previous kernel has ended, and sharing would add an exchange of sums."""
NUM_SMS = 132
"""Of an H100 or H200 (SXM)."""
MOST_GROUPED_ROWS = 8


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "residual", "norm", "bias", "out", "total", "scales")),
        *((name, c_int64) for name in ("x_stride", "residual_stride", "group_stride")),
        *((name, c_int) for name in ("group", "rows", "outputs", "inputs", "table", "shared", "chunks")),
        *((name, c_float) for name in ("eps", "offset", "limit", "alpha", "up_offset")),
    )


@dataclass(frozen=True)
class Shape:
    """Blocks of inputs of a tile, tiles of the ring, programs that share the inputs of a tile, warpgroups of a
    program, rows of the weight in a tile."""

    unit: int
    stages: int
    splits: int = 1
    groups: int = 2
    height: int = TILE


RING = Shape(4, 4)
LOWER = (Shape(4, 5, height=48), Shape(8, 4, height=32))
"""With lower tiles, for the number of which multiprocessors have a more even share."""
LEAST_GAIN = 0.1
"""Fewer rows of the busiest program, for which lower tiles are taken."""


@cache_compiled
def find_kernel(
    columns: int, shape: Shape, gate: int, has_norm: bool, has_tables: bool, device: torch.device
) -> CudaKernel:
    """The kernel, compiled (a fifth of a second) unless cached. Raises `CudaSourceError` and `OSError`."""
    kernel = load_kernel(
        "fp8_rows", device, MOST_BYTES, **asdict(shape), COLUMNS=columns, GATE=gate, NORM=int(has_norm),
        TABLES=int(has_tables),
    )
    kernel.share_multiprocessors()  # with the kernels before and behind it
    return kernel


def count_shared_bytes(rows: int, inputs: int, shape: Shape, *, has_norm: bool) -> int:
    """Of a program: alignment, the ring, x and its scales, barriers (one more for the cluster), sums of warpgroups and
    programs, factors and squares for the norm."""
    columns, blocks = 8 * ceil_div(rows, 8), count_chunks(inputs, shape) * shape.unit
    floats = blocks * columns + (2 * (shape.groups - 1) + shape.splits - 1) * columns * 64 + columns
    floats += rows * (inputs // BLOCK) if has_norm else 0
    ring, barriers = shape.stages * shape.unit * shape.height * BLOCK, 16 * (shape.stages + 1)
    return 1024 + ring + blocks * rows * BLOCK + barriers + 4 * floats


def count_chunks(inputs: int, shape: Shape) -> int:
    """Stages of a tile that a program multiplies."""
    return ceil_div(ceil_div(inputs // BLOCK, shape.unit), shape.splits)


@cache
def choose_shape(tiles: int, inputs: int, rows: int) -> Shape:
    """Two programs share a tile's inputs where there are multiprocessors for both; more of them only where all of x
    would not fit beside the ring. A cluster needs free multiprocessors of one group at once, whose number no multiple
    of four or eight has to be: 32 clusters of four, 128 programs, do not all run on 132 multiprocessors, and the last
    ones wait for a whole round. Two are one pair of multiprocessors, of which there are 66."""
    splits = 2 if 2 * tiles <= NUM_SMS and inputs >= LEAST_SHARED else 1
    while splits < MOST_SPLITS and ceil_div(inputs, splits) * rows > MOST_X_BYTES:
        splits *= 2
    return replace(RING, splits=splits)


@cache
def divide_evenly(shape: Shape, weight_rows: int, inputs: int) -> Shape:
    """The shape, or one of `LOWER` if programs by themselves have clearly fewer rows of the weight then."""

    def most_rows(own: Shape) -> int:
        return ceil_div(ceil_div(weight_rows, own.height), NUM_SMS) * own.height

    if shape.splits > 1:
        return shape
    able = [own for own in LOWER if inputs % (own.unit * BLOCK) == 0]
    best = min((shape, *able), key=most_rows)
    return best if most_rows(best) <= (1 - LEAST_GAIN) * most_rows(shape) else shape


def view_weight(weight: DeviceCodes, *, is_gated: bool) -> torch.Tensor:
    """Codes as bytes in blocks of inputs [K / 128, O, 128]; gated, [K / 128, O / 16, 2, 8, 128]: groups of eight rows
    of gate, then of the same eight of up."""
    codes, blocks = weight.codes.view(torch.uint8), weight.in_features // BLOCK
    outputs, stride = weight.out_features, codes.stride(0)
    if not is_gated:
        return codes.as_strided((blocks, outputs, BLOCK), (BLOCK, stride, 1))
    return codes.as_strided(
        (blocks, outputs // 16, 2, 8, BLOCK), (BLOCK, 8 * stride, outputs // 2 * stride, stride, 1)
    )


def _describe_weight(weight: DeviceCodes, shape: Shape, *, is_gated: bool) -> ctypes.Array[ctypes.c_char]:
    """A tensor map of the tiles that a stage takes."""
    tile = (shape.height // 16, 2, 8) if is_gated else (shape.height,)
    return describe_boxes(view_weight(weight, is_gated=is_gated), (shape.unit, *tile, BLOCK))


def launch(
    x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None, out: torch.Tensor, *,
    before: Addition | None = None, gate: Gate | None = None, shape: Shape | None = None,
    group: tuple[int, int] = (0, 0),
) -> torch.Tensor:
    """``out`` [M, O] of x [M, K], whose rows begin at multiples of 16 bytes. ``group``: outputs of a group, and
    elements from a group's inputs to the next one's; 0 for one group."""
    rows, inputs = x.shape
    if not rows:
        return out
    is_gated = gate is not None
    outputs, columns = weight.out_features // (2 if is_gated else 1), 8 * ceil_div(rows, 8)
    if shape is None:
        shape = choose_shape(ceil_div(weight.out_features, TILE), inputs, rows)
        shape = divide_evenly(shape, weight.out_features, inputs)
    tiles = ceil_div(outputs, shape.height // 2 if is_gated else shape.height)
    call = _Call(
        x=x.data_ptr(), bias=address_of(bias), out=out.data_ptr(),
        scales=weight.scales.data_ptr(), x_stride=x.stride(0), group=group[0],
        group_stride=group[1], rows=rows, outputs=outputs, inputs=inputs,
        table=weight.scales.shape[1], shared=weight.rows, chunks=count_chunks(inputs, shape),
    )
    if gate is not None:
        call.limit, call.alpha, call.up_offset = gate.limit, gate.alpha, gate.up_offset
    if before is not None:
        before.describe(call)
    programs = tiles * shape.splits if shape.splits > 1 or group[0] else min(tiles, count_sms(x.device))
    kind = 0 if gate is None else GATES[gate.kind]
    kernel = find_kernel(columns, shape, kind, before is not None, weight.num_groups > 1, x.device)
    kernel.launch(
        programs, 128 * shape.groups + 32, _describe_weight(weight, shape, is_gated=is_gated), call, is_dependent=True,
        shared_bytes=keep_apart(count_shared_bytes(rows, inputs, shape, has_norm=before is not None)),
    )
    return out


def multiply(x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None) -> torch.Tensor:
    """See `CODED_LINEAR`."""
    out = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype, device=x.device)
    return launch(arrange(x, weight), weight, bias, out)


@cache_compiled
def _can_group(columns: int, shape: Shape, has_tables: bool, device: torch.device) -> bool:
    """Whether the kernel compiles; if not, with a warning."""
    with fallback("grouped products of few rows run in Triton"):
        find_kernel(columns, shape, 0, False, has_tables, device)
        return True
    return False


def multiply_groups(x: torch.Tensor, weight: DeviceCodes) -> torch.Tensor:
    """See `GROUPED_CODED`; more than `MOST_GROUPED_ROWS` are left to `fp8_split`."""
    (num_rows, groups, inputs), outputs = x.shape, weight.out_features
    if num_rows > MOST_GROUPED_ROWS:
        return fp8_split.multiply_groups(x, weight)
    columns = 8 * ceil_div(num_rows, 8)
    shape = choose_shape(ceil_div(outputs, TILE), inputs, columns) if num_rows else None
    if (
        shape is None or any(stride % 8 for stride in x.stride()[:2])
        or x.data_ptr() % 16 or not _can_group(columns, shape, weight.num_groups > 1, x.device)
    ):
        return grouped.multiply_pdl(x, weight)
    out = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
    return launch(x[:, 0], weight, None, out, shape=shape, group=(outputs // groups, x.stride(1)))


def multiply_gated(x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None, gate: Gate) -> torch.Tensor:
    """See `CODED_GATED`."""
    out = torch.empty((x.shape[0], weight.out_features // 2), dtype=x.dtype, device=x.device)
    return launch(arrange(x, weight), weight, bias, out, gate=gate)


def multiply_normalised(
    x: torch.Tensor, residual: torch.Tensor, norm: Norm, weight: DeviceCodes, bias: torch.Tensor | None,
    activation: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `CODED_NORM_LINEAR`."""
    total = torch.empty((x.shape[0], x.shape[1]), dtype=residual.dtype, device=x.device)
    outputs = weight.out_features // 2 if activation else weight.out_features
    out = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
    gate = Gate(activation) if activation else None
    return launch(x, weight, bias, out, before=Addition(residual, norm, total), gate=gate), total

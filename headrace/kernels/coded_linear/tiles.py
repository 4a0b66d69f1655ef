"""Products of few rows with integers in tiles by own CUDA C++ (``csrc/cuda/tiled_rows.cu``, which says how they work),
also with the norm before them or the gated activation after them.

M rows of x, N outputs, K inputs.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from headrace.kernels.coded_linear import MOST_CUDA_ROWS, MOST_SUPER_INPUTS
from headrace.kernels.coded_linear.cuda import RED, Addition, arrange
from headrace.kernels.coded_linear.device_codes import BLOCK, HALF, MATRIX_ROWS, TILE_ROWS, DeviceCodes, Supers
from headrace.kernels.cuda_source import MOST_BYTES, CudaKernel, cache_compiled, count_sms, keep_apart, load_kernel
from headrace.kernels.launch import ceil_div
from headrace.kernels.linear import Norm
from headrace.kernels.packed_linear.blocks import SUPER
from headrace.kernels.rowwise import Gate
from headrace.kernels.rowwise.triton import GATES

BARRIER_BYTES, MOST_STAGES = 16, 64
BUFFERS = 2
"""Of sums of a tile, as in the source, with two barriers each, like the ring's stages."""


ALL_SUPERS = tuple(Supers(bits, has_mins) for has_mins in (True, False) for bits in (4, 6))


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in (
            "x", "residual", "norm", "bias", "out", "total", "codes", "scales", "tail_codes", "tail_scales",
        )),
        *((name, c_int64) for name in ("x_stride", "residual_stride")),
        *((name, c_int) for name in ("rows", "outputs", "inputs", "padded", "stages", "gate", "wide", "head_tiles")),
        *((name, c_float) for name in ("eps", "offset")),
    )


@dataclass(frozen=True)
class Shape:
    """Warps of a block that multiply, and units that are copied at a time."""

    warps: int
    chunk: int


SHAPES = (Shape(8, 32), Shape(8, 16))
"""Of which the first is taken whose ring has `LEAST_STAGES`. On an H200 a layer of Llama-3.1-8B in INT4 takes 39.5 us
with the first and 42.8 with the second, for one row."""
LEAST_STAGES = 3
SPANS = BLOCK // 16
"""Sums of x that mins multiply, of a unit, as in the source."""
ROW_COUNTS = (1, 2, 4, 8)
"""Rows of x that kernels with super-blocks are compiled for."""


class Form(NamedTuple):
    """The source's macros that describe a weight, by name; ``group`` 0: one for all inputs. ``super_form`` and
    ``tail_form``: numbers of `Supers`, or 0."""

    code: int
    pairs: int
    group: int
    super_form: int = 0
    tail_form: int = 0

    @property
    def unit(self) -> int:
        """Inputs of 64 bytes, or of super-blocks 128."""
        return BLOCK if self.code == 0 else HALF

    @property
    def groups(self) -> int:
        """Scales of a unit."""
        return self.unit // self.group if 0 < self.group < self.unit else 1

    @property
    def sums_x(self) -> bool:
        """Whether mins multiply sums of x."""
        return not {1, 2}.isdisjoint((self.super_form, self.tail_form))

    @property
    def parts(self) -> list[Form]:
        """Of rows of one form each."""
        first = self._replace(tail_form=0)
        return [first, first._replace(super_form=self.tail_form)] if self.tail_form else [first]

    def count_words(self, units: int) -> int:
        """Scales of so many units of a row; 0 for one of the whole row."""
        return units * self.groups // max(1, self.group // self.unit) if self.group else 0

    def count_codes(self, units: int) -> int:
        """Bytes of codes of so many units of a row of super-blocks; of several forms, the most."""
        return max(form.bits for form in self._supers) * units * BLOCK // 8

    @property
    def _supers(self) -> list[Supers]:
        return [form for form in ALL_SUPERS if form.number in (self.super_form, self.tail_form)]

    def count_weight_bytes(self, units: int) -> int:
        """Of codes and scales of so many units of a row; of several forms, the most."""
        if not self.super_form:
            return units * HALF + 4 * self.count_words(units)
        return max(
            units * form.bits * BLOCK // 8 + units * BLOCK // SUPER * form.row_bytes for form in self._supers
        )

    def pad(self, inputs: int) -> int:
        """Bytes of a row's digits in shared memory, of which there are two; some of them against bank conflicts."""
        odd = 32 if self.group == 32 else 64  # of 128: as many bytes as four threads read of a row at a time
        return inputs + (odd - inputs) % 128


def describe_form(weight: DeviceCodes) -> Form:
    """The form of a weight in tiles."""
    if weight.supers is not None:
        tail = None if weight.tail is None else weight.tail.supers
        return Form(0, 0, 0, weight.supers.number, 0 if tail is None else tail.number)
    code = 0 if weight.is_short else 3 if weight.codes.dtype == torch.int8 else 4
    return Form(code, int(weight.has_pairs), weight.group if weight.num_groups > 1 else 0)


@cache_compiled
def find_kernel(form: Form, shape: Shape, most: int, device: torch.device) -> CudaKernel:
    """The kernel, compiled (about a second) unless cached; ``most``: rows of x of super-blocks, else 0. Raises
    `CudaSourceError` and `OSError`."""
    return load_kernel(
        "tiled_rows", device, MOST_BYTES, **form._asdict(), WARPS=shape.warps, CHUNK=shape.chunk, MOST=most
    )


@cache_compiled
def prepare(form: Form, inputs: int, most_rows: int, device: torch.device) -> None:
    """Compile and load the kernels of super-blocks for all numbers of rows: one that comes later finds its own."""
    for rows in range(1, most_rows + 1):
        find_kernel(form, choose_shape(form, rows, inputs), count_rows(rows), device)


def count_rows(rows: int) -> int:
    """Of a kernel of super-blocks that multiplies so many."""
    return next(count for count in ROW_COUNTS if rows <= count)


def count_fixed_bytes(form: Form, rows: int, inputs: int, shape: Shape) -> int:
    """Of a block's shared memory beside the ring: rows of x, what tells of their quanta, squares for the norm, sums of
    each warp."""
    quanta = inputs // form.unit * form.groups
    spans = inputs // BLOCK * SPANS if form.sums_x else 0
    floats = rows * (quanta + spans + shape.warps + BUFFERS * shape.warps * RED)
    return 2 * rows * form.pad(inputs) + 4 * floats + BUFFERS * BARRIER_BYTES


def count_stages(form: Form, fixed: int, shape: Shape, most: int) -> tuple[int, int]:
    """How long the ring is, and the bytes of a stage: what fits, at most ``most``, but two."""
    stage = 2 * TILE_ROWS * form.count_weight_bytes(shape.chunk) + BARRIER_BYTES
    return max(2, min((MOST_BYTES - fixed) // stage, most, MOST_STAGES)), stage


@cache
def choose_shape(form: Form, rows: int, inputs: int) -> Shape:
    """Of `SHAPES`."""
    return next((
        shape for shape in SHAPES
        if count_stages(form, count_fixed_bytes(form, rows, inputs, shape), shape, MOST_STAGES)[0] >= LEAST_STAGES
    ), SHAPES[-1])


def launch(
    x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None, out: torch.Tensor, *,
    before: Addition | None = None, gate: int = 0, shape: Shape | None = None,
) -> torch.Tensor:
    """``out`` [M, N] of x [M, K], of x's dtype or float32. ``gate``: of `GATES`, 0 for none."""
    if not len(x):
        return out
    form, (rows, inputs) = describe_form(weight), x.shape
    shape = shape or choose_shape(form, rows, inputs)
    outputs = weight.out_features // (2 if gate else 1)
    tiles = ceil_div(outputs, TILE_ROWS if gate else MATRIX_ROWS)
    blocks = min(tiles, count_sms(x.device))
    fixed = count_fixed_bytes(form, rows, inputs, shape)
    chunks = ceil_div(tiles, blocks) * ceil_div(inputs // form.unit, shape.chunk)
    stages, stage = count_stages(form, fixed, shape, chunks)
    call = _Call(
        x=x.data_ptr(), bias=None if bias is None else bias.data_ptr(), out=out.data_ptr(),
        codes=weight.codes.data_ptr(), scales=weight.scales.data_ptr(), x_stride=x.stride(0), rows=rows,
        outputs=outputs, inputs=inputs, padded=form.pad(inputs), stages=stages, gate=gate,
        wide=int(out.dtype == torch.float32),
    )
    if weight.tail is not None:
        call.tail_codes, call.tail_scales = weight.tail.codes.data_ptr(), weight.tail.scales.data_ptr()
        call.head_tiles = len(weight.codes) // MATRIX_ROWS
    if before is not None:
        before.describe(call)
    if form.super_form:
        prepare(form, inputs, min(MOST_CUDA_ROWS, max(1, MOST_SUPER_INPUTS // inputs)), x.device)
    find_kernel(form, shape, count_rows(rows) if form.super_form else 0, x.device).launch(
        blocks, 32 * (shape.warps + 1), call, is_dependent=True, shared_bytes=keep_apart(fixed + stages * stage)
    )
    return out


def multiply(x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None) -> torch.Tensor:
    """See `CODED_LINEAR`."""
    out = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype, device=x.device)
    return launch(arrange(x, weight), weight, bias, out)


def multiply_float(x: torch.Tensor, weight: DeviceCodes) -> torch.Tensor:
    """See `CODED_FLOAT`."""
    out = torch.empty((x.shape[0], weight.out_features), dtype=torch.float32, device=x.device)
    return launch(arrange(x, weight), weight, None, out)


def multiply_gated(
    x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None, gate: Gate
) -> torch.Tensor | None:
    """See `CODED_GATED`."""
    if gate.is_clamped or weight.tail is not None:
        return None
    out = torch.empty((x.shape[0], weight.out_features // 2), dtype=x.dtype, device=x.device)
    return launch(arrange(x, weight), weight, bias, out, gate=GATES[gate.kind])


def multiply_normalised(
    x: torch.Tensor, residual: torch.Tensor, norm: Norm, weight: DeviceCodes, bias: torch.Tensor | None,
    activation: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `CODED_NORM_LINEAR`."""
    total = torch.empty((x.shape[0], x.shape[1]), dtype=residual.dtype, device=x.device)
    outputs = weight.out_features // 2 if activation else weight.out_features
    out = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
    gate = GATES[activation] if activation else 0
    return launch(x, weight, bias, out, before=Addition(residual, norm, total), gate=gate), total

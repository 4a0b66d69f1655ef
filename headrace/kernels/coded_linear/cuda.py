"""Products of few rows with coded weights by own CUDA C++ (``csrc/cuda/coded_rows.cu``, which says how they work), also
with the norm before them or the gated activation after them.

M rows of x, N outputs, K inputs.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import DeviceCodes
from headrace.kernels.cuda_source import MOST_BYTES, CudaKernel, address_of, cache_compiled, count_sms, load_kernel
from headrace.kernels.launch import ceil_div
from headrace.kernels.linear import Norm
from headrace.kernels.rowwise import Gate
from headrace.kernels.rowwise.triton import GATES

RED, WIDE_UNIT, UNIT = 20, 128, 64
"""As in the source: floats of a column of sums; inputs of 64 bytes of short codes and of others."""


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in (
            "x", "residual", "norm", "bias", "out", "total", "codes", "scales", "zeros",
        )),
        *((name, c_int64) for name in ("x_stride", "residual_stride", "row_bytes")),
        *((name, c_int) for name in ("rows", "outputs", "inputs", "table", "shared", "padded", "gate")),
        *((name, c_float) for name in ("eps", "offset", "limit", "alpha", "up_offset")),
    )


@dataclass(frozen=True, slots=True)
class Addition:
    """What is normalised: x plus ``residual`` [M, K]; ``total``, which it is written to."""

    residual: torch.Tensor
    norm: Norm
    total: torch.Tensor

    def describe(self, call: Any) -> None:
        """Fill in what a kernel is told of it."""
        call.residual, call.residual_stride = self.residual.data_ptr(), self.residual.stride(0)
        call.norm, call.total = self.norm.weight.data_ptr(), self.total.data_ptr()
        call.eps, call.offset = self.norm.eps, self.norm.offset


@dataclass(frozen=True)
class Shape:
    """Warps of a block, blocks on a multiprocessor, and steps of codes that a warp has on their way."""

    warps: int
    blocks: int
    depth: int


NARROW, WIDE, FINE = Shape(8, 3, 2), Shape(16, 1, 4), Shape(8, 2, 4)
SHAPES = (NARROW, WIDE, FINE)
"""For up to `NARROW_INPUTS`, for more, and for short codes with scales of 32 inputs."""
NARROW_INPUTS = 8192


class Form(NamedTuple):
    """The source's macros that describe a weight, by name; ``group`` 0: one for all inputs."""

    code: int
    table: int
    zeros: int
    group: int
    vector: int

    @property
    def unit(self) -> int:
        """Inputs of 64 bytes."""
        return WIDE_UNIT if self.code in (0, 2) else UNIT

    @property
    def groups(self) -> int:
        """Scales of a unit that a kernel reads."""
        return self.unit // self.group if 0 < self.group < self.unit and self.table != 2 else 1

    @property
    def sums_x(self) -> bool:
        """Whether sums of x are needed, for zero points."""
        return self.code == 0 or self.table == 1 or bool(self.zeros)

    def pad(self, inputs: int) -> int:
        """Bytes of a row of x in shared memory: whole units, and some against bank conflicts."""
        return ceil_div(inputs, self.unit) * self.unit * 2 + (64 if self.group == 32 and self.table != 2 else 16)


def describe_form(weight: DeviceCodes) -> Form:
    """The form of a weight that satisfies `headrace.kernels.coded_linear.reason_against_cuda`."""
    code = {Code.E4M3: 1, Code.E2M1: 2}.get(weight.code)
    if code is None:
        code = 0 if weight.is_short else 3 if weight.codes.dtype == torch.int8 else 4
    table = 2 if weight.has_powers else 1 if weight.has_pairs else 0
    group = weight.group if weight.num_groups > 1 or weight.has_powers else 0
    form = Form(code, table, int(weight.zeros is not None), group, 1)
    return form._replace(vector=int(weight.scales.shape[1] % form.groups == 0))


@cache_compiled
def find_kernel(form: Form, shape: Shape, device: torch.device) -> CudaKernel:
    """The kernel, compiled (about a second) unless cached. Raises `CudaSourceError` and `OSError`."""
    return load_kernel(
        "coded_rows", device, MOST_BYTES, **form._asdict(), WARPS=shape.warps, BLOCKS=shape.blocks, DEPTH=shape.depth
    )


def launch(
    x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None, out: torch.Tensor, *,
    before: Addition | None = None, gate: Gate | None = None, shape: Shape | None = None,
) -> torch.Tensor:
    """``out`` [M, N] of x [M, K]."""
    if not len(x):
        return out
    form, (rows, inputs) = describe_form(weight), x.shape
    shape = shape or choose_shape(weight)
    outputs = weight.out_features // (1 if gate is None else 2)
    call = _Call(
        x=x.data_ptr(), bias=address_of(bias), out=out.data_ptr(), codes=weight.codes.data_ptr(),
        scales=weight.scales.data_ptr(), zeros=address_of(weight.zeros), x_stride=x.stride(0),
        row_bytes=weight.codes.stride(0), rows=rows, outputs=outputs, inputs=inputs,
        table=weight.scales.shape[1] // (4 if weight.has_powers else 1), shared=weight.rows,
        padded=form.pad(inputs),
    )
    if gate is not None:
        call.gate, call.limit, call.alpha, call.up_offset = GATES[gate.kind], gate.limit, gate.alpha, gate.up_offset
    if before is not None:
        before.describe(call)
    tiles = ceil_div(outputs, 16 if gate is None else 8)
    rounds = ceil_div(tiles, count_sms(x.device) * shape.blocks)
    find_kernel(form, shape, x.device).launch(
        ceil_div(tiles, rounds), 32 * shape.warps, call, is_dependent=True,
        shared_bytes=count_shared_bytes(form, rows, inputs, shape),
    )
    return out


def count_shared_bytes(form: Form, rows: int, inputs: int, shape: Shape) -> int:
    """Of a block: rows of x, their sums, squares for the norm, and sums of each warp."""
    quanta = ceil_div(inputs, form.unit) * form.groups if form.sums_x else 0
    floats = rows * (quanta + shape.warps) + 2 * shape.warps * rows * RED
    return rows * form.pad(inputs) + 4 * floats


def choose_shape(weight: DeviceCodes) -> Shape:
    """The fastest for Llama-3.1-8B's weights and one row, on an H200."""
    if weight.has_powers or (weight.is_short and weight.group == 32 and weight.num_groups > 1):
        return FINE
    return NARROW if weight.in_features <= NARROW_INPUTS else WIDE


def arrange(x: torch.Tensor, weight: DeviceCodes) -> torch.Tensor:
    """x in the weight's order of inputs, its rows at multiples of 16 bytes."""
    if weight.order is not None:
        return x.index_select(1, weight.order)
    return x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()


def multiply(x: torch.Tensor, weight: DeviceCodes, bias: torch.Tensor | None) -> torch.Tensor:
    """See `CODED_LINEAR`."""
    out = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype, device=x.device)
    return launch(arrange(x, weight), weight, bias, out)


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

"""Experts in codes for one to four tokens in two kernels, own CUDA C++: gate and up with the activation, then down with
the sum over a token's experts. Each chosen expert is read once. MXFP4 by ``csrc/cuda/coded_experts.cu``, e4m3 of one
token by `fp8_few`; more tokens and other codes are passed on to other solutions.

T tokens, k choices, D hidden size, F expert intermediate size.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import NamedTuple

import torch

from headrace.kernels.coded_linear.codes import Code
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
from headrace.kernels.launch import ceil_div, next_power_of_2
from headrace.kernels.moe import CODED_EXPERTS, CodedStack, fp8_few
from headrace.kernels.once import cache_once
from headrace.kernels.rowwise import Gate
from headrace.kernels.rowwise.triton import GATES

MOST_SOURCE_TOKENS, MOST_PAIRS, EIGHT, UNIT = 8, 64, 8, 128
"""As in the source; rows or columns of an instruction, and inputs of a row that a quad of threads reads at a time."""
MOST_TOKENS = 4
"""For more it was not measured."""
FIXED_BYTES = ceil_div(4 * (MOST_PAIRS * (MOST_SOURCE_TOKENS + 3) + 2), 128) * 128
"""``Shared`` of the source."""
ALIGNMENT = 1024
"""Of the ring."""
X_PADDING = 16
"""Bytes between rows of x, against bank conflicts."""


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "bias", "out", "scales", "ids", "factors")),
        ("x_stride", c_int64),
        *((name, c_int) for name in (
            "tokens", "top_k", "inputs", "outputs", "rows_each", "table", "x_pitch", "slots", "gate",
        )),
        *((name, c_float) for name in ("limit", "alpha", "up_offset")),
    )


class Shape(NamedTuple):
    """Warps of a block, steps that a warp has on their way, and units of inputs of a step."""

    warps: int
    depth: int
    step: int


SHAPES = (Shape(12, 2, 4), Shape(12, 2, 2))
"""Of which the first that fits is taken; fastest for gpt-oss-20b on an H200."""


class Form(NamedTuple):
    """What a kernel is compiled for. ``columns``: eights of columns."""

    is_down: bool
    columns: int
    shape: Shape
    has_bias: bool

    def load(self, device: torch.device) -> CudaKernel:
        """The kernel; see `find_kernel`."""
        return find_kernel(self, device)


class Product(NamedTuple):
    """One of the two products of a step, down if it has ``factors`` [T, k], of ``outputs`` for each expert."""

    form: Form
    weight: DeviceCodes
    bias: torch.Tensor | None
    factors: torch.Tensor | None
    outputs: int
    num_tokens: int
    top_k: int
    sms: int

    @property
    def x_pitch(self) -> int:
        """Bytes of a row of x in shared memory."""
        return ceil_div(self.weight.in_features, UNIT) * UNIT * 2 + X_PADDING

    @property
    def slots(self) -> int:
        """Tiles that a warp may touch."""
        if self.form.is_down:
            tiles = ceil_div(ceil_div(self.outputs, self.sms), EIGHT)
        else:
            num_experts = self.weight.out_features // (2 * self.outputs)
            tiles = ceil_div(min(self.num_tokens * self.top_k, num_experts) * self.outputs // EIGHT, self.sms)
        return ceil_div(tiles, self.form.shape.warps) + 1

    @property
    def shared_bytes(self) -> int:
        is_down, (warps, depth, step) = self.form.is_down, self.form.shape
        rows = self.num_tokens * (self.top_k if is_down else 1) + 1
        sums = warps * self.slots * self.form.columns * EIGHT * EIGHT * (1 if is_down else 2) * 4
        ring = ceil_div(warps * depth * (2 * step * EIGHT * (UNIT // 2 + 4) + 8), 16) * 16
        return ALIGNMENT + FIXED_BYTES + rows * self.x_pitch + sums + ring

    def launch(self, x: torch.Tensor, ids: torch.Tensor, gate: Gate, out: torch.Tensor) -> None:
        weight, is_down = self.weight, self.form.is_down
        call = _Call(
            x=x.data_ptr(), bias=address_of(self.bias), out=out.data_ptr(), scales=weight.scales.data_ptr(),
            ids=ids.data_ptr(), factors=address_of(self.factors), x_stride=x.stride(0), tokens=self.num_tokens,
            top_k=self.top_k, inputs=weight.in_features, outputs=self.outputs,
            rows_each=self.outputs * (1 if is_down else 2),
            table=weight.scales.shape[1] // 4, x_pitch=self.x_pitch, slots=self.slots, gate=GATES[gate.kind],
            limit=gate.limit, alpha=gate.alpha, up_offset=gate.up_offset,
        )
        self.form.load(x.device).launch(
            self.sms, 32 * self.form.shape.warps, self._describe_units(), call, is_dependent=True,
            shared_bytes=keep_apart(self.shared_bytes),
        )

    def _describe_units(self) -> ctypes.Array[ctypes.c_char]:
        """A tensor map of what a step reads of a side: of each unit eight rows of 64 bytes."""
        codes, width = self.weight.codes, UNIT // 2
        units = codes.as_strided((codes.shape[1] // width, len(codes), width), (width, codes.stride(0), 1))
        return describe_boxes(units, (self.form.shape.step, EIGHT, width))


def takes(codes: DeviceCodes) -> bool:
    """Whether the kernels multiply with stacked codes."""
    if codes.order is not None or codes.has_zeros or codes.codes.stride(0) % 16 or codes.in_features % EIGHT:
        return False
    return codes.code is Code.E2M1 and codes.has_powers and codes.rows == 1


def plan(
    gate_up: CodedStack, down: CodedStack, weights: torch.Tensor, sms: int
) -> tuple[Product, Product] | None:
    """Both products of a step with routing ``weights`` [T, k], contiguous, on a device of ``sms`` multiprocessors; None
    where the kernels do not take it."""
    (num_tokens, top_k), width, inner = weights.shape, gate_up[0].in_features, down[0].in_features
    if not 0 < num_tokens <= MOST_TOKENS or num_tokens * top_k > MOST_PAIRS or inner % EIGHT:
        return None
    products = []
    for (codes, bias), factors, outputs in ((gate_up, None, inner), (down, weights, width)):
        if not takes(codes):
            return None
        is_down = factors is not None
        tokens = EIGHT // (4 if is_down else 2)  # of eight columns: see the source
        columns = next_power_of_2(ceil_div(num_tokens, tokens))
        able = (
            Product(form, codes, bias, factors, outputs, num_tokens, top_k, sms)
            for form in (Form(is_down, columns, shape, bias is not None) for shape in SHAPES)
        )
        product = next((product for product in able if product.shared_bytes <= MOST_BYTES), None)
        if product is None:
            return None
        products.append(product)
    return products[0], products[1]


@cache_compiled
def find_kernel(form: Form, device: torch.device) -> CudaKernel:
    """The kernel, compiled (about a second) unless cached. Raises `CudaSourceError` and `OSError`."""
    return load_kernel(
        "coded_experts", device, MOST_BYTES, DOWN=int(form.is_down), COLUMNS=form.columns, BIAS=int(form.has_bias),
        **form.shape._asdict(),
    )


AnyForm = Form | fp8_few.Form


@cache_compiled
def _can_compile(gate_up: AnyForm, down: AnyForm, device: torch.device) -> bool:
    """Whether both kernels can be compiled and loaded; if not, with a warning."""
    with fallback("experts of few tokens run in Triton"):
        for form in (gate_up, down):
            form.load(device)
        return True
    return False


@cache_once
def _find_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def _is_aligned(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def run_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: CodedStack, down: CodedStack, gate: Gate
) -> torch.Tensor:
    """See `CODED_EXPERTS`."""
    weights = weights.contiguous()
    plan_few = fp8_few.plan if gate_up[0].code is Code.E4M3 and _find_capability(x.device)[0] == 9 else plan
    products = plan_few(gate_up, down, weights, count_sms(x.device)) if _is_aligned(x) else None
    if products is None or not _can_compile(products[0].form, products[1].form, x.device):
        is_hopper = _find_capability(x.device)[0] == 9
        return CODED_EXPERTS.load("gluon_pdl" if is_hopper else "triton_pdl")(x, ids, weights, gate_up, down, gate)
    (first, second), ids = products, ids.contiguous()
    gated = torch.empty((ids.numel(), first.outputs), dtype=x.dtype, device=x.device)
    out = torch.empty((len(x), second.outputs), dtype=x.dtype, device=x.device)
    first.launch(x, ids, gate, gated)
    second.launch(gated, ids, gate, out)
    return out

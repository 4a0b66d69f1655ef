"""Products of chosen experts with e4m3 weights for a token on Hopper, by own CUDA C++ (``csrc/cuda/fp8_few.cu``, which
takes up to four and says how they work): gate and up with the activation, or down with the sum.

T tokens, k choices, D hidden size, F expert intermediate size, X experts.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import NamedTuple

import torch

from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import DeviceCodes
from headrace.kernels.cuda_source import (
    CudaKernel,
    address_of,
    cache_compiled,
    describe_boxes,
    keep_apart,
    load_kernel,
)
from headrace.kernels.launch import ceil_div
from headrace.kernels.moe import CodedStack
from headrace.kernels.rowwise import Gate
from headrace.kernels.rowwise.triton import GATES

MOST_TOKENS, MOST_PAIRS, BLOCK, TILE, COLUMNS = 4, 64, 128, 64, 8
"""As in the source: inputs of a block, rows of the weight in a tile, columns of an instruction."""
MOST_SHARED_BYTES = 226 << 10
"""Of a block on Hopper."""


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "bias", "out", "scales", "ids", "factors")), ("x_stride", c_int64),
        *((name, c_int) for name in (
            "tokens", "top_k", "inputs", "outputs", "rows_each", "table", "shared", "x_blocks", "gate",
        )),
        *((name, c_float) for name in ("limit", "alpha", "up_offset")),
    )


class Shape(NamedTuple):
    """Blocks of inputs of a stage, stages of the ring, warpgroups, and blocks that share a tile."""

    unit: int
    stages: int
    groups: int
    splits: int


GATE_UP_SHAPE, DOWN_SHAPE = Shape(4, 3, 2, 2), Shape(2, 6, 2, 4)
"""The fastest for Qwen3-30B-A3B on an H200."""
MOST_CHOSEN_TOKENS = 1
"""For more `coded` is as fast or faster."""


class Form(NamedTuple):
    """What a kernel is compiled for."""

    shape: Shape
    is_down: bool

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
    is_beside: bool = False
    """Whether it begins while a block of the product before it is on every multiprocessor."""

    @property
    def rows_each(self) -> int:
        """Rows of an expert's weight."""
        return self.outputs * (1 if self.form.is_down else 2)

    @property
    def num_chosen(self) -> int:
        """Distinct experts, at most."""
        return min(self.num_tokens * self.top_k, self.weight.out_features // self.rows_each)

    @property
    def num_tiles(self) -> int:
        """At most."""
        return self.outputs // TILE if self.form.is_down else self.outputs // (TILE // 2) * self.num_chosen

    @property
    def num_clusters(self) -> int:
        return min(self.num_tiles, self.sms // self.form.shape.splits)

    @property
    def x_blocks(self) -> int:
        """Blocks of x that a block of threads multiplies."""
        chunks = ceil_div(self.weight.in_features, BLOCK * self.form.shape.unit)
        if self.form.is_down:
            return ceil_div(self.num_chosen, self.form.shape.splits) * chunks * self.form.shape.unit
        return ceil_div(chunks, self.form.shape.splits) * self.form.shape.unit

    @property
    def shared_bytes(self) -> int:
        """Alignment, the ring, x and its scales, what is known of experts, and sums."""
        unit, stages, groups, splits = self.form.shape
        own = ceil_div(ceil_div(self.num_tiles, self.num_clusters), splits)
        known = 16 * stages + 8 + 4 * 2 + MOST_PAIRS * (MOST_TOKENS + 8)
        return (
            1024 + stages * unit * TILE * BLOCK + self.x_blocks * COLUMNS * (BLOCK + 4) + known
            + own * splits * groups * self.num_tokens * TILE * 4
        )

    @property
    def asked_bytes(self) -> int:
        """Dynamic shared memory of a launch. Gate and up keep their blocks apart; where they have a block on every
        multiprocessor, these leave room for one of down, which asks for its weights meanwhile."""
        return self.shared_bytes if self.is_beside else keep_apart(self.shared_bytes)

    def view_weight(self) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Codes as bytes, [K / 128, rows, 128], or [K / 128, gate or up, rows, 128], and a stage of them."""
        codes, stride = self.weight.codes.view(torch.uint8), self.weight.codes.stride(0)
        blocks, rows = self.weight.in_features // BLOCK, self.weight.out_features
        if self.form.is_down:
            return codes.as_strided((blocks, rows, BLOCK), (BLOCK, stride, 1)), (self.form.shape.unit, TILE, BLOCK)
        shape, strides = (blocks, 2, rows - self.outputs, BLOCK), (BLOCK, self.outputs * stride, stride, 1)
        return codes.as_strided(shape, strides), (self.form.shape.unit, 2, TILE // 2, BLOCK)

    def launch(self, x: torch.Tensor, ids: torch.Tensor, gate: Gate, out: torch.Tensor) -> None:
        weight = self.weight
        call = _Call(
            x=x.data_ptr(), bias=address_of(self.bias), out=out.data_ptr(), scales=weight.scales.data_ptr(),
            ids=ids.data_ptr(), factors=address_of(self.factors), x_stride=x.stride(0), tokens=self.num_tokens,
            top_k=self.top_k, inputs=weight.in_features, outputs=self.outputs, rows_each=self.rows_each,
            table=weight.scales.shape[1], shared=weight.rows, x_blocks=self.x_blocks, gate=GATES[gate.kind],
            limit=gate.limit, alpha=gate.alpha, up_offset=gate.up_offset,
        )
        shape, box = self.form.shape, describe_boxes(*self.view_weight())
        self.form.load(x.device).launch(
            self.num_clusters * shape.splits, 128 * shape.groups + 32, box, call, is_dependent=True,
            shared_bytes=self.asked_bytes,
        )


def takes(codes: DeviceCodes) -> bool:
    """Whether the kernels multiply with stacked codes."""
    has_blocks = codes.group == BLOCK and codes.scales.shape[1] * BLOCK == codes.in_features
    return (
        codes.code is Code.E4M3 and codes.order is None and not codes.has_zeros and codes.in_features % BLOCK == 0
        and codes.codes.stride(0) % 16 == 0 and codes.scales.dtype == torch.float32
        and (has_blocks or codes.scales.shape[1] == 1)
    )


def plan(
    gate_up: CodedStack, down: CodedStack, weights: torch.Tensor, sms: int
) -> tuple[Product, Product] | None:
    """Both products of a step with routing ``weights`` [T, k], contiguous, on a device of ``sms`` multiprocessors; None
    where the kernels do not take it."""
    (num_tokens, top_k), width, inner = weights.shape, gate_up[0].in_features, down[0].in_features
    if not 0 < num_tokens <= MOST_CHOSEN_TOKENS or num_tokens * top_k > MOST_PAIRS or not takes(gate_up[0]):
        return None
    if not takes(down[0]) or width % TILE or inner % (TILE // 2) or sms < DOWN_SHAPE.splits:
        return None
    first = Product(Form(GATE_UP_SHAPE, False), *gate_up, None, inner, num_tokens, top_k, sms)
    is_everywhere = (first.num_clusters + 1) * GATE_UP_SHAPE.splits > sms
    second = Product(Form(DOWN_SHAPE, True), *down, weights, width, num_tokens, top_k, sms, is_everywhere)
    return (first, second) if max(first.shared_bytes, second.shared_bytes) <= MOST_SHARED_BYTES else None


@cache_compiled
def find_kernel(form: Form, device: torch.device) -> CudaKernel:
    """The kernel, compiled (about a second) unless cached. Raises `CudaSourceError` and `OSError`."""
    shape = form.shape
    kernel = load_kernel(
        "fp8_few", device, MOST_SHARED_BYTES, DOWN=int(form.is_down), UNIT=shape.unit, STAGES=shape.stages,
        GROUPS=shape.groups, SPLITS=shape.splits,
    )
    kernel.share_multiprocessors()
    return kernel

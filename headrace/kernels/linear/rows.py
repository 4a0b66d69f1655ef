"""Products of few rows with bfloat16 weights on Hopper by own CUDA C++ (``csrc/cuda/plain_rows.cu``, which says how
they work), also with the norm before them, the gated activation after them, and the low-rank additions of the rows'
adapters. What it does not take is passed on.

M rows of x, N outputs (a gate and its up count once), K inputs.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch

from headrace.kernels.cuda_source import (
    MOST_BYTES,
    CudaKernel,
    cache_compiled,
    count_sms,
    fallback,
    keep_apart,
    load_kernel,
)
from headrace.kernels.launch import ceil_div, next_power_of_2
from headrace.kernels.linear import Norm, norm_linear
from headrace.kernels.rowwise.triton import GATES

WARPS, VECTOR = 8, 8
"""As in the source: warps that multiply, inputs of a vector."""
MOST_VECTORS = 16
"""Of x in a thread's registers."""
MOST_ROWS = 2
BARRIER_BYTES = 16
MOST_PARTS, MOST_SUMS = 4, 1024
"""Of low-rank additions: parts of a stacked output, as in the source, and ranks of all parts and rows."""


@dataclass(frozen=True)
class LowRank:
    """Additions to a product of M rows: of row ``order[i]`` the adapter in slot ``slots[i]`` (-1: none), both [M]
    int64. ``a`` [S, P, R, K], ``b`` [S, R, O of gate and up], ``ranks`` [S, P] int64 and ``ends`` as in
    `headrace.kernels.lora.LowRankBank`. ``published`` [1 + M * P * R] int64, zeros at first: sums that blocks tell one
    another; no two launches at a time may have the same."""

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    ends: tuple[int, ...]
    order: torch.Tensor
    slots: torch.Tensor
    published: torch.Tensor

    @property
    def num_sums(self) -> int:
        """P * R."""
        return self.a.shape[1] * self.a.shape[2]


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "residual", "norm", "bias", "weight", "out", "total")),
        *((name, c_int64) for name in ("x_stride", "residual_stride")),
        *((name, c_int) for name in ("outputs", "inputs", "each", "stages", "gate")),
        *((name, c_float) for name in ("eps", "offset")),
        *((name, c_void_p) for name in ("a", "b", "ranks", "order", "slots", "launches", "sums")),
        *((name, c_int) for name in ("parts", "most_ranks")), ("ends", c_int * MOST_PARTS),
    )


@dataclass(frozen=True)
class Ring:
    """Bytes that are copied at a time, and bytes of the ring in shared memory, at most."""

    stage: int
    total: int


SHORT_RING, LONG_RING = Ring(32 << 10, 128 << 10), Ring(32 << 10, 200 << 10)
"""Measured on an H200. A long ring leaves no room on a multiprocessor for attention, beside which the next product may
already copy."""
SHORT_SHARE = 300 << 10
"""Bytes of a block up to which the ring is short."""


@cache_compiled
def find_kernel(
    rows: int, vectors: int, has_norm: bool, is_gated: bool, is_adapted: bool, device: torch.device
) -> CudaKernel | None:
    """The kernel, compiled (a fifth of a second) unless cached; None, with a warning, where that fails."""
    with fallback("products of few rows run as Triton kernels"):
        return load_kernel(
            "plain_rows", device, MOST_BYTES, ROWS=rows, VECS=vectors, NORM=int(has_norm), GATED=int(is_gated),
            ADAPTED=int(is_adapted), WARPS=WARPS,
        )
    return None


@dataclass(frozen=True)
class Plan:
    """``blocks`` of the grid, outputs ``each`` stage has, ``stages``, and the shared memory of a block."""

    blocks: int
    each: int
    stages: int
    shared_bytes: int


@cache
def make_plan(
    rows: int, outputs: int, inputs: int, kinds: int, has_norm: bool, sms: int, num_sums: int = 0
) -> Plan | None:
    """How a product is divided; ``kinds`` 2: of gate and up; ``num_sums``: ranks of all rows and parts of additions.
    None where two stages do not fit."""
    blocks = min(outputs, sms)
    most = ceil_div(outputs, blocks)  # of a block
    row_bytes = 2 * inputs * kinds
    ring = SHORT_RING if most * row_bytes <= SHORT_SHARE else LONG_RING
    each = min(max(1, ring.stage // row_bytes), most)
    each -= each % 4 if each > 4 else 0
    fixed = 4 * rows * WARPS * (most * kinds + int(has_norm))
    fixed += 4 * (num_sums + ceil_div(num_sums, blocks) * WARPS + 1) if num_sums else 0
    stage = each * row_bytes + BARRIER_BYTES
    stages = min(ceil_div(most, each), max(2, min(ring.total, MOST_BYTES - fixed) // stage))
    needed = fixed + stages * stage
    return None if needed > MOST_BYTES else Plan(blocks, each, stages, keep_apart(needed))


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "", *,
    before: tuple[torch.Tensor, Norm, torch.Tensor] | None = None, additions: LowRank | None = None,
) -> torch.Tensor | None:
    """``x @ weight.T + bias`` [M, N] with ``additions``, followed by the gated ``activation`` if given; None where the
    kernel does not take it. ``before``: x plus the residual [M, K] is written to the third, and its norm multiplied."""
    (rows, inputs), kinds = x.shape, 2 if activation else 1
    if not 0 < rows <= MOST_ROWS or not _can_read(x, weight):
        return None
    vectors = next_power_of_2(ceil_div(inputs, 32 * WARPS * VECTOR))
    if rows * vectors > MOST_VECTORS:
        return None
    outputs, has_norm, num_sums = weight.shape[0] // kinds, before is not None, 0
    if additions is not None:
        num_sums = rows * additions.num_sums
        if num_sums > MOST_SUMS or not _can_add(additions, x, kinds):
            return None
    plan = make_plan(rows, outputs, inputs, kinds, has_norm, count_sms(x.device), num_sums)
    if plan is None or num_sums > plan.blocks * 32 * WARPS:
        return None
    kernel = find_kernel(rows, vectors, has_norm, kinds == 2, additions is not None, x.device)
    if kernel is None:
        return None
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    call = _Call(
        x=x.data_ptr(), bias=None if bias is None else bias.data_ptr(), weight=weight.data_ptr(), out=out.data_ptr(),
        x_stride=x.stride(0), outputs=outputs, inputs=inputs, each=plan.each, stages=plan.stages,
        gate=GATES[activation] if activation else 0,
    )
    if before is not None:
        residual, norm, total = before
        call.residual, call.residual_stride = residual.data_ptr(), residual.stride(0)
        call.norm, call.total, call.eps, call.offset = norm.weight.data_ptr(), total.data_ptr(), norm.eps, norm.offset
    if additions is not None:
        _tell(call, additions)
    kernel.launch(plan.blocks, 32 * (WARPS + 1), call, is_dependent=True, shared_bytes=plan.shared_bytes)
    return out


def _can_add(additions: LowRank, x: torch.Tensor, kinds: int) -> bool:
    """Whether the factors are as the kernel reads them: a gate and its up are two parts."""
    a, b, parts = additions.a, additions.b, len(additions.ends)
    return (
        a.dtype == b.dtype == x.dtype and a.is_contiguous() and b.is_contiguous() and a.data_ptr() % 16 == 0
        and parts <= MOST_PARTS and (kinds == 1 or parts == 2) and a.shape[2] % 16 == 0
    )


def _tell(call: _Call, additions: LowRank) -> None:
    for name in ("a", "b", "ranks", "order", "slots"):
        setattr(call, name, getattr(additions, name).data_ptr())
    call.launches = additions.published.data_ptr()
    call.sums = call.launches + additions.published.element_size()
    _, call.parts, call.most_ranks, _ = additions.a.shape
    call.ends[: call.parts] = additions.ends


def _can_read(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes."""
    return (
        x.dtype == weight.dtype == torch.bfloat16 and weight.is_contiguous() and x.shape[1] % VECTOR == 0
        and x.stride(1) == 1 and x.stride(0) % VECTOR == 0 and (x.data_ptr() | weight.data_ptr()) % 16 == 0
    )


def multiply_normalised(
    x: torch.Tensor, residual: torch.Tensor, norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None,
    activation: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `NORM_LINEAR`."""
    found = normalise_multiply(x, residual, norm, weight, bias, activation)
    return found or norm_linear.norm_linear_pdl(x, residual, norm, weight, bias, activation)


def normalise_multiply(
    x: torch.Tensor, residual: torch.Tensor, norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None,
    activation: str = "", additions: LowRank | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`multiply` behind a norm, and the new residual [M, K]; None where the kernel does not take it."""
    is_plain = residual.dtype == norm.weight.dtype == torch.bfloat16 and residual.stride(1) == 1
    if not is_plain or residual.stride(0) % VECTOR or (residual.data_ptr() | norm.weight.data_ptr()) % 16:
        return None
    total = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    out = multiply(x, weight, bias, activation, before=(residual, norm, total), additions=additions)
    return None if out is None else (out, total)

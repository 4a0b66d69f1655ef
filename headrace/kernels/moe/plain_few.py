"""Experts in bfloat16 for one token on Hopper in two kernels of own CUDA C++ (``csrc/cuda/plain_experts.cu``, which
says how they work): gate and up with the activation, then down with the sum over a token's choices. More tokens, larger
experts, and what does not fit, are passed on to Triton's kernels.

T tokens, k choices, D hidden size, F expert intermediate size, X experts. A unit is EACH neighbouring outputs of an
expert; a gate and its up count once.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import NamedTuple

import torch

from headrace.kernels.cuda_source import (
    LONE_BYTES,
    MOST_BYTES,
    RESERVED_BYTES,
    SM_BYTES,
    CudaKernel,
    address_of,
    cache_compiled,
    count_sms,
    fallback,
    keep_apart,
    load_kernel,
)
from headrace.kernels.launch import ceil_div
from headrace.kernels.moe import RUN_EXPERTS, Stacked
from headrace.kernels.rowwise import Gate
from headrace.kernels.rowwise.triton import GATES

MOST_PAIRS, MOST_WARPS, VECTOR = 32, 16, 8
"""As in the source; numbers of 16 bytes."""
FIXED_BYTES = MOST_PAIRS * (8 + 4)
"""Of shared memory: who chose which expert, and routing weights."""
MOST_TOKENS, MOST_READ = 1, 48 << 20
"""Tokens, of all whose pairs the kernels take, and bytes of one token's experts, beyond which Triton's are as fast or
faster: on an H200, Qwen3-30B-A3B's take 26.6 us beside 24.6, halves of it 15.0 beside 16.3, quarters 9.4 beside 13.6.
"""
GATE_UP_BYTES = LONE_BYTES
"""Shared memory of a block of gate and up, if its ring fits: what is left is down's."""
DOWN_UNIT = 8 << 10
"""Bytes of a unit of down, at most, unless a row has more."""
AHEAD = 1
"""Units of each warp of down, beyond its ring, that the L2 is asked for while gate and up runs."""
LEAST_SLOTS, LEAST_RING = 4, 64 << 10
"""Units on their way to a multiprocessor, and their bytes, with which blocks of both kernels share it; where they have
fewer, each kernel takes all of it."""


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "bias", "out", "ids", "factors")), ("x_stride", c_int64),
        *((name, c_int) for name in (
            "tokens", "top_k", "inputs", "outputs", "x_rows", "stages", "most", "ahead", "gate",
        )),
        *((name, c_float) for name in ("limit", "alpha", "up_offset")),
    )


class Plan(NamedTuple):
    """Outputs ``each`` unit has, ``warps`` of a block, units of a warp's ring, and the shared memory of a block."""

    is_down: bool
    each: int
    warps: int
    stages: int
    shared_bytes: int

    def load(self, device: torch.device) -> CudaKernel:
        """The kernel; see `find_kernel`."""
        return find_kernel(self.is_down, self.each, device)


@cache
def make_plan(
    is_down: bool, num_tokens: int, top_k: int, num_experts: int, inputs: int, outputs: int, sms: int, limit: int
) -> Plan | None:
    """How one of the two products is divided with ``limit`` bytes of shared memory; None where these hold too little of
    the weight."""
    pairs, most = num_tokens * top_k, ceil_div(outputs, sms)
    kinds, x_rows = (1, pairs) if is_down else (2, num_tokens)
    each = 1
    while is_down and each < 8 and each < most and 4 * each * inputs <= DOWN_UNIT:
        each *= 2
    chosen = min(pairs, num_experts)
    most_units = chosen * ceil_div(most, each) if is_down else ceil_div(chosen * outputs, sms)
    unit = ceil_div(2 * kinds * each * inputs, 128) * 128
    fixed = FIXED_BYTES + 16 + 2 * x_rows * inputs + (4 * pairs * most if is_down else 0)
    slots = (limit - fixed) // (unit + 8)
    if slots < LEAST_SLOTS or slots * unit < LEAST_RING:
        return None
    slots = min(slots, most_units)
    shapes = [(MOST_WARPS, slots // MOST_WARPS)] if slots > MOST_WARPS else []
    shapes.append((slots // ceil_div(slots, MOST_WARPS), ceil_div(slots, MOST_WARPS)))
    warps, stages = max(shapes, key=lambda shape: shape[0] * shape[1])
    return Plan(is_down, each, warps, stages, fixed + warps * stages * (unit + 8))


@cache
def make_plans(
    num_tokens: int, top_k: int, num_experts: int, width: int, inner: int, sms: int
) -> tuple[Plan, Plan] | None:
    """Both products of a step; None where the kernels do not take it. If they can, blocks of both share
    multiprocessors, so that down's weights are on their way while gate and up runs."""
    if not num_tokens or num_tokens * top_k > MOST_PAIRS or width % VECTOR or inner % VECTOR:
        return None
    shape = (num_tokens, top_k, num_experts)
    for_gate_up, for_down = (False, *shape, width, inner, sms), (True, *shape, inner, width, sms)
    first = make_plan(*for_gate_up, GATE_UP_BYTES) or make_plan(*for_gate_up, MOST_BYTES)
    if first is None:
        return None
    first = first._replace(shared_bytes=max(first.shared_bytes, GATE_UP_BYTES))
    beside = SM_BYTES - 2 * RESERVED_BYTES - first.shared_bytes
    second = make_plan(*for_down, beside)
    if second is not None:  # all that is left, so that it does not fit twice beside a block of gate and up
        return first, second._replace(shared_bytes=beside)
    second = make_plan(*for_down, MOST_BYTES)
    return second and (first, second._replace(shared_bytes=keep_apart(second.shared_bytes)))


@cache_compiled
def find_kernel(is_down: bool, each: int, device: torch.device) -> CudaKernel:
    """The kernel, compiled (about a second) unless cached. Raises `CudaSourceError` and `OSError`."""
    kernel = load_kernel("plain_experts", device, MOST_BYTES, DOWN=int(is_down), EACH=each)
    kernel.share_multiprocessors()
    return kernel


@cache_compiled
def _can_compile(gate_up: Plan, down: Plan, device: torch.device) -> bool:
    """Whether both kernels can be compiled and loaded; if not, with a warning."""
    with fallback("experts of few tokens run in Triton"):
        for plan in (gate_up, down):
            plan.load(device)
        return True
    return False


def _can_read(x: torch.Tensor, *stacks: Stacked) -> bool:
    """Whether rows begin at multiples of 16 bytes, and all is bfloat16."""
    tensors = [x, *(tensor for stack in stacks for tensor in stack if tensor is not None)]
    return (
        all(tensor.dtype == torch.bfloat16 for tensor in tensors) and all(t.is_contiguous() for t in tensors[1:])
        and x.stride(1) == 1 and x.stride(0) % VECTOR == 0
        and (x.data_ptr() | stacks[0][0].data_ptr() | stacks[1][0].data_ptr()) % 16 == 0
    )


def run_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Stacked, down: Stacked, gate: Gate
) -> torch.Tensor:
    """See `RUN_EXPERTS`; a token may also choose an expert twice."""
    (num_tokens, top_k), (num_experts, width, inner) = ids.shape, down[0].shape
    sms, is_large = count_sms(x.device), num_tokens > MOST_TOKENS or 6 * top_k * width * inner > MOST_READ
    plans = None if is_large else make_plans(num_tokens, top_k, num_experts, width, inner, sms)
    if plans is None or not _can_read(x, gate_up, down) or not _can_compile(*plans, x.device):
        return RUN_EXPERTS.load("triton_pdl")(x, ids, weights, gate_up, down, gate)
    ids, weights = ids.contiguous(), weights.contiguous()
    gated = torch.empty((num_tokens * top_k, inner), dtype=x.dtype, device=x.device)
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    for plan, own, (weight, bias), into in ((plans[0], x, gate_up, gated), (plans[1], gated, down, out)):
        call = _Call(
            x=own.data_ptr(), weight=weight.data_ptr(), bias=address_of(bias), out=into.data_ptr(), ids=ids.data_ptr(),
            factors=weights.data_ptr(), x_stride=own.stride(0), tokens=num_tokens, top_k=top_k, inputs=own.shape[1],
            outputs=into.shape[1], x_rows=len(own), stages=plan.stages, most=ceil_div(into.shape[1], sms),
            ahead=AHEAD if plan.is_down else 0, gate=GATES[gate.kind], limit=gate.limit, alpha=gate.alpha,
            up_offset=gate.up_offset,
        )
        plan.load(x.device).launch(sms, 32 * plan.warps, call, is_dependent=True, shared_bytes=plan.shared_bytes)
    return out

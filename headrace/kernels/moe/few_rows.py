"""Experts in MXFP4 with few rows each on Hopper, by own CUDA C++ (``csrc/cuda/grouped_experts.cu``): pairs sorted by
expert, gate and up with the activation, down with the routing weights, the sum over a token's choices.

T tokens, k choices, N = T * k pairs, X experts, D hidden size, F expert intermediate size.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import NamedTuple

import torch

from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import BLOCK, HALF, DeviceCodes
from headrace.kernels.cuda_source import (
    MOST_BYTES,
    CudaKernel,
    CudaSourceError,
    cache_compiled,
    compile_source,
    count_sms,
    keep_apart,
)
from headrace.kernels.launch import ceil_div, next_power_of_2
from headrace.kernels.moe import CodedStack, Gate, is_few
from headrace.kernels.moe.experts import BLOCK_SUM, _sum_kernel
from headrace.kernels.moe.triton import group_pairs
from headrace.kernels.rowwise.triton import GATES

logger = logging.getLogger(__name__)

MOST_STAGES, MOST_UNITS, EIGHT = 16, 4, 8
"""Of the ring, as in the source; units of 128 inputs of rows of x that registers of a warp hold; rows or columns of an
instruction."""
WARPS = (16, 12, 8)
PRODUCERS = 4
"""Warps of a block that multiply, and those that copy."""
LEAST_TOKENS, MOST_EACH = 5, 2
"""Of a step, and pairs per expert on average, for which this is faster than others on an H200. Fewer tokens are faster
by `coded_few`; with more pairs, decoding an expert for eight rows at a time bounds this one, and others decode it for
more."""


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "bias", "out", "codes", "scales", "order", "ends", "factors")),
        ("x_stride", c_int64), *((name, c_int) for name in ("top_k", "inputs", "outputs", "units", "stages")),
        *((name, c_float) for name in ("limit", "alpha", "up_offset")),
    )


class Form(NamedTuple):
    """What a kernel is compiled for: ``gate`` is a kind of activation, "" for down; a block takes ``tiles`` sixteens of
    rows of the weight at a time, whose inputs ``warps`` warps share: each has 128 inputs ``units`` times, or if not
    ``is_whole`` at most so often."""

    gate: str
    warps: int
    units: int
    is_whole: bool
    tiles: int
    num_experts: int

    def plan_ring(self, units: int) -> tuple[int, int]:
        """Stages of the ring for a weight of so many units of inputs, and bytes of shared memory in all."""
        fixed = ceil_div(3 * 8 * MOST_STAGES + 4 * self.num_experts, BLOCK) * BLOCK
        # rows of codes, with bytes against bank conflicts, and of scales
        stage = 2 * self.tiles * EIGHT * (units * (HALF + 4) + 32)
        stages = min(MOST_STAGES, (MOST_BYTES - fixed) // stage)
        return stages, fixed + stages * stage


def choose_form(inputs: int, gate: str, num_experts: int) -> Form | None:
    """For a weight of so many ``inputs``; None where no form takes it."""
    units = ceil_div(inputs, BLOCK)
    # least time that warps wait for those with one unit more
    fits = [warps for warps in WARPS if warps <= units and ceil_div(units, warps) <= MOST_UNITS]
    if not fits:
        return None
    warps = min(fits, key=lambda warps: (warps * ceil_div(units, warps) - units, -warps))
    most = ceil_div(units, warps)
    return Form(gate, warps, most, warps * most == units, 2 if most == 1 else 1, num_experts)


def is_faster(num_tokens: int, top_k: int, num_experts: int) -> bool:
    """Whether a step is to run here, if it is taken."""
    return num_tokens >= LEAST_TOKENS and is_few(num_tokens, top_k, num_experts, MOST_EACH)


def takes(codes: DeviceCodes) -> bool:
    """Whether the kernels multiply with stacked codes."""
    if codes.order is not None or codes.has_zeros or codes.in_features % EIGHT or codes.is_tiled:
        return False
    return codes.code is Code.E2M1 and codes.has_powers and codes.rows == 1


@cache_compiled
def find_kernel(form: Form, device: torch.device) -> CudaKernel:
    """The kernel, compiled (about a second) unless cached. Raises `CudaSourceError` and `OSError`."""
    macros = {
        "DOWN": int(not form.gate), "GATE": GATES[form.gate] if form.gate else 0, "WARPS": form.warps,
        "UNITS": form.units, "WHOLE": int(form.is_whole), "TILES": form.tiles, "EXPERTS": form.num_experts,
    }
    options = ("-arch=sm_90a", "-std=c++17", *(f"-D{name}={value}" for name, value in macros.items()))
    with torch.cuda.device(device):
        return CudaKernel(compile_source("grouped_experts", options), "grouped_experts", MOST_BYTES)


@cache_compiled
def _can_compile(first: Form, second: Form, device: torch.device) -> bool:
    """Whether both kernels can be compiled and loaded; if not, with a warning. They are those of steps of any size."""
    try:
        for form in (first, second):
            find_kernel(form, device)
    except (CudaSourceError, OSError, AttributeError) as error:
        logger.warning("experts with few rows each run in Triton: %s", error)
        return False
    return True


class Pairs(NamedTuple):
    """``order`` [N] and ``ends`` [X] of `GROUP_PAIRS`, and routing weights ``factors`` [T, k] float32, contiguous."""

    order: torch.Tensor
    ends: torch.Tensor
    factors: torch.Tensor


def multiply(form: Form, x: torch.Tensor, stack: CodedStack, pairs: Pairs, gate: Gate, out: torch.Tensor) -> None:
    """Gate and up of rows of x [T, D] into ``out`` [N, F] bfloat16 in the order of pairs, or down of x [N, F] in that
    order times routing weights into ``out`` [N, D] float32 by pair. Pairs without an expert are not written."""
    weight, bias = stack
    units = ceil_div(weight.in_features, BLOCK)
    stages, shared_bytes = form.plan_ring(units)
    call = _Call(
        x=x.data_ptr(), bias=None if bias is None else bias.data_ptr(), out=out.data_ptr(),
        codes=weight.codes.data_ptr(), scales=weight.scales.data_ptr(), order=pairs.order.data_ptr(),
        ends=pairs.ends.data_ptr(), factors=pairs.factors.data_ptr(), x_stride=x.stride(0),
        top_k=pairs.factors.shape[1], inputs=weight.in_features,
        outputs=out.shape[1], units=units, stages=stages, limit=gate.limit, alpha=gate.alpha,
        up_offset=gate.up_offset,
    )
    find_kernel(form, x.device).launch(
        count_sms(x.device), 32 * (form.warps + PRODUCERS), call, is_dependent=True,
        shared_bytes=keep_apart(shared_bytes),
    )


def run_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: CodedStack, down: CodedStack, gate: Gate
) -> torch.Tensor | None:
    """See `CODED_EXPERTS`; x is bfloat16, its rows begin at multiples of 16 bytes, and ``ids`` are contiguous. None for
    codes and sizes that are not taken here."""
    (num_tokens, top_k), width, inner = ids.shape, x.shape[1], down[0].in_features
    num_experts, num_pairs = down[0].out_features // width, num_tokens * top_k
    if not (takes(gate_up[0]) and takes(down[0])):
        return None
    first, second = choose_form(width, gate.kind, num_experts), choose_form(inner, "", num_experts)
    if first is None or second is None or not _can_compile(first, second, x.device):
        return None
    order, _, ends = group_pairs(ids, num_experts, pdl=True)
    pairs = Pairs(order, ends, weights.contiguous())
    gated = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    parts = torch.empty((num_pairs, width), dtype=torch.float32, device=x.device)
    multiply(first, x, gate_up, pairs, gate, gated)
    multiply(second, gated, down, pairs, gate, parts)
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    _sum_kernel[(num_tokens, ceil_div(width, BLOCK_SUM))](
        parts, ids, out, D=width, TOP_K=top_k, BLOCK_K=next_power_of_2(top_k), BLOCK=BLOCK_SUM, PDL=True, num_warps=4,
        launch_pdl=True
    )
    return out

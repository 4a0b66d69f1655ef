"""Plain experts for many tokens on Hopper, by own CUDA C++ (``csrc/cuda/sorted_product.cu``): pairs sorted by expert,
their rows gathered, gate and up with the activation, down, the sum over a token's choices.

T tokens, k choices, X experts, D hidden size, F expert intermediate size.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p

import torch

from headrace.kernels.coded_linear.hopper import GATES, NOT_GATED, Gated
from headrace.kernels.coded_linear.wide import describe_weight
from headrace.kernels.cuda_source import (
    MOST_BYTES,
    CudaKernel,
    address_of,
    cache_compiled,
    count_sms,
    describe_boxes,
    fallback,
    load_kernel,
)
from headrace.kernels.launch import ceil_div, count_tiles
from headrace.kernels.moe import Stacked, hopper
from headrace.kernels.moe.pair_order import group_pairs
from headrace.kernels.moe.triton import sum_pairs
from headrace.kernels.rowwise import Gate

ROWS, BOX, WIDE, DEPTH, CLUSTER, THREADS, STAGES = 256, 64, 128, 64, 2, 384, 4
"""As in the source: rows of a tile at most, and of a box; rows of the weight in a tile; inputs of a stage; blocks of a
cluster; threads of a block; stages."""


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        ("bias", c_void_p), ("ends", c_void_p), ("out", c_void_p), ("outputs", c_int), ("inputs", c_int),
        ("limit", c_float), ("alpha", c_float), ("up_offset", c_float),
    )


@cache_compiled
def find_kernel(gate: str, num_experts: int, device: torch.device) -> CudaKernel | None:
    """The kernel, compiled (about a second) unless cached; None, with a warning, where that fails."""
    with fallback("experts of many tokens run in separate kernels"):
        return load_kernel(
            "sorted_product", device, MOST_BYTES, STAGES=STAGES, GATE=GATES[gate], EXPERTS=num_experts
        )
    return None


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor, kernel: CudaKernel,
    gated: Gated = NOT_GATED,
) -> torch.Tensor:
    """Rows x [M, K] bfloat16 times those experts of ``weight`` [X, N, K] whose they are (``ends`` [X] of
    `GROUP_PAIRS`), plus their bias [X, N], followed by the activation ``gated`` if it has a kind, which halves N: [M,
    N] bfloat16. ``kernel`` is of `find_kernel` with that kind. Rows from the last end on are not written. K is a
    multiple of 8, N of 8, with an activation of 16."""
    num_experts, outputs, inputs = weight.shape
    gate_outputs = outputs // 2 if gated.kind else 0
    out = torch.empty((len(x), gate_outputs or outputs), dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    call = _Call(
        bias=address_of(bias), ends=ends.data_ptr(), out=out.data_ptr(), outputs=out.shape[1], inputs=inputs,
        limit=gated.limit, alpha=gated.alpha, up_offset=gated.up_offset,
    )
    tiles = count_tiles(len(x), ROWS, num_experts) * ceil_div(outputs, CLUSTER * WIDE)  # pairs of them
    kernel.launch(
        CLUSTER * min(tiles, count_sms(x.device) // CLUSTER), THREADS, describe_boxes(x, (BOX, DEPTH)),
        describe_weight(weight.view(-1, inputs), WIDE, DEPTH, gate_outputs), call, is_dependent=True,
    )
    return out


def run_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Stacked, down: Stacked, gate: Gate
) -> torch.Tensor | None:
    """See `MANY_EXPERTS`."""
    num_experts, gated = len(down[0]), Gated(*gate)
    first, second = (find_kernel(kind, num_experts, x.device) for kind in (gated.kind, ""))
    if first is None or second is None or not all(stack.is_contiguous() for stack, _ in (gate_up, down)):
        return None
    order, place, ends = group_pairs(ids, num_experts)
    rows = hopper.gather_rows(x, order, ends, ids.shape[1], evens_first=False)
    out = multiply(multiply(rows, *gate_up, ends, first, gated), *down, ends, second)
    return sum_pairs(out, place, weights, ids, None, pdl=True)

"""`group_pairs` for steps of any size on Hopper: thousands of pairs by own CUDA C++ (``csrc/cuda/sort_pairs.cu``)."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_void_p

import torch

from headrace.kernels.cuda_source import CudaKernel, cache_compiled, fallback, load_kernel
from headrace.kernels.launch import ceil_div
from headrace.kernels.moe import triton

WARPS, AHEAD = 32, 8
"""As in the source."""


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in ("ids", "order", "place", "ends")),
        *((name, c_int) for name in ("pairs", "experts", "turns")),
    )


@cache_compiled
def find_kernel(device: torch.device) -> CudaKernel | None:
    """The kernel, compiled (half a second) unless cached; None, with a warning, where that fails."""
    with fallback("many pairs of token and expert are sorted in Triton"):
        return load_kernel("sort_pairs", device)
    return None


def group_pairs(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `GROUP_PAIRS`; ``ids`` contiguous. Launched dependently."""
    pairs = ids.numel()
    kernel = None if pairs <= triton.AT_ONCE[-1] else find_kernel(ids.device)
    if kernel is None:
        return triton.group_pairs(ids, num_experts, pdl=True)
    order, place = (torch.empty(pairs, dtype=torch.int32, device=ids.device) for _ in range(2))
    ends = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    turns = ceil_div(pairs, 32 * WARPS * AHEAD) * AHEAD
    call = _Call(*(part.data_ptr() for part in (ids, order, place, ends)), pairs, num_experts, turns)
    kernel.launch(num_experts + 1, 32 * WARPS, call, is_dependent=True)
    return order, place, ends

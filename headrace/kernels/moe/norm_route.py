"""The norm before an MLP of experts, its router and the choice in one launch of own CUDA C++, for a few tokens: see
``csrc/cuda/norm_route.cu``.

T tokens, D hidden size, S partial sums, X experts, k choices.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Unpack

import torch

from headrace.kernels.cuda_source import CudaKernel, cache_compiled, fallback, load_kernel
from headrace.kernels.launch import ceil_div
from headrace.kernels.linear import Norm
from headrace.kernels.moe import RouteShape
from headrace.kernels.moe.reference import LEAST_SUM
from headrace.kernels.moe.triton import SCORES

CLUSTER, WARPS, EIGHT = 8, 8, 8
"""As in the source: blocks of a token, warps of a block; numbers in 16 bytes."""
CHUNK = 32 * WARPS * EIGHT
MOST_TOKENS, MOST_CHUNKS, MOST_EXPERTS, MOST_CHOICES = 16, 4, 512, 32
MOST_SHARED_BYTES = 160 << 10
"""Of a block: of more the router's rows take too long for eight multiprocessors."""


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in (
            "pending", "residual", "norm", "weight", "bias", "choice_bias", "out", "ids", "weights",
        )),
        *((name, c_int64) for name in ("pending_stride", "partial_stride", "residual_stride", "weight_stride")),
        *((name, c_int) for name in ("inputs", "top_k", "partials")),
        *((name, c_float) for name in ("eps", "offset", "scale", "least_sum")),
    )


def count_shared_bytes(num_experts: int, width: int) -> int:
    """Of a block: products of all experts and sums of warps; x, and the block's rows of the router."""
    own = ceil_div(num_experts, CLUSTER)
    shares = 1 if own >= WARPS else WARPS // own
    return ceil_div(num_experts * shares + WARPS, 4) * 16 + 2 * width * (1 + own)


@cache_compiled
def _find_kernel(
    num_experts: int, chunks: int, score: int, renormalise: bool, shared_bytes: int, device: torch.device
) -> CudaKernel | None:
    """The kernel, compiled unless cached; None, with a warning, where that fails."""
    with fallback("norms before experts, routers and choices take a kernel each"):
        kernel = load_kernel(
            "norm_route", device, shared_bytes, EXPERTS=num_experts, CHUNKS=chunks, SCORE=score,
            RENORMALISE=int(renormalise),
        )
        kernel.share_multiprocessors()  # with the kernels before and behind it
        return kernel
    return None


def _takes(
    pending: torch.Tensor, residual: torch.Tensor, norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None,
    shape: RouteShape
) -> bool:
    (num_tokens, width), num_experts = residual.shape, len(weight)
    halves = [residual, norm.weight, weight] + ([pending] if pending.dim() == 2 else [])
    halves += [] if bias is None else [bias]
    rows = [pending, residual, weight]
    return (
        0 < num_tokens <= MOST_TOKENS and width % EIGHT == 0 and width <= MOST_CHUNKS * CHUNK
        and num_experts <= MOST_EXPERTS and shape["top_k"] <= MOST_CHOICES and shape["num_groups"] == 1
        and count_shared_bytes(num_experts, width) <= MOST_SHARED_BYTES
        and all(tensor.dtype == torch.bfloat16 for tensor in halves)
        and (pending.dim() == 2 or pending.dtype == torch.float32)
        and all(row.stride(-1) == 1 and row.stride(-2) % EIGHT == 0 and row.data_ptr() % 16 == 0 for row in rows)
        and norm.weight.data_ptr() % 16 == 0 and pending.stride(0) % EIGHT == 0
    )


def norm_route(
    pending: torch.Tensor, residual: torch.Tensor, norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None,
    choice_bias: torch.Tensor | None, **shape: Unpack[RouteShape]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """See `NORM_ROUTE`; writes the new residual in place; of equal scores the first expert wins."""
    if not _takes(pending, residual, norm, weight, bias, shape):
        return None
    (num_tokens, width), num_experts, device = residual.shape, len(weight), residual.device
    kernel = _find_kernel(
        num_experts, ceil_div(width, CHUNK), SCORES[shape["score"]], shape["renormalise"],
        count_shared_bytes(num_experts, width), device
    )
    if kernel is None:
        return None
    out = torch.empty((num_tokens, width), dtype=residual.dtype, device=device)
    ids = torch.empty((num_tokens, shape["top_k"]), dtype=torch.int64, device=device)
    weights = torch.empty((num_tokens, shape["top_k"]), dtype=torch.float32, device=device)
    call = _Call(
        *(None if tensor is None else tensor.data_ptr() for tensor in (
            pending, residual, norm.weight, weight, bias, choice_bias, out, ids, weights
        )),
        pending.stride(-2), pending.stride(0), residual.stride(0), weight.stride(0), width, shape["top_k"],
        0 if pending.dim() == 2 else len(pending), norm.eps, norm.offset, shape["scale"], LEAST_SUM,
    )
    kernel.launch(CLUSTER * num_tokens, 32 * WARPS, call, is_dependent=True)
    return out, residual, ids, weights

"""A router's product and its choice of experts in one launch of own CUDA C++, for up to some hundred tokens whose norm
another kernel computed, as a sum over ranks does: see ``csrc/cuda/linear_route.cu``.

T tokens, D hidden size, X experts, k choices.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Unpack

import torch

from headrace.kernels.cuda_source import CudaKernel, address_of, cache_compiled, fallback, load_kernel
from headrace.kernels.launch import ceil_div
from headrace.kernels.moe import RouteShape
from headrace.kernels.moe.reference import LEAST_SUM
from headrace.kernels.moe.triton import SCORES

EIGHT, TILE, STEP = 8, 16, 32
"""As in the source: numbers of 16 bytes, experts of a product, inputs of a step."""
MOST_CLUSTER, MOST_HELD = 8, 8
"""Blocks of a cluster; tiles times steps that a warp holds in registers, eight of them each."""
MOST_STATIC_BYTES = 48 << 10
"""Shared memory that the source may declare: what ptxas of every version takes."""
MOST_TOKENS, MOST_SMALL, MOST_CHOICES = 256, 128, 32
"""Tokens at most; those up to which a cluster has 8, beyond 16; choices of a token."""


@dataclass(frozen=True)
class Form:
    """Macros of the source."""

    tiles: int
    warps: int
    steps: int
    tokens: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: rows of 16 tokens."""
        return 2 * 16 * 32 * self.warps * self.steps if self.tokens == 16 else 0

    def count_static_bytes(self, num_experts: int) -> int:
        """``Room`` of the source: a barrier, logits of the tokens that a block chooses for, sums of warps."""
        own_tokens = ceil_div(self.tokens, self.count_blocks(num_experts))
        return 8 + 4 * (own_tokens * num_experts + self.warps * TILE * self.tiles * self.tokens)

    def count_blocks(self, num_experts: int) -> int:
        """Of a cluster."""
        return ceil_div(num_experts, TILE * self.tiles)


def find_form(num_experts: int, width: int, num_tokens: int) -> Form | None:
    """The form for a router [X, D]; None where its rows do not fit in the registers of a cluster, or sums of warps not
    in its shared memory."""
    tiles = 1
    while ceil_div(num_experts, TILE * tiles) > MOST_CLUSTER:
        tiles *= 2
    for warps in (8, 16):
        steps = ceil_div(width, STEP * warps)
        form = Form(tiles, warps, steps, 8 if num_tokens <= MOST_SMALL else 16)
        if tiles * steps <= MOST_HELD and form.count_static_bytes(num_experts) <= MOST_STATIC_BYTES:
            return form
    return None


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "bias", "choice_bias", "ids", "weights")),
        *((name, c_int64) for name in ("x_stride", "weight_stride")),
        *((name, c_int) for name in ("tokens", "inputs", "top_k")),
        *((name, c_float) for name in ("scale", "least_sum")),
    )


@cache_compiled
def _find_kernel(
    num_experts: int, form: Form, score: int, renormalise: bool, device: torch.device
) -> CudaKernel | None:
    """The kernel, compiled unless cached; None, with a warning, where that fails."""
    with fallback("routers and choices of experts take a kernel each"):
        kernel = load_kernel(
            "linear_route", device, form.shared_bytes, EXPERTS=num_experts, TILES=form.tiles, WARPS=form.warps,
            STEPS=form.steps, TOKENS=form.tokens, SCORE=score, RENORMALISE=int(renormalise),
        )
        kernel.share_multiprocessors()  # with the kernels before and behind it
        return kernel
    return None


def _takes(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, choice_bias: torch.Tensor | None,
    shape: RouteShape
) -> bool:
    halves = [x, weight] + ([] if bias is None else [bias])
    return (
        0 < len(x) <= MOST_TOKENS and x.shape[1] % EIGHT == 0 and shape["top_k"] <= min(MOST_CHOICES, len(weight))
        and shape["num_groups"] == 1 and all(tensor.dtype == torch.bfloat16 for tensor in halves)
        and (choice_bias is None or choice_bias.dtype == torch.float32)
        and all(rows.stride(1) == 1 and rows.stride(0) % EIGHT == 0 and rows.data_ptr() % 16 == 0
                for rows in (x, weight))
    )


def linear_route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, choice_bias: torch.Tensor | None,
    **shape: Unpack[RouteShape]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """See `LINEAR_ROUTE`; of equal scores the first expert wins. By programmatic dependent launch: ``weight`` and the
    biases are read before the previous kernel has ended."""
    (num_tokens, width), num_experts = x.shape, len(weight)
    form = find_form(num_experts, width, num_tokens) if _takes(x, weight, bias, choice_bias, shape) else None
    if form is None:
        return None
    kernel = _find_kernel(num_experts, form, SCORES[shape["score"]], shape["renormalise"], x.device)
    if kernel is None:
        return None
    ids = torch.empty((num_tokens, shape["top_k"]), dtype=torch.int64, device=x.device)
    weights = torch.empty((num_tokens, shape["top_k"]), dtype=torch.float32, device=x.device)
    call = _Call(
        *(address_of(tensor) for tensor in (x, weight, bias, choice_bias, ids, weights)), x.stride(0),
        weight.stride(0), num_tokens, width, shape["top_k"], shape["scale"], LEAST_SUM,
    )
    kernel.launch(
        form.count_blocks(num_experts) * ceil_div(num_tokens, form.tokens), 32 * form.warps, call, is_dependent=True
    )
    return ids, weights

"""Routing in one kernel, a program a token: its scores, and the best of them one after the other. X experts, k
choices."""

from functools import partial
from typing import Unpack

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import next_power_of_2, wait_for_previous
from headrace.kernels.moe import RouteShape
from headrace.kernels.moe.reference import LEAST_SUM

SCORES = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2}
LEAST = tl.constexpr(-3.0e38)  # what is no number is chosen last, but never twice: those that were chosen are below


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, logits_stride, scale, least_sum, X: tl.constexpr, BLOCK_X: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr, SCORE: tl.constexpr, RENORMALISE: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at, nth = tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_K)
    bias = tl.load(bias_ptr + at, mask=at < X, other=0.0) if HAS_BIAS else 0.0
    wait_for_previous(PDL)
    logits = tl.load(logits_ptr + token * logits_stride + at, mask=at < X, other=-float("inf")).to(tl.float32)
    if SCORE == 0:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    elif SCORE == 1:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        power = tl.exp(tl.minimum(logits, 20.0))
        softplus = tl.where(logits < -8.0, power - 0.5 * power * power, tl.log(1.0 + power))
        scores = tl.sqrt(tl.where(logits > 20.0, logits, softplus))
    choice = logits if SCORE == 0 and not HAS_BIAS else scores + bias
    choice = tl.where(at < X, tl.where(choice > LEAST, choice, LEAST), -float("inf"))
    ids = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.min(tl.where(choice == tl.max(choice, 0), at, BLOCK_X), 0)
        ids = tl.where(nth == i, best, ids)
        weights = tl.where(nth == i, tl.sum(tl.where(at == best, scores, 0.0), 0), weights)
        choice = tl.where(at == best, -float("inf"), choice)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, 0) + least_sum)
    tl.store(ids_ptr + token * TOP_K + nth, ids.to(tl.int64), mask=nth < TOP_K)
    tl.store(weights_ptr + token * TOP_K + nth, weights * scale, mask=nth < TOP_K)


def route(
    logits: torch.Tensor, choice_bias: torch.Tensor | None, *, pdl: bool = False, **shape: Unpack[RouteShape]
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ROUTE`; of equal scores the first expert wins."""
    (num_tokens, num_experts), top_k = logits.shape, shape["top_k"]
    assert shape["num_groups"] == 1, "see the registry"
    ids = torch.empty((num_tokens, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits, logits if choice_bias is None else choice_bias, ids, weights, logits.stride(0), shape["scale"],
            LEAST_SUM, X=num_experts,
            BLOCK_X=next_power_of_2(num_experts), TOP_K=top_k, BLOCK_K=next_power_of_2(top_k),
            SCORE=SCORES[shape["score"]],
            RENORMALISE=shape["renormalise"], HAS_BIAS=choice_bias is not None, PDL=pdl,
            num_warps=1 if num_experts <= 256 else 4, launch_pdl=pdl,
        )
    return ids, weights


route_pdl = partial(route, pdl=True)

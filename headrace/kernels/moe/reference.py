"""Routing and grouped products in plain torch: the oracle and the fallback. T tokens, X experts, k experts a token."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F

from headrace.kernels.coded_linear.reference import dequantise, quantise_rows
from headrace.kernels.linear import Norm
from headrace.kernels.moe import CodedStack, PackedStack, RouteShape, Stacked
from headrace.kernels.packed_linear.layout import unpack
from headrace.kernels.rowwise import Gate
from headrace.kernels.rowwise import reference as rowwise

LEAST_SUM = 1e-20
"""Added to the sum that weights are divided by; it matters only where every chosen score is 0."""


def route(
    logits: torch.Tensor, choice_bias: torch.Tensor | None, **shape: Unpack[RouteShape]
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ROUTE`. Groups as in DeepSeek-V2 and V3, arXiv:2405.04434 section 2.2 and arXiv:2412.19437 section 2.1."""
    logits = logits.float()
    if shape["score"] == "softmax" and shape["renormalise"] and choice_bias is None and shape["num_groups"] == 1:
        # The softmax over all experts, renormalised over some, is the softmax over those.
        chosen, ids = logits.topk(shape["top_k"], dim=-1)
        return ids, chosen.softmax(-1).mul_(shape["scale"])
    scores = make_scores(logits, shape["score"])
    choice = scores if choice_bias is None else scores + choice_bias
    if shape["num_groups"] > 1:
        choice = _keep_best_groups(choice, shape)
    ids = choice.topk(shape["top_k"], dim=-1).indices
    return ids, _weigh(scores.gather(1, ids), renormalise=shape["renormalise"], scale=shape["scale"])


def norm_route(
    pending: torch.Tensor, residual: torch.Tensor, norm: Norm, router: torch.Tensor, bias: torch.Tensor | None,
    choice_bias: torch.Tensor | None, **shape: Unpack[RouteShape]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `NORM_ROUTE`."""
    x, residual = rowwise.add_rms_norm(pending, residual, norm.weight, norm.eps, norm.offset)
    return x, residual, *linear_route(x, router, bias, choice_bias, **shape)


def linear_route(
    x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None, choice_bias: torch.Tensor | None,
    **shape: Unpack[RouteShape]
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `LINEAR_ROUTE`."""
    return route(F.linear(x, router, bias), choice_bias, **shape)


def hash_route(
    logits: torch.Tensor, table: torch.Tensor, token_ids: torch.Tensor, *, score: str, renormalise: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `HASH_ROUTE`."""
    ids = table.index_select(0, token_ids)
    return ids, _weigh(make_scores(logits.float(), score).gather(1, ids), renormalise=renormalise, scale=scale)


def own_experts(ids: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """See `OWN_EXPERTS`."""
    own = ids - first
    return torch.where((own >= 0) & (own < count), own, -1)


def _weigh(scores: torch.Tensor, *, renormalise: bool, scale: float) -> torch.Tensor:
    if renormalise:
        scores = scores / (scores.sum(-1, keepdim=True) + LEAST_SUM)
    return scores.mul_(scale)


def make_scores(logits: torch.Tensor, score: str) -> torch.Tensor:
    """[T, X] float32 to scores of the same shape."""
    if score == "softmax":
        return logits.softmax(-1)
    if score == "sigmoid":
        return logits.sigmoid()
    assert score == "sqrt_softplus", score
    return F.softplus(logits).sqrt_()


def _keep_best_groups(choice: torch.Tensor, shape: RouteShape) -> torch.Tensor:
    """``choice`` [T, X] with -inf for experts outside the ``top_groups`` best groups."""
    # [T, groups, X / groups]; worth [T, groups]
    grouped = choice.unflatten(1, (shape["num_groups"], -1))
    worth = grouped.topk(shape["group_best"], dim=-1).values.sum(-1)
    best = worth.topk(shape["top_groups"], dim=-1).indices
    # -inf, not 0: sigmoid scores plus bias may be negative
    is_out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(1)


def group_pairs(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `GROUP_PAIRS`."""
    flat = ids.flatten()
    # pairs without an expert sort behind the last expert
    experts, order = torch.where(flat < 0, num_experts, flat).sort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    ends = torch.searchsorted(experts, torch.arange(num_experts, device=experts.device), right=True, out_int32=True)
    return order.int(), place.int(), ends


def sum_pairs(
    rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """See `SUM_PAIRS`."""
    by_choice = rows.index_select(0, place).view(*weights.shape, -1).float()
    if bias is not None:
        by_choice += bias.float()[ids.clamp(min=0)]
    weighted = by_choice * weights.unsqueeze(-1)
    return weighted.masked_fill((ids < 0).unsqueeze(-1), 0).sum(1).to(rows.dtype)


def gate_pairs(x: torch.Tensor, bias: torch.Tensor | None, experts: torch.Tensor, gate: Gate) -> torch.Tensor:
    """See `GATE_PAIRS`."""
    return gate_halves(x if bias is None else x.float() + bias.float()[experts], gate).to(x.dtype)


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """See `GROUPED_LINEAR`. Reads the weights of experts that have rows and no others; on a GPU it waits for
    ``ends``."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = F.linear(x[start:end], weight[expert], None if bias is None else bias[expert])
        start = end
    return out


def gate_halves(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    """[N, 2F] to [N, F]."""
    if gate.kind == "clamped":
        return rowwise.clamped_swiglu(x, limit=gate.limit, alpha=gate.alpha, up_offset=gate.up_offset)
    return {"silu": rowwise.silu_mul, "gelu_tanh": rowwise.gelu_tanh_mul}[gate.kind](x)


def run_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Stacked, down: Stacked, gate: Gate
) -> torch.Tensor:
    """See `RUN_EXPERTS`. Sums in float32; on a GPU it waits for the ids, since the loop is over chosen experts."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids[ids >= 0].unique():
        rows, choice = torch.where(ids == expert)
        hidden = x[rows]
        # [n, D] to [n, 2F], through the gate to [n, F], then to [n, D]
        for i, (weight, bias) in enumerate((gate_up, down)):
            hidden = F.linear(hidden, weight[expert], None if bias is None else bias[expert])
            hidden = hidden if i else gate_halves(hidden, gate)
        out.index_add_(0, rows, hidden.float() * weights[rows, choice, None])
    return out.to(x.dtype)


def packed_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: PackedStack, down: PackedStack, gate: Gate
) -> torch.Tensor:
    """See `PACKED_EXPERTS`; unlike the native kernel it does not round inputs to 8 bits."""
    num_experts = down[0].out_features // x.shape[1]
    first, second = (
        (unpack(matrix, x.dtype).unflatten(0, (num_experts, -1)), bias) for matrix, bias in (gate_up, down)
    )
    return run_experts(x, ids, weights, first, second, gate)


def coded_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: CodedStack, down: CodedStack, gate: Gate
) -> torch.Tensor:
    """See `CODED_EXPERTS`."""
    num_experts = down[0].out_features // x.shape[1]
    first, second = (
        (dequantise(matrix, x.dtype).unflatten(0, (num_experts, -1)), bias) for matrix, bias in (gate_up, down)
    )
    return run_experts(x, ids, weights, first, second, gate)


def rounded_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: CodedStack, down: CodedStack, gate: Gate
) -> torch.Tensor:
    """See `ROUNDED_EXPERTS`. Products are in float32, of numbers that are exact there."""
    num_experts, rounded = down[0].out_features // x.shape[1], quantise_rows(x).decode(torch.float32)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    stacks = [
        (dequantise(codes, torch.float32).unflatten(0, (num_experts, -1)), bias) for codes, bias in (gate_up, down)
    ]
    for expert in ids[ids >= 0].unique():
        rows, choice = torch.where(ids == expert)
        hidden = rounded[rows]
        for i, (weight, bias) in enumerate(stacks):
            hidden = F.linear(hidden, weight[expert], None if bias is None else bias[expert].float())
            if not i:
                hidden = quantise_rows(gate_halves(hidden, gate).to(x.dtype)).decode(torch.float32)
        out.index_add_(0, rows, hidden.to(x.dtype).float() * weights[rows, choice, None])
    return out.to(x.dtype)


def grouped_mm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """See `GROUPED_LINEAR`; by torch's CUTLASS kernel, which reads the row counts on the device."""
    out = torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return out if bias is None else out.add_(bias.index_select(0, experts))

"""Adapters between token formats; see `Adapter`. T tokens, D width, k experts a token, N = T * k pairs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.layers.moe.contract import ChosenTokens, GroupedTokens


def group_choices(tokens: ChosenTokens, run: Callable[[GroupedTokens], torch.Tensor]) -> torch.Tensor:
    """Sort the pairs of token and expert by expert, run, then weigh and sum each token's rows. Waits for nothing, and
    sums in the order of choice, so that equal inputs give equal outputs."""
    num_tokens, top_k = tokens.ids.shape
    ids = tokens.ids.flatten()
    experts, order = (_nobody_last(ids, tokens.num_experts) if tokens.has_nobody else ids).sort(stable=True)
    ends = _group_ends(experts, tokens.num_experts)
    hidden, some = (
        tokens.hidden.index_select(0, order // top_k),
        experts.clamp(max=tokens.num_experts - 1) if tokens.has_nobody else experts
    )
    rows = run(GroupedTokens(hidden, ends, some))
    if tokens.has_nobody:
        rows = rows.masked_fill((experts == tokens.num_experts).unsqueeze(-1), 0)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    by_choice = rows.index_select(0, place).view(num_tokens, top_k, -1)
    return torch.bmm(tokens.weights.to(rows.dtype).unsqueeze(1), by_choice).squeeze(1)


def _nobody_last(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Nobody as the expert after the last, whose rows end no group."""
    return torch.where(ids < 0, num_experts, ids)


def _group_ends(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[X] int32: how many of the sorted ``experts`` [N] come before each next expert."""
    return torch.searchsorted(experts, torch.arange(num_experts, device=experts.device), right=True, out_int32=True)

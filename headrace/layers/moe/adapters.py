"""Adapters between token formats; see `Adapter`. T tokens, D width, k experts a token, N = T * k pairs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.layers.moe.contract import ChosenTokens, GroupedTokens


def group_choices(tokens: ChosenTokens, run: Callable[[GroupedTokens], torch.Tensor]) -> torch.Tensor:
    """Sort the pairs of token and expert by expert, run, then weigh and sum each token's rows. Waits for nothing, and sums
    in the order of choice, so that equal inputs give equal outputs."""
    num_tokens, top_k = tokens.ids.shape
    experts, order = tokens.ids.flatten().sort(stable=True)
    rows = run(GroupedTokens(tokens.hidden.index_select(0, order // top_k), _group_ends(experts, tokens.num_experts), experts))
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    by_choice = rows.index_select(0, place).view(num_tokens, top_k, -1)
    return torch.bmm(tokens.weights.to(rows.dtype).unsqueeze(1), by_choice).squeeze(1)


def _group_ends(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[X] int32: how many of the sorted ``experts`` [N] come before each next expert."""
    return torch.searchsorted(experts, torch.arange(num_experts, device=experts.device), right=True, out_int32=True)

"""Experts as products over rows sorted by expert: `GroupedExperts`, the adapter that sorts for them, `FusedExperts`.

T tokens, D hidden size, k experts a token, N = T * k pairs of token and expert, X experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headrace.kernels.moe import (
    CODED_EXPERTS,
    GATE_PAIRS,
    GROUP_PAIRS,
    GROUPED_LINEAR,
    MANY_CODED_EXPERTS,
    MANY_EXPERTS,
    MOST_CODED_PAIRS_EACH,
    MOST_PAIRS_EACH,
    RUN_EXPERTS,
    SUM_PAIRS,
    is_few,
)
from headrace.kernels.operation import choose_fused
from headrace.layers.build import Build
from headrace.layers.mlp import choose_activation, describe_gate
from headrace.layers.moe.contract import ChosenTokens, GroupedTokens
from headrace.layers.moe.weights import ExpertWeights, StackedLinear
from headrace.layers.quantization.storage import plain_weight
from headrace.layers.spec import MlpSpec


class GroupedExperts:
    """See `Experts`; speaks `GROUPED`. Two grouped products with the activation between them."""

    def __init__(self, weights: ExpertWeights, spec: MlpSpec, build: Build):
        self._gate_up, self._down = weights.gate_up, weights.down
        _, hidden_size, size = weights.down.weight.shape
        self._first = GROUPED_LINEAR.choose(build.query(in_features=hidden_size, out_features=2 * size))
        self._second = GROUPED_LINEAR.choose(build.query(in_features=size, out_features=hidden_size))
        self._activate = choose_activation(spec, build, width=size)

    def run(self, tokens: GroupedTokens) -> torch.Tensor:
        gate_up = _plain(self._gate_up, tokens.hidden.dtype)
        x = self._activate(self._first(tokens.hidden, gate_up, self._gate_up.own_bias, tokens.ends, tokens.experts))
        return self._second(x, _plain(self._down, x.dtype), self._down.own_bias, tokens.ends, tokens.experts)


def _plain(stack: StackedLinear, dtype: torch.dtype) -> torch.Tensor:
    """The matrices [X, O, I]; dequantised for one call where the layer keeps codes."""
    weight = plain_weight(stack)
    return stack.unpack(dtype) if weight is None else weight


class FusedExperts:
    """See `Experts`; speaks `CHOICES`. A few fused kernels while the step is bound by reading the experts' matrices,
    plain or in codes; beyond that, as decided by `is_few`, kernels for many rows where there are any, else grouped
    products of rows sorted by expert. ``kernel``: for codes and any number of tokens, in place of those chosen."""

    def __init__(
        self, weights: ExpertWeights, spec: MlpSpec, build: Build, kernel: Callable[..., Any] | None = None
    ):
        self._gate_up, self._down, self._gate = weights.gate_up, weights.down, describe_gate(spec)
        num_experts, hidden_size, size = weights.down.weight.shape
        query = build.query(width=hidden_size, expert_width=size, num_experts=num_experts)
        self._run, self._group, self._gate_pairs, self._sum = (
            RUN_EXPERTS.choose(query), GROUP_PAIRS.choose(query), GATE_PAIRS.choose(query), SUM_PAIRS.choose(query)
        )
        self._first = GROUPED_LINEAR.choose(build.query(in_features=hidden_size, out_features=2 * size))
        self._second = GROUPED_LINEAR.choose(build.query(in_features=size, out_features=hidden_size))
        self._run_codes = kernel or CODED_EXPERTS.choose(query)
        self._run_many = choose_fused(MANY_EXPERTS, query)
        self._run_many_codes = kernel or choose_fused(MANY_CODED_EXPERTS, query)
        for stack in (self._gate_up, self._down):
            stack.is_storable = not build.moves_experts

    def run(self, tokens: ChosenTokens) -> torch.Tensor:
        """`ChosenTokens` to weighted sums [T, D]."""
        num_tokens, top_k = tokens.ids.shape
        stacks = (self._gate_up, self._down)
        plain = [weight for stack in stacks if (weight := plain_weight(stack)) is not None]
        choices = (tokens.hidden, tokens.ids, tokens.weights)
        coded = [] if plain else [(stack.codes, stack.own_bias) for stack in stacks]
        if not is_few(num_tokens, top_k, tokens.num_experts, MOST_PAIRS_EACH if plain else MOST_CODED_PAIRS_EACH):
            out = None
            if coded and self._run_many_codes:
                out = self._run_many_codes(*choices, *coded, self._gate)
            elif len(plain) == len(stacks) and self._run_many:
                out = self._run_many(*choices, *((stack.weight, stack.own_bias) for stack in stacks), self._gate)
            return self._run_grouped(tokens) if out is None else out
        if coded:
            return self._run_codes(*choices, *coded, self._gate)
        dtype = tokens.hidden.dtype  # a matrix whose codes no kernel takes is plain beside one in codes
        operands = (
            (stack.unpack(dtype) if plain_weight(stack) is None else stack.weight, stack.own_bias) for stack in stacks
        )
        return self._run(*choices, *operands, self._gate)

    def _run_grouped(self, tokens: ChosenTokens) -> torch.Tensor:
        # order [N]: pairs sorted by expert; pair p is token p // k. place [N]: its inverse.
        order, place, ends = self._group(tokens.ids, tokens.num_experts)
        hidden = tokens.hidden.index_select(0, order // tokens.ids.shape[1])
        experts = tokens.ids.flatten().index_select(0, order)
        if tokens.has_padding:  # rows of id -1 come after the last end; the contract wants any number in range
            experts = experts.clamp_(min=0)
        # biases are added by the kernels that follow: a pass over all rows each otherwise
        x = self._first(hidden, _plain(self._gate_up, hidden.dtype), None, ends, experts)
        x = self._gate_pairs(x, self._gate_up.own_bias, experts, self._gate)
        rows = self._second(x, _plain(self._down, x.dtype), None, ends, experts)
        return self._sum(rows, place, tokens.weights, tokens.ids, self._down.own_bias)


def group_choices(tokens: ChosenTokens, run: Callable[[GroupedTokens], torch.Tensor]) -> torch.Tensor:
    """The `Adapter` from `CHOICES` to `GROUPED`: sort the pairs by expert, run, and sum each token's weighted rows.

    Nothing waits for the device. Sums are in the order of choice, so that equal inputs give equal outputs.
    """
    num_tokens, top_k = tokens.ids.shape
    ids = tokens.ids.flatten()
    if tokens.has_padding:  # as expert X, which sorts last and belongs to no group
        ids = torch.where(ids < 0, tokens.num_experts, ids)
    experts, order = ids.sort(stable=True)  # [N]; pair p is token p // k
    ends = _group_ends(experts, tokens.num_experts)
    hidden, in_range = (
        tokens.hidden.index_select(0, order // top_k),
        experts.clamp(max=tokens.num_experts - 1) if tokens.has_padding else experts
    )
    rows = run(GroupedTokens(hidden, ends, in_range))
    if tokens.has_padding:
        rows = rows.masked_fill((experts == tokens.num_experts).unsqueeze(-1), 0)
    # the inverse permutation: where each pair's row is, so that rows return to [T, k] by a gather, without atomics
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    by_choice = rows.index_select(0, place).view(num_tokens, top_k, -1)  # [T, k, D]
    return torch.bmm(tokens.weights.to(rows.dtype).unsqueeze(1), by_choice).squeeze(1)


def _group_ends(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[X] int32: for each expert, one past its last row among the sorted ``experts`` [N]."""
    return torch.searchsorted(experts, torch.arange(num_experts, device=experts.device), right=True, out_int32=True)

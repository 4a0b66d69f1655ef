"""`JoinedExperts`: from choices to weighted sums in a few kernels, while reading the matrices is what takes time; else
as `GroupedExperts`."""

from __future__ import annotations

import torch

from headrace.kernels.moe import GROUP_PAIRS, RUN_EXPERTS, SUM_PAIRS, Gate, is_few
from headrace.layers.build import Build
from headrace.layers.moe.contract import ChosenTokens, GroupedTokens
from headrace.layers.moe.grouped import GroupedExperts
from headrace.layers.moe.weights import ExpertWeights
from headrace.layers.spec import MlpSpec


def describe_gate(spec: MlpSpec) -> Gate:
    """The activation of an expert."""
    clamp = spec.clamp
    return Gate(spec.activation) if clamp is None else Gate("clamped", clamp.limit, clamp.alpha, clamp.up_offset)


class JoinedExperts:
    """See `Experts`; speaks `CHOICES`."""

    def __init__(self, weights: ExpertWeights, spec: MlpSpec, build: Build):
        self._gate_up, self._down, self._gate = weights.gate_up, weights.down, describe_gate(spec)
        num_experts, width, _ = weights.down.weight.shape
        query = build.query(width=width, expert_width=spec.intermediate_size, num_experts=num_experts)
        self._run, self._group, self._sum = (
            RUN_EXPERTS.choose(query), GROUP_PAIRS.choose(query), SUM_PAIRS.choose(query)
        )
        self._grouped = GroupedExperts(weights, spec, build)

    def run(self, tokens: ChosenTokens) -> torch.Tensor:
        """`ChosenTokens` to weighted sums [T, D]."""
        if not is_few(*tokens.ids.shape, tokens.num_experts):
            return self._run_grouped(tokens)
        gate_up, down = self._gate_up, self._down
        return self._run(
            tokens.hidden, tokens.ids, tokens.weights, (gate_up.weight, gate_up.bias), (down.weight, down.bias),
            self._gate
        )

    def _run_grouped(self, tokens: ChosenTokens) -> torch.Tensor:
        order, place, ends = self._group(tokens.ids, tokens.num_experts)
        hidden = tokens.hidden.index_select(0, order // tokens.ids.shape[1])
        experts = tokens.ids.flatten().index_select(0, order)
        if tokens.has_nobody:
            experts = experts.clamp_(min=0)
        rows = self._grouped.run(GroupedTokens(hidden, ends, experts))
        if tokens.has_nobody:
            rows = rows.masked_fill((torch.arange(len(rows), device=rows.device) >= ends[-1]).unsqueeze(-1), 0)
        return self._sum(rows, place, tokens.weights)

"""`MoeMlp`: router, experts and shared MLP. Knows neither how tokens travel nor how experts compute. T tokens, D hidden
size."""

from __future__ import annotations

import torch

from headrace.layers.build import Build
from headrace.layers.mlp import GatedMlp
from headrace.layers.moe.contract import ChosenTokens
from headrace.layers.moe.joined import describe_gate
from headrace.layers.moe.joining import join_experts
from headrace.layers.moe.router import Router
from headrace.layers.moe.weights import ExpertWeights
from headrace.layers.residual import Branch
from headrace.layers.spec import MoeSpec


class MoeMlp(Branch):
    """``x [T, D] -> [T, D]``: the weighted sum of each token's experts, and the shared MLP's output if there is one."""

    def __init__(self, spec: MoeSpec, hidden_size: int, build: Build):
        super().__init__()
        routing = spec.routing
        self.num_experts, self.gate = routing.num_experts, describe_gate(spec.expert)
        self.router = Router(routing, hidden_size, build)
        self.experts = ExpertWeights(routing.num_experts, spec.expert, hidden_size, build)
        self.shared = None if spec.shared is None else GatedMlp(spec.shared, hidden_size, build)
        query = build.query(
            width=hidden_size, expert_width=spec.expert.intermediate_size, num_experts=routing.num_experts,
            top_k=routing.top_k, ranks=1,
        )
        self._run_experts = join_experts(self.experts, spec.expert, build, query)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids, weights = self.router(x)
        out = self._run_experts(ChosenTokens(x, ids, weights, self.num_experts))
        return out if self.shared is None else out.add_(self.shared(x))

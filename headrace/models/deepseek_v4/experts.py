"""`V4Moe`: routed experts plus a shared MLP. Experts are routed by score, or by token id in the first layers.

T tokens, X experts, k experts a token, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from headrace.kernels.moe import HASH_ROUTE
from headrace.layers.build import Build
from headrace.layers.linear import FloatLinear
from headrace.layers.mlp import GatedMlp
from headrace.layers.moe.contract import ChosenTokens
from headrace.layers.moe.layer import Router
from headrace.layers.moe.mxfp4 import Mxfp4ExpertWeights
from headrace.layers.moe.pairing import pair_experts
from headrace.layers.moe.weights import ExpertWeights
from headrace.layers.spec import RoutingSpec
from headrace.models.deepseek_v4.spec import DeepseekV4Spec, V4LayerSpec


class HashRouter(nn.Module):
    """Looks up each token's experts by its id in ``table`` [V, k] int64; their weights still come from scores. Until a
    checkpoint fills the table, consecutive ids have overlapping experts."""

    def __init__(self, spec: RoutingSpec, hidden_size: int, vocab_size: int, build: Build):
        super().__init__()
        self.logits = FloatLinear(build, hidden_size, spec.num_experts)
        chosen = HASH_ROUTE.choose(build.query(num_experts=spec.num_experts, top_k=spec.top_k))
        self._route = partial(chosen, score=spec.score, renormalise=spec.renormalise, scale=spec.scale)
        ids = torch.arange(vocab_size, device=build.device)[:, None] + torch.arange(spec.top_k, device=build.device)
        self.table = nn.Buffer(ids % spec.num_experts, persistent=False)

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._route(self.logits(x), self.table, token_ids)


class V4Moe(nn.Module):
    """``x [T, D] -> [T, D]``."""

    def __init__(self, spec: DeepseekV4Spec, layer: V4LayerSpec, build: Build):
        super().__init__()
        routing, expert = spec.moe.routing, spec.moe.expert
        self.is_hashed, self.num_experts = layer.is_hashed, routing.num_experts
        self.router = (
            HashRouter(routing, spec.hidden_size, spec.vocab_size, build) if layer.is_hashed
            else Router(routing, spec.hidden_size, build)
        )
        weights: type[ExpertWeights | Mxfp4ExpertWeights] = Mxfp4ExpertWeights if spec.keeps_mxfp4 else ExpertWeights
        self.experts = weights(routing.num_experts, expert, spec.hidden_size, build)
        assert spec.moe.shared is not None, "every layer has an MLP that all tokens share"
        self.shared = GatedMlp(spec.moe.shared, spec.hidden_size, build)
        shape = dict(
            width=spec.hidden_size, expert_width=expert.intermediate_size, num_experts=routing.num_experts,
            top_k=routing.top_k, ranks=1,
        )
        self._run_experts = pair_experts(self.experts, expert, build, build.query(**shape, mxfp4=int(spec.keeps_mxfp4)))

    @property
    def is_capturable(self) -> bool:
        """Whether steps with this layer may be recorded in CUDA graphs."""
        return self._run_experts.is_capturable

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        ids, weights = self.router(x, token_ids) if self.is_hashed else self.router(x)  # [T, k] each
        return self._run_experts(ChosenTokens(x, ids, weights, self.num_experts)).add_(self.shared(x))

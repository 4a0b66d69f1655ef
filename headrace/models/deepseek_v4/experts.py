"""`V4Moe`: routed experts plus a shared MLP. Experts are routed by score, or by token id in the first layers.

T tokens, X experts, k experts a token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from headrace.base.errors import ConfigError
from headrace.kernels.coded_linear.device_codes import Fp8Rows
from headrace.kernels.moe import HASH_ROUTE
from headrace.layers.beside import Beside
from headrace.layers.build import Build
from headrace.layers.linear import FloatLinear
from headrace.layers.mlp import GatedMlp
from headrace.layers.moe.layer import Router
from headrace.layers.moe.mxfp4 import Mxfp4ExpertWeights
from headrace.layers.moe.routed import RoutedExperts
from headrace.layers.moe.weights import ExpertWeights
from headrace.layers.quantization.storage import count_elements
from headrace.layers.spec import RoutingSpec
from headrace.models.deepseek_v4.spec import DeepseekV4Spec, V4LayerSpec
from headrace.parallel.share import Share

LEAST_BESIDE = 64
"""Tokens from which the shared MLP is computed beside the router: 64 streams take 31.0 ms a step in place of 31.3, but
one takes 5.01 in place of 4.80, as launches in a row begin before those in front have ended (H200, 35 layers)."""


class HashRouter(nn.Module):
    """Looks up each token's experts by its id in ``table`` [V, k] int64; their weights still come from scores. Until a
    checkpoint fills the table, consecutive ids have overlapping experts."""

    def __init__(self, spec: RoutingSpec, hidden_size: int, vocab_size: int, build: Build):
        super().__init__()
        self.logits = FloatLinear(build, hidden_size, spec.num_experts)
        chosen = HASH_ROUTE.choose(build.query(num_experts=spec.num_experts, top_k=spec.top_k))
        self._route = partial(chosen, score=spec.score, renormalise=spec.renormalise, scale=spec.scale)
        # made on the CPU: on the meta device, where parameters are counted, `arange` imports torch's compiler
        ids = torch.arange(vocab_size)[:, None] + torch.arange(spec.top_k)
        self.table = nn.Buffer((ids % spec.num_experts).to(build.device), persistent=False)
        self._num_experts = spec.num_experts

    @property
    def has_sound_table(self) -> bool:
        """Whether the table names experts alone, and none twice for a token: kernels read weights at any number, and
        compute an expert once for each of its tokens. Waits for the device."""
        numbers = self.table.sort(dim=1).values
        is_expert = (numbers[:, 0] >= 0) & (numbers[:, -1] < self._num_experts)
        return bool((is_expert & (numbers.diff(dim=1) > 0).all(dim=1)).all())

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._route(self.logits(x), self.table, token_ids)


class V4Moe(nn.Module):
    """``x [T, D]`` to [T, D] of the experts and of the shared MLP, still to be added up, and that over ``group``, the
    ranks if there are several; ``rows`` may be x in FP8, as the shared MLP takes it. Ranks divide experts, or each
    of them, and the shared MLP as those of `headrace.layers.moe.layer.MoeMlp`."""

    def __init__(self, spec: DeepseekV4Spec, layer: V4LayerSpec, build: Build):
        super().__init__()
        routing, expert, ranks = spec.moe.routing, spec.moe.expert, build.experts
        self.is_hashed, self.num_experts = layer.is_hashed, routing.num_experts
        self.group = None if build.tensor.is_single else build.tensor
        self.router = (
            HashRouter(routing, spec.hidden_size, spec.vocab_size, build) if layer.is_hashed
            else Router(routing, spec.hidden_size, build)
        )
        experts, size = Share.whole(routing.num_experts), Share.whole(expert.intermediate_size)
        if not ranks.is_single:
            experts = ranks.share(experts.size)
        elif not spec.keeps_mxfp4:
            size = build.tensor.share(size.size, "intermediate dims of experts")
        elif self.group is not None:
            raise ConfigError(
                "experts in MXFP4 are divided among ranks as whole ones: set enable_expert_parallel",
                param="enable_expert_parallel",
            )
        self.experts: ExpertWeights | Mxfp4ExpertWeights = (
            Mxfp4ExpertWeights(experts, expert, spec.hidden_size, build) if spec.keeps_mxfp4
            else ExpertWeights(experts, expert, spec.hidden_size, build, size=size)
        )
        assert spec.moe.shared is not None, "every layer has an MLP that all tokens share"
        self.shared = GatedMlp(spec.moe.shared, spec.hidden_size, build)
        self._beside = Beside(build.device)
        self.routed = RoutedExperts(self.experts, spec.moe, spec.hidden_size, build, width=size.length)
        own = 3 * spec.hidden_size * size.length * experts.length  # weights of this rank's experts: gate, up and down
        self._num_needed = own * routing.top_k // routing.num_experts

    def count_idle(self) -> int:
        """See `headrace.layers.moe.contract.Mixture`."""
        return count_elements(self.experts) - self._num_needed

    @property
    def is_capturable(self) -> bool:
        """Whether steps with this layer may be recorded in CUDA graphs."""
        return self.routed.is_capturable

    def forward(
        self, x: torch.Tensor, token_ids: torch.Tensor, rows: Fp8Rows | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shared: Callable[[], torch.Tensor] = partial(self.shared.compute_share, x, rows)
        if len(x) >= LEAST_BESIDE:
            shared = self._beside.begin(shared)
        choices = self.router(x, token_ids) if self.is_hashed else self.router(x)
        return self.routed(x, choices), shared()

    def take_part(self) -> None:
        """Compute other replicas' tokens in a step in which this one has none. Does nothing where none come here."""
        self.routed.take_part()

"""`MoeMlp`: router, experts and shared MLP.

T tokens, D hidden size, X experts, k experts a token.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from headrace.kernels.moe import LINEAR_ROUTE, NORM_ROUTE, ROUTE, RouteShape
from headrace.kernels.operation import choose_fused
from headrace.layers.build import Build
from headrace.layers.linear import FloatLinear, Linear
from headrace.layers.mlp import GatedMlp, describe_gate
from headrace.layers.moe.adapted import adapt_experts
from headrace.layers.moe.routed import Choices, RoutedExperts
from headrace.layers.moe.weights import ExpertWeights
from headrace.layers.norm import RmsNorm
from headrace.layers.quantization.storage import count_elements, plain_weight
from headrace.layers.residual import Branch, Norm, Residual, join_rows
from headrace.layers.spec import MoeSpec, RoutingSpec
from headrace.parallel.share import Share


class Router(nn.Module):
    """``x [T, D] -> (ids [T, k] int64, weights [T, k] float32)``; see `RoutingSpec`."""

    def __init__(self, spec: RoutingSpec, hidden_size: int, build: Build):
        super().__init__()
        self.logits = (
            FloatLinear(build, hidden_size, spec.num_experts, bias=spec.bias) if spec.in_float32  # as the reference
            else Linear(build, hidden_size, spec.num_experts, bias=spec.bias, is_storable=False)
        )
        build = build.in_float32() if spec.in_float32 else build
        self.choice_bias = build.in_float32().parameter(spec.num_experts) if spec.choice_bias else None
        self.shape: RouteShape = {
            "top_k": spec.top_k, "score": spec.score, "renormalise": spec.renormalise, "scale": spec.scale,
            "num_groups": spec.num_groups, "top_groups": spec.top_groups, "group_best": spec.group_best,
        }
        query = build.query(num_experts=spec.num_experts, top_k=spec.top_k, num_groups=spec.num_groups)
        self._route = partial(ROUTE.choose(query), **self.shape)
        self._norm_route, self._linear_route = (
            None if spec.in_float32 else choose_fused(operation, query) for operation in (NORM_ROUTE, LINEAR_ROUTE)
        )

    def forward(self, x: torch.Tensor) -> Choices:
        weight = plain_weight(self.logits)
        if self._linear_route is not None and weight is not None and self.logits.lora is None:
            fused: Choices | None = self._linear_route(x, weight, self.logits.bias, self.choice_bias, **self.shape)
            if fused is not None:
                return fused
        return self._route(self.logits(x), self.choice_bias)

    def add(self, norm: Norm, residual: Residual) -> tuple[torch.Tensor, Choices]:
        """As `Norm.add`, and what the router chooses for that; both in one kernel where there is one for it, which does
        not add up what ranks have."""
        pending, weight = residual.pending, plain_weight(self.logits)
        if (
            self._norm_route is not None and isinstance(norm, RmsNorm) and pending is not None and weight is not None
            and residual.group is None and residual.addition is None and self.logits.lora is None
        ):
            fused = self._norm_route(
                pending, residual.stream, norm.weights, weight, self.logits.bias, self.choice_bias, **self.shape
            )
            if fused is not None:
                residual.pending = None
                x, residual.stream, ids, weights = fused
                return x, (ids, weights)
        x = norm.add(residual)
        return x, self(x)


class MoeMlp(Branch):
    """``x [T, D] -> [T, D]``: the weighted sum of each token's experts, plus the shared MLP's output if it has one.

    The ranks of ``build.tensor`` have a part of each expert and of the shared MLP. With several ranks in
    ``build.experts`` each of those has some experts whole. What a rank computes is a partial sum over ``build.tensor``.
    """

    takes_slices = True

    def __init__(self, spec: MoeSpec, hidden_size: int, build: Build):
        super().__init__()
        routing = spec.routing
        self.num_experts, self.gate, self.dtype = routing.num_experts, describe_gate(spec.expert), build.dtype
        self.router = Router(routing, hidden_size, build)
        group = build.tensor
        self.group = None if group.is_single else group
        experts, size = Share.whole(routing.num_experts), Share.whole(spec.expert.intermediate_size)
        if build.experts.is_single:
            size = group.share(size.size, "intermediate dims of experts")
        else:
            experts = build.experts.share(experts.size)
        self.is_divided = self.group is not None or not build.experts.is_single
        self.experts = ExpertWeights(experts, spec.expert, hidden_size, build, size=size)
        self.shared = None if spec.shared is None else GatedMlp(spec.shared, hidden_size, build)
        self.shared_gate = Linear(build, hidden_size, 1, is_storable=False) if spec.shared_gate else None
        self.routed = RoutedExperts(self.experts, spec, hidden_size, build, width=size.length)
        self._step, self._has_banks = build.step, build.adapters is not None

    @property
    def is_capturable(self) -> bool:
        """Whether steps with this layer may be recorded in CUDA graphs."""
        return self.routed.is_capturable

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.compute_share(x)
        return out if self.group is None else self.group.all_reduce(out)

    def add(self, norm: Norm, residual: Residual) -> None:
        slices = residual.slices
        xs, choices = zip(*(self.router.add(norm, rows) for rows in slices), strict=True)
        ids, weights = (join_rows(parts) for parts in zip(*choices, strict=True))
        # all rows at once: an expert's matrices are read once, and its rows fill tiles better
        out = self._run(join_rows(xs), (ids, weights))
        for rows, part in zip(slices, residual.rows_of(out), strict=True):
            rows.pending = part
            rows.group = None if self.group is None else self.group.begin_sum(part)

    def count_idle(self) -> int:
        """Parameters of this rank's experts that a token does not choose, on average."""
        size, top_k = count_elements(self.experts), self.router.shape["top_k"]
        return size - size * top_k // self.num_experts

    def take_part(self) -> None:
        """Compute other replicas' tokens in a step in which this one has none. Does nothing where none come here."""
        self.routed.take_part()

    def compute_share(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank adds to the output."""
        return self._run(x, self.router(x))

    def _run(self, x: torch.Tensor, choices: Choices) -> torch.Tensor:
        out = self.routed(x, choices)
        if self._has_banks and (rows := self._step.batch.adapters) is not None:
            adapt_experts(self.experts, self.gate, x, choices, out, rows)
        if self.shared is None:
            return out
        shared = self.shared.compute_share(x)
        if self.shared_gate is not None:
            shared = shared * torch.sigmoid(self.shared_gate(x))
        return out.add_(shared)  # experts return memory of their own

"""`Router`: each token's experts and their weights. T tokens, X experts, k experts a token."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from headrace.kernels.moe import ROUTE, RouteShape
from headrace.layers.build import Build
from headrace.layers.linear import Linear
from headrace.layers.spec import RoutingSpec


class Router(nn.Module):
    """``x [T, D] -> (ids [T, k] int64, weights [T, k] float32)``; see `RoutingSpec`."""

    def __init__(self, spec: RoutingSpec, width: int, build: Build):
        super().__init__()
        build = build.in_float32() if spec.in_float32 else build
        self.logits = Linear(build, width, spec.num_experts, bias=spec.bias, is_storable=False)
        self.choice_bias = build.in_float32().parameter(spec.num_experts) if spec.choice_bias else None
        self.shape: RouteShape = {
            "top_k": spec.top_k, "score": spec.score, "renormalise": spec.renormalise, "scale": spec.scale,
            "num_groups": spec.num_groups, "top_groups": spec.top_groups, "group_best": spec.group_best,
        }
        query = build.query(num_experts=spec.num_experts, top_k=spec.top_k, num_groups=spec.num_groups)
        self._route = partial(ROUTE.choose(query), **self.shape)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._route(self.logits(x.to(self.logits.weight.dtype)), self.choice_bias)

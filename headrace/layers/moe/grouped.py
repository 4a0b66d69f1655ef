"""`GroupedExperts`: two grouped products with the activation between them."""

from __future__ import annotations

import torch

from headrace.kernels.moe import GROUPED_LINEAR
from headrace.layers.build import Build
from headrace.layers.mlp import choose_activation
from headrace.layers.moe.contract import GroupedTokens
from headrace.layers.moe.weights import ExpertWeights
from headrace.layers.spec import MlpSpec


class GroupedExperts:
    """See `Experts`; speaks `GROUPED`."""

    def __init__(self, weights: ExpertWeights, spec: MlpSpec, build: Build):
        self._gate_up, self._down = weights.gate_up, weights.down
        width = weights.down.weight.shape[1]
        self._first = GROUPED_LINEAR.choose(build.query(in_features=width, out_features=2 * spec.intermediate_size))
        self._second = GROUPED_LINEAR.choose(build.query(in_features=spec.intermediate_size, out_features=width))
        self._activate = choose_activation(spec, build)

    def run(self, tokens: GroupedTokens) -> torch.Tensor:
        x = self._first(tokens.hidden, self._gate_up.weight, self._gate_up.bias, tokens.ends, tokens.experts)
        return self._second(self._activate(x), self._down.weight, self._down.bias, tokens.ends, tokens.experts)

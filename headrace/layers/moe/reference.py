"""`ReferenceExperts`: one expert at a time, only those that were chosen. The oracle of all other experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.layers.build import Build
from headrace.layers.decoder.spec import MlpSpec
from headrace.layers.mlp import choose_activation
from headrace.layers.moe.contract import ChosenTokens
from headrace.layers.moe.weights import ExpertWeights, StackedLinear


class ReferenceExperts:
    """See `Experts`; speaks `CHOICES`. Sums in float32. On a GPU it waits for the choices."""

    def __init__(self, weights: ExpertWeights, spec: MlpSpec, build: Build):
        self._weights = weights
        self._activate = choose_activation(spec, build)

    def run(self, tokens: ChosenTokens) -> torch.Tensor:
        out = torch.zeros(tokens.hidden.shape, dtype=torch.float32, device=tokens.hidden.device)
        for expert in tokens.ids[tokens.ids >= 0].unique() if tokens.has_nobody else tokens.ids.unique():
            rows, choice = torch.where(tokens.ids == expert)
            x = _apply(self._weights.gate_up, expert, tokens.hidden[rows])
            x = _apply(self._weights.down, expert, self._activate(x))
            out.index_add_(0, rows, x.float() * tokens.weights[rows, choice, None])
        return out.to(tokens.hidden.dtype)


def _apply(linear: StackedLinear, expert: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, linear.weight[expert], None if linear.bias is None else linear.bias[expert])

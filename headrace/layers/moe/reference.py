"""`LocalDispatcher` and `ReferenceExperts`: one device, plain torch; tests compare other implementations to these."""

from __future__ import annotations

import torch

from headrace.kernels.moe import OWN_EXPERTS, RUN_EXPERTS
from headrace.layers.build import Build
from headrace.layers.mlp import describe_gate
from headrace.layers.moe.contract import ChosenTokens
from headrace.layers.moe.weights import ExpertWeights
from headrace.layers.spec import MlpSpec


class LocalDispatcher:
    """See `Dispatcher`; speaks `CHOICES`. All experts are on this device, so no token moves."""

    is_capturable = True

    def __init__(self, build: Build):
        pass

    def dispatch(self, tokens: ChosenTokens) -> ChosenTokens:
        return tokens

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        return results


class ReplicatedDispatcher:
    """See `Dispatcher`; speaks `CHOICES`. Each rank has all tokens and computes those choices that are its own experts;
    the layer adds the ranks' results up."""

    is_capturable = True

    def __init__(self, build: Build):
        self._ranks, self._number = build.experts, OWN_EXPERTS.choose(build.query())

    def dispatch(self, tokens: ChosenTokens) -> ChosenTokens:
        own = self._ranks.share(tokens.num_experts)
        ids = self._number(tokens.ids, own.start, own.length)
        return ChosenTokens(tokens.hidden, ids, tokens.weights, own.length, has_padding=True)

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        return results


class ReferenceExperts:
    """See `Experts`; speaks `CHOICES`. One expert at a time, only those that were chosen; sums in float32. On a GPU it
    waits for the choices."""

    def __init__(self, weights: ExpertWeights, spec: MlpSpec, build: Build):
        self._gate_up, self._down, self._gate = weights.gate_up, weights.down, describe_gate(spec)
        self._run = RUN_EXPERTS.load("reference")

    def run(self, tokens: ChosenTokens) -> torch.Tensor:
        gate_up, down = self._gate_up, self._down
        return self._run(
            tokens.hidden, tokens.ids, tokens.weights, (gate_up.weight, gate_up.own_bias), (down.weight, down.own_bias),
            self._gate
        )

"""`RoundedExperts`: experts in MXFP4 whose products take activations in FP8, as is asked for by name."""

from __future__ import annotations

import torch

from headrace.base.errors import ConfigError
from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.forms import CodedWeight
from headrace.kernels.moe import ROUNDED_EXPERTS
from headrace.layers.build import Build
from headrace.layers.moe.contract import ChosenTokens
from headrace.layers.moe.grouped import FusedExperts
from headrace.layers.moe.mxfp4 import FusedMxfp4Experts, Mxfp4ExpertWeights
from headrace.layers.moe.weights import ExpertWeights, StackedLinear
from headrace.layers.spec import MlpSpec


class RoundedExperts:
    """See `Experts`; speaks `CHOICES`. Weights that are not kept in MXFP4 from the start must be so when they are
    loaded: see `check_rounded`."""

    def __init__(self, weights: ExpertWeights | Mxfp4ExpertWeights, spec: MlpSpec, build: Build):
        kernel = ROUNDED_EXPERTS.choose(build.query())
        self._experts: FusedExperts | FusedMxfp4Experts
        if isinstance(weights, Mxfp4ExpertWeights):
            self._experts = FusedMxfp4Experts(weights, spec, build, kernel)
        else:
            self._experts = FusedExperts(weights, spec, build, kernel)
            weights.gate_up.is_rounded = weights.down.is_rounded = True

    def run(self, tokens: ChosenTokens) -> torch.Tensor:
        """`ChosenTokens` to weighted sums [T, D]."""
        return self._experts.run(tokens)


def check_rounded(stacks: tuple[StackedLinear, StackedLinear]) -> None:
    """Raise `ConfigError` for loaded weights that kernels do not multiply with rounded activations."""
    for stack in stacks:
        codes = stack.codes if isinstance(stack.stored, CodedWeight) else None
        if codes is None or codes.code is not Code.E2M1 or not codes.has_powers or codes.rows != 1:
            kept = "plain" if codes is None else f"in {codes.code.value}"
        elif codes.in_features % 16:
            kept = f"in rows of {codes.in_features} inputs, no multiple of 16"
        else:
            continue
        raise ConfigError(
            f"moe_experts rounded takes experts in MXFP4, and those of this model are kept {kept}: leave it at auto",
            param="moe_experts"
        )

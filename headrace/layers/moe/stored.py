"""`StoredExperts`: on a CPU, all experts in one native call once their matrices are stored; until then in plain
torch."""

from __future__ import annotations

import torch

from headrace.kernels.moe import PACKED_EXPERTS, RUN_EXPERTS
from headrace.layers.build import Build
from headrace.layers.moe.contract import ChosenTokens
from headrace.layers.moe.joined import describe_gate
from headrace.layers.moe.weights import ExpertWeights
from headrace.layers.quantization.storage import plain_weight
from headrace.layers.spec import MlpSpec


class StoredExperts:
    """See `Experts`; speaks `CHOICES`."""

    def __init__(self, weights: ExpertWeights, spec: MlpSpec, build: Build):
        self._gate_up, self._down, self._gate = weights.gate_up, weights.down, describe_gate(spec)
        for stack in (self._gate_up, self._down):
            stack.is_storable = True
        self._run_packed, self._run_plain = PACKED_EXPERTS.choose(build.query()), RUN_EXPERTS.load("reference")

    def run(self, tokens: ChosenTokens) -> torch.Tensor:
        """`ChosenTokens` to weighted sums [T, D]."""
        stacks = (self._gate_up, self._down)
        # asked for first: they may be stored meanwhile, one before the other
        plain = [plain_weight(stack) for stack in stacks]
        choices = (tokens.hidden, tokens.ids, tokens.weights)
        if not any(weight is not None for weight in plain):
            return self._run_packed(*choices, *((stack.stored.matrix, stack.bias) for stack in stacks), self._gate)
        dtype = tokens.hidden.dtype
        return self._run_plain(
            *choices,
            *(
                (stack.unpack(dtype) if weight is None else weight, stack.bias) for stack,
                weight in zip(stacks, plain, strict=True)
            ),
            self._gate
        )

"""`GatedMlp`: gate and up as one matrix product, activation, down."""

from __future__ import annotations

import torch
from torch import nn

from headrace.kernels.activation import GELU_TANH_MUL, SILU_MUL
from headrace.layers.build import Build
from headrace.layers.decoder.spec import MlpSpec
from headrace.layers.linear import Linear

GATED_ACTIVATIONS = {"silu": SILU_MUL, "gelu_tanh": GELU_TANH_MUL}


class GatedMlp(nn.Module):
    """``x [T, D] -> [T, D]`` through ``spec.width`` hidden units."""

    def __init__(self, spec: MlpSpec, width: int, build: Build):
        super().__init__()
        self.gate_up = Linear(build, width, {"gate": spec.width, "up": spec.width}, bias=spec.bias)
        self.down = Linear(build, spec.width, width, bias=spec.bias)
        self._activate = GATED_ACTIVATIONS[spec.activation].choose(build.query(width=spec.width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._activate(self.gate_up(x)))

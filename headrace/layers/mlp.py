"""`GatedMlp`: gate and up as one matrix product, activation, down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
from torch import nn

from headrace.kernels.activation import CLAMPED_SWIGLU, GELU_TANH_MUL, SILU_MUL
from headrace.layers.build import Build
from headrace.layers.decoder.spec import MlpSpec
from headrace.layers.linear import Linear

GATED_ACTIVATIONS = {"silu": SILU_MUL, "gelu_tanh": GELU_TANH_MUL}


def choose_activation(spec: MlpSpec, build: Build) -> Callable[[torch.Tensor], torch.Tensor]:
    """The gated activation ``[T, 2 * width] -> [T, width]``, gate first."""
    query = build.query(width=spec.width)
    if spec.clamp is not None:
        return partial(CLAMPED_SWIGLU.choose(query), **asdict(spec.clamp))
    return GATED_ACTIVATIONS[spec.activation].choose(query)


class GatedMlp(nn.Module):
    """``x [T, D] -> [T, D]`` through ``spec.width`` hidden units."""

    def __init__(self, spec: MlpSpec, width: int, build: Build):
        super().__init__()
        self.gate_up = Linear(build, width, {"gate": spec.width, "up": spec.width}, bias=spec.bias)
        self.down = Linear(build, spec.width, width, bias=spec.bias)
        self._activate = choose_activation(spec, build)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._activate(self.gate_up(x)))

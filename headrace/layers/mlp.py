"""`GatedMlp`: gate and up as one matrix product, activation, down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
from torch import nn

from headrace.kernels.activation import CLAMPED_SWIGLU, GELU_TANH_MUL, SILU_MUL
from headrace.layers.branch import Branch
from headrace.layers.build import Build
from headrace.layers.linear import Linear
from headrace.layers.spec import MlpSpec

GATED_ACTIVATIONS = {"silu": SILU_MUL, "gelu_tanh": GELU_TANH_MUL}


def choose_activation(spec: MlpSpec, build: Build) -> Callable[[torch.Tensor], torch.Tensor]:
    """The gated activation ``[T, 2 * width] -> [T, width]``, gate first."""
    query = build.query(width=spec.intermediate_size)
    if spec.clamp is not None:
        return partial(CLAMPED_SWIGLU.choose(query), **asdict(spec.clamp))
    return GATED_ACTIVATIONS[spec.activation].choose(query)


class GatedMlp(Branch):
    """``x [T, D] -> [T, D]`` through ``spec.intermediate_size`` hidden units. ``activation`` names a plain one, else it is
    empty."""

    def __init__(self, spec: MlpSpec, width: int, build: Build):
        super().__init__()
        self.gate_up = Linear(build, width, {"gate": spec.intermediate_size, "up": spec.intermediate_size}, bias=spec.bias)
        self.down = Linear(build, spec.intermediate_size, width, bias=spec.bias)
        self._activate = choose_activation(spec, build)
        self.activation = "" if spec.clamp is not None else spec.activation

    def leave_sums(self) -> None:
        self.down.leave_sums()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.onto(None, x)

    def onto(self, residual: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
        gated = self.gate_up.gate(x, self.activation) if self.activation else None
        return self.down(self._activate(self.gate_up(x)) if gated is None else gated, residual)

    def after_norm(
        self, norm: nn.Module, x: torch.Tensor | None, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        if not self.activation or not self.gate_up.can_join(norm, x, residual):
            return super().after_norm(norm, x, residual)
        x, residual = self.gate_up.join(norm, x, residual, self.activation)
        return self.down(x), residual

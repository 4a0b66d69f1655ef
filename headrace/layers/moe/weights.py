"""`ExpertWeights`: the stacked matrices of all experts of a layer.

X experts, F expert intermediate size, D hidden size, O outputs, I inputs.
"""

from __future__ import annotations

import torch
from torch import nn

from headrace.kernels.moe import Gate
from headrace.kernels.packed_linear.forms import PanelWeight
from headrace.layers.build import Build
from headrace.layers.linear import stack_rows
from headrace.layers.quantization.storage import StorableLayer
from headrace.layers.spec import MlpSpec


def describe_gate(spec: MlpSpec) -> Gate:
    """The activation of an expert, as kernels take it."""
    clamp = spec.clamp
    return Gate(spec.activation) if clamp is None else Gate("clamped", clamp.limit, clamp.alpha, clamp.up_offset)


class StackedLinear(StorableLayer):
    """``weight`` [X, O, I] and, if wanted, ``bias`` [X, O]; kernels multiply with it. ``parts`` names the stacked
    outputs and their sizes in order. The weight may be ``stored`` as one matrix [X * O, I] if its experts allow."""

    is_storable = False  # set by the experts that have kernels for packed stacks, see `moe.stored`
    stored: PanelWeight | None

    def __init__(self, build: Build, num_stacked: int, in_features: int, parts: dict[str, int], *, bias: bool):
        super().__init__()
        self.num_stacked, self.rows, out_features = num_stacked, stack_rows(parts), sum(parts.values())
        self.weight = build.parameter(num_stacked, out_features, in_features)
        self.bias = build.parameter(num_stacked, out_features) if bias else None

    def part(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """The view of ``weight`` or ``bias`` called ``name``: ``"3/gate"`` is expert 3's gate."""
        expert, _, rows = name.partition("/")
        # a view [rows, I] of one expert's matrix; its storage is the whole stack's
        return parameter[int(expert), self.rows[rows]]

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        """The stored weight as a new plain tensor, [X, O, I]."""
        assert self.stored is not None
        return self.stored.unpack(dtype).unflatten(0, (self.num_stacked, -1))


class ExpertWeights(nn.Module):
    """``gate_up`` [X, 2F, D], the gate's rows first, and ``down`` [X, D, F]."""

    def __init__(self, num_experts: int, spec: MlpSpec, hidden_size: int, build: Build):
        super().__init__()
        size = spec.intermediate_size
        self.gate_up = StackedLinear(build, num_experts, hidden_size, {"gate": size, "up": size}, bias=spec.bias)
        self.down = StackedLinear(build, num_experts, size, {"down": hidden_size}, bias=spec.bias)

"""`ExpertWeights`: the matrices of all experts of a layer, stacked. X experts, F expert width, D model width."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import nn

from headrace.kernels.packed_linear.forms import PanelWeight
from headrace.layers.build import Build
from headrace.layers.quantization.storage import StorableLayer
from headrace.layers.spec import MlpSpec


class StackedLinear(StorableLayer):
    """``weight`` [X, O, I] and, if wanted, ``bias`` [X, O]; only storage, kernels do the rest. ``parts`` names the
    stacked outputs and their widths in order. The weight may be ``stored``, as one matrix [X * O, I], where the experts
    that read it say so."""

    is_storable = False
    stored: PanelWeight | None

    def __init__(self, build: Build, num_stacked: int, in_features: int, parts: dict[str, int], *, bias: bool):
        super().__init__()
        ends = list(accumulate(parts.values()))
        self.num_stacked = num_stacked
        self.rows = {name: slice(end - width, end) for (name, width), end in zip(parts.items(), ends, strict=True)}
        self.weight = build.parameter(num_stacked, ends[-1], in_features)
        self.bias = build.parameter(num_stacked, ends[-1]) if bias else None

    def part(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """The view of ``weight`` or ``bias`` that ``name`` says: ``"3/gate"`` for expert 3's gate."""
        expert, _, rows = name.partition("/")
        return parameter[int(expert), self.rows[rows]]

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        """The stored weight as a plain tensor of its own, [X, O, I]."""
        return self.stored.unpack(dtype).unflatten(0, (self.num_stacked, -1))


class ExpertWeights(nn.Module):
    """``gate_up`` [X, 2F, D], the gate's rows first, and ``down`` [X, D, F]."""

    def __init__(self, num_experts: int, spec: MlpSpec, width: int, build: Build):
        super().__init__()
        size = spec.intermediate_size
        self.gate_up = StackedLinear(build, num_experts, width, {"gate": size, "up": size}, bias=spec.bias)
        self.down = StackedLinear(build, num_experts, size, {"down": width}, bias=spec.bias)

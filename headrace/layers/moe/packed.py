"""Experts kept in MXFP4: a quarter of the memory; matrices are dequantised when they are used, one expert at a time.

X experts, O outputs, I inputs, F expert width, D model width.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import nn

from headrace.base.errors import ConfigError
from headrace.kernels.mxfp4 import BLOCK, DEQUANTISE_MXFP4
from headrace.layers.build import Build
from headrace.layers.decoder.spec import MlpSpec
from headrace.layers.mlp import choose_activation
from headrace.layers.moe.contract import ChosenTokens


class PackedLinear(nn.Module):
    """``codes`` [X, O, I / 2] and ``scales`` [X, O, I / 32], uint8; zero until a checkpoint fills them. ``parts`` names the
    stacked outputs and their widths in order."""

    def __init__(self, build: Build, num_stacked: int, in_width: int, parts: dict[str, int]):
        super().__init__()
        if in_width % BLOCK:
            raise ConfigError(f"experts {in_width} wide cannot be kept in MXFP4, which takes multiples of {BLOCK}", param="moe_experts")
        ends = list(accumulate(parts.values()))
        self.num_stacked = num_stacked
        self.rows = {name: slice(end - width, end) for (name, width), end in zip(parts.items(), ends, strict=True)}
        self.codes, self.scales = (
            nn.Buffer(torch.zeros(num_stacked, ends[-1], width, dtype=torch.uint8, device=build.device), persistent=False)
            for width in (in_width // 2, in_width // BLOCK)
        )
        self._dequantise = DEQUANTISE_MXFP4.choose(build.query(in_width=in_width, out_width=ends[-1]))

    def multiply(self, expert: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``x`` [n, I] through one expert's matrix: [n, O]."""
        return F.linear(x, self._dequantise(self.codes[expert], self.scales[expert], x.dtype))


class PackedExpertWeights(nn.Module):
    """``gate_up`` with the gate's rows first, and ``down``; as `ExpertWeights`, without biases."""

    def __init__(self, num_experts: int, spec: MlpSpec, width: int, build: Build):
        super().__init__()
        self.num_experts = num_experts
        self.gate_up = PackedLinear(build, num_experts, width, {"gate": spec.width, "up": spec.width})
        self.down = PackedLinear(build, num_experts, spec.width, {"down": width})

    def stored(self, prefix: str, matrices: dict[str, str]) -> dict[str, torch.Tensor]:
        """Checkpoint names of codes and scales to the places that they fill. ``matrices`` has the checkpoint's names of
        ``gate``, ``up`` and ``down``; experts are numbered after ``prefix``."""
        places = {}
        for linear in (self.gate_up, self.down):
            for part, rows in linear.rows.items():
                for x in range(self.num_experts):
                    name = f"{prefix}.{x}.{matrices[part]}"
                    places |= {f"{name}.weight": linear.codes[x, rows], f"{name}.scale": linear.scales[x, rows]}
        return places


class PackedExperts:
    """See `Experts`; speaks `CHOICES`. Sums in float32. On a GPU it waits for the choices."""

    def __init__(self, weights: PackedExpertWeights, spec: MlpSpec, build: Build):
        self._weights = weights
        self._activate = choose_activation(spec, build)

    def run(self, tokens: ChosenTokens) -> torch.Tensor:
        out = torch.zeros(tokens.hidden.shape, dtype=torch.float32, device=tokens.hidden.device)
        for expert in tokens.ids.unique():
            rows, choice = torch.where(tokens.ids == expert)
            x = self._weights.down.multiply(expert, self._activate(self._weights.gate_up.multiply(expert, tokens.hidden[rows])))
            out.index_add_(0, rows, x.float() * tokens.weights[rows, choice, None])
        return out.to(tokens.hidden.dtype)

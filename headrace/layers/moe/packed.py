"""Experts kept in MXFP4: a quarter of the memory; matrices are dequantised when they are used, a few at a time.

X experts, O outputs, I inputs, F expert width, D model width, N pairs of token and expert.
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch
from torch import nn

from headrace.base.errors import ConfigError
from headrace.kernels.block_scaled import DEQUANTISE_MXFP4, MXFP4_BLOCK
from headrace.layers.build import Build
from headrace.layers.mlp import choose_activation
from headrace.layers.moe.contract import GroupedTokens
from headrace.layers.quantization.storage import EncodedWeight
from headrace.layers.spec import MlpSpec

CHUNK_ELEMENTS = 2**28
"""Of dequantised weights that are held at a time."""

FEW_PAIRS = 64
"""Up to here each pair gets a copy of its expert's matrix: hardly two have the same, and nobody need know who chose
whom."""

CODE_RMS = 2.926
"""Of the 16 values of a code, all equally likely."""


class PackedLinear(EncodedWeight):
    """``codes`` [X, O, I / 2] and ``scales`` [X, O, I / 32], uint8; zero until a checkpoint fills them. ``parts`` names
    the stacked outputs and their widths in order."""

    def __init__(self, build: Build, num_stacked: int, in_features: int, parts: dict[str, int]):
        super().__init__()
        if in_features % MXFP4_BLOCK:
            raise ConfigError(
                f"experts {in_features} wide cannot be kept in MXFP4, which takes multiples of {MXFP4_BLOCK}",
                param="moe_experts"
            )
        ends = list(accumulate(parts.values()))
        self.num_stacked = num_stacked
        self.rows = {name: slice(end - width, end) for (name, width), end in zip(parts.items(), ends, strict=True)}
        self.codes, self.scales = (
            nn.Buffer(
                torch.zeros(num_stacked, ends[-1], width, dtype=torch.uint8, device=build.device), persistent=False
            )
            for width in (in_features // 2, in_features // MXFP4_BLOCK)
        )
        self._dequantise = DEQUANTISE_MXFP4.choose(build.query(in_features=in_features, out_features=ends[-1]))

    @property
    def num_at_once(self) -> int:
        """How many matrices may be dequantised at a time."""
        return max(1, CHUNK_ELEMENTS // (2 * self.codes[0].numel()))

    def randomise(self, std: float, generator: torch.Generator) -> None:
        """See `EncodedWeight`."""
        self.codes.view(torch.int64).random_(-(2**63), None, generator=generator)
        self.scales.fill_(127 + round(math.log2(std / CODE_RMS)))

    def matrices(self, experts: torch.Tensor | slice, dtype: torch.dtype) -> torch.Tensor:
        """Those of some experts, by index or a range: [n, O, I]."""
        return self._dequantise(self.codes[experts], self.scales[experts], dtype)


class PackedExpertWeights(nn.Module):
    """``gate_up`` with the gate's rows first, and ``down``; as `ExpertWeights`, without biases."""

    def __init__(self, num_experts: int, spec: MlpSpec, width: int, build: Build):
        super().__init__()
        self.num_experts = num_experts
        size = spec.intermediate_size
        self.gate_up = PackedLinear(build, num_experts, width, {"gate": size, "up": size})
        self.down = PackedLinear(build, num_experts, size, {"down": width})

    def places(self, prefix: str, matrices: dict[str, str]) -> dict[str, torch.Tensor]:
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
    """See `Experts`; speaks `GROUPED`. On a GPU it waits for the row counts where there are more than `FEW_PAIRS`."""

    def __init__(self, weights: PackedExpertWeights, spec: MlpSpec, build: Build):
        self._weights = weights
        self._activate = choose_activation(spec, build)

    def run(self, tokens: GroupedTokens) -> torch.Tensor:
        weights, few = self._weights, tokens.hidden.shape[0] <= FEW_PAIRS
        multiply = _multiply_pairs if few else _multiply_groups
        rows = tokens.experts if few else tokens.ends.tolist()
        return multiply(weights.down, self._activate(multiply(weights.gate_up, tokens.hidden, rows)), rows)


def _multiply_pairs(linear: PackedLinear, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """``x`` [N, I], each row through the matrix of its expert: [N, O]."""
    parts = zip(x.unsqueeze(-1).split(linear.num_at_once), experts.split(linear.num_at_once), strict=True)
    return torch.cat([torch.bmm(linear.matrices(chosen, x.dtype), rows) for rows, chosen in parts]).squeeze(-1)


def _multiply_groups(linear: PackedLinear, x: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """The same of rows sorted by expert; those of expert e are ``ends[e - 1]`` to ``ends[e]``."""
    out = x.new_empty(x.shape[0], linear.codes.shape[1])
    starts = [0, *ends[:-1]]
    for low in range(0, linear.num_stacked, linear.num_at_once):
        span = slice(low, min(low + linear.num_at_once, linear.num_stacked))
        if ends[span.stop - 1] > starts[low]:
            matrices = linear.matrices(span, x.dtype)
            for matrix, start, end in zip(matrices, starts[span], ends[span], strict=True):
                if end > start:
                    torch.mm(x[start:end], matrix.t(), out=out[start:end])
    return out

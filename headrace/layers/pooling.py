"""Pooling: from a text's hidden states to its embedding, score or classes. S texts, D hidden size, W result size.

Collecting hidden states over steps belongs to ``execution/pooling``, reading checkpoint folders to ``models/pooling``.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from headrace.layers.build import Build
from headrace.layers.linear import Linear

Reduction = Literal["first", "last", "mean", "max"]
DENSE_ACTIVATIONS = {
    "identity": nn.Identity, "tanh": nn.Tanh, "gelu": nn.GELU, "relu": nn.ReLU, "sigmoid": nn.Sigmoid, "silu": nn.SiLU
}


class EmbeddingHead(nn.Module):
    """``states [S, D] -> [S, W]`` float32: dense layers, then division by the L2 norm if ``normalise``. ``layers`` are
    ``(in_features, out_features, has_bias, activation)``."""

    def __init__(self, build: Build, layers: list[tuple[int, int, bool, str]], *, normalise: bool):
        super().__init__()
        self.dense = nn.ModuleList(Linear(build, inside, outside, bias=bias) for inside, outside, bias, _ in layers)
        self._activations = [DENSE_ACTIVATIONS[name]() for *_, name in layers]
        self._normalise, self._dtype = normalise, build.dtype

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for layer, activate in zip(self.dense, self._activations, strict=True):
            states = activate(layer(states.to(self._dtype)))  # weights have the model's dtype, states come in float32
        states = states.float()
        return F.normalize(states, dim=-1) if self._normalise else states


class PoolingHead(nn.Module):
    """The end of a pooling model. The runner reduces each text's hidden states to one vector as ``reduction`` says, in
    float32; ``head`` maps these, [S, D] converted to dtype ``takes``, to [S, W] float32."""

    def __init__(self, reduction: Reduction, head: nn.Module, *, takes: torch.dtype = torch.float32):
        super().__init__()
        self.reduction: Reduction = reduction
        self.head = head
        self._takes = takes

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.head(states.to(self._takes))

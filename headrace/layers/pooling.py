"""From hidden states to the result of a whole text: which states count, and what is made of them. S texts, D width.

Refuses: knowing rows and steps (``execution/pooling``) and checkpoint folders (``models/pooling``).
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
    """``states [S, D] -> [S, W]`` float32: dense layers, then unit length if wanted. ``layers`` are
    ``(in width, out width, has bias, activation)``."""

    def __init__(self, build: Build, layers: list[tuple[int, int, bool, str]], *, normalise: bool):
        super().__init__()
        self.dense = nn.ModuleList(Linear(build, inside, outside, bias=bias) for inside, outside, bias, _ in layers)
        self._activations = [DENSE_ACTIVATIONS[name]() for *_, name in layers]
        self._normalise, self._dtype = normalise, build.dtype

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for layer, activate in zip(self.dense, self._activations, strict=True):
            states = activate(layer(states.to(self._dtype)))
        states = states.float()
        return F.normalize(states, dim=-1) if self._normalise else states


class PoolingHead(nn.Module):
    """What a model that reads does with its hidden states: ``reduction`` of a text's states to one, in float32, then
    ``head``, ``[S, D]`` of type ``takes`` to ``[S, W]`` float32."""

    def __init__(self, reduction: Reduction, head: nn.Module, *, takes: torch.dtype = torch.float32):
        super().__init__()
        self.reduction: Reduction = reduction
        self.head = head
        self._takes = takes

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.head(states.to(self._takes))

"""`Embedding`: token ids to vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from headrace.layers.build import Build


class Embedding(nn.Module):
    """``token_ids [T] -> [T, D]``, multiplied by ``scale`` rounded to the model's dtype (as checkpoints were trained)."""

    def __init__(self, build: Build, vocab_size: int, width: int, scale: float = 1.0):
        super().__init__()
        self.weight = build.parameter(vocab_size, width)
        self.scale = float(torch.tensor(scale, dtype=build.dtype))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = F.embedding(token_ids, self.weight)
        return x if self.scale == 1.0 else x.mul_(self.scale)

"""`Embedding`: token ids to vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.layers.build import Build
from headrace.layers.quantization.storage import StorableLayer, plain_weight


class Embedding(StorableLayer):
    """``token_ids [T] -> [T, D]``, multiplied by ``scale`` rounded to the model's dtype (as checkpoints were
    trained)."""

    looks_up_rows = is_vocabulary = True

    def __init__(self, build: Build, vocab_size: int, hidden_size: int, scale: float = 1.0):
        super().__init__()
        self.weight = build.parameter(vocab_size, hidden_size)
        self.dtype = build.dtype
        self.scale = float(torch.tensor(scale, dtype=build.dtype))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        weight = plain_weight(self)
        x = self.stored.rows(token_ids, self.dtype) if weight is None else F.embedding(token_ids, weight)
        return x if self.scale == 1.0 else x.mul_(self.scale)

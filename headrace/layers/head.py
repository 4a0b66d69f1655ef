"""`Head`: hidden states to logits. The caller passes only the rows it will sample from."""

from __future__ import annotations

import torch
from torch import nn

from headrace.kernels.linear import LINEAR_FLOAT
from headrace.layers.build import Build
from headrace.layers.quantization.storage import StorableLayer, plain_weight


class Head(StorableLayer):
    """``hidden [S, D] -> logits [S, V]`` float32: divided by ``divisor``, then ``softcap * tanh(logits / softcap)``.

    ``weight`` [V, D] is the embedding's own parameter when the two are tied, else None to make one.
    """

    is_vocabulary = True

    def __init__(
        self, build: Build, vocab_size: int, hidden_size: int, *, weight: nn.Parameter | None = None,
        divisor: float = 1.0, softcap: float = 0.0, bias: bool = False
    ):
        super().__init__()
        self.weight = build.parameter(vocab_size, hidden_size) if weight is None else weight
        self.bias = build.parameter(vocab_size) if bias else None
        self.divisor, self.softcap = divisor, softcap
        self._linear = LINEAR_FLOAT.choose(build.query(in_features=hidden_size, out_features=vocab_size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = plain_weight(self)
        logits = self.stored.multiply(hidden, None, torch.float32) if weight is None else self._linear(hidden, weight)
        if self.bias is not None:
            logits.add_(self.bias)
        if self.divisor != 1.0:
            logits.div_(self.divisor)
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

"""`Embedding` and `Head`: token ids to vectors, hidden states to logits.

T tokens, S sampled rows, D hidden size, V vocabulary size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from headrace.kernels.linear import LINEAR_FLOAT
from headrace.kernels.lora import SlotRows
from headrace.layers.build import Build
from headrace.layers.lora.bank import HeadBank
from headrace.layers.lora.embedding import EmbeddingBank
from headrace.layers.quantization.storage import StorableLayer, plain_weight
from headrace.parallel.group import Group
from headrace.parallel.share import Share


class Embedding(StorableLayer):
    """``token_ids [T] -> [T, D]``, times ``scale``, which is rounded to the model's dtype as in training. Each rank of
    ``build.tensor`` has the rows of some tokens."""

    looks_up_rows = is_vocabulary = True

    def __init__(self, build: Build, vocab_size: int, hidden_size: int, scale: float = 1.0):
        super().__init__()
        self.vocab = build.tensor.share(vocab_size, "tokens of the vocabulary")
        self.weight = build.parameter(self.vocab, hidden_size)
        self.group = build.tensor
        self.dtype = build.dtype  # of the result, also once the weight is stored packed
        self.scale = float(torch.tensor(scale, dtype=build.dtype))
        self._step = build.step
        self.lora: EmbeddingBank | None = None
        if build.adapters is not None:
            self.lora = EmbeddingBank((vocab_size, hidden_size), build.dtype, build.device, self._find_adapter_rows)

    def _find_adapter_rows(self, token_ids: torch.Tensor) -> SlotRows | None:
        """Of the step's own lookup."""
        batch = self._step.batch
        return batch.adapters if token_ids is batch.token_ids else None

    def look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The rows without the scale, as a copy."""
        if self.group.is_single:
            return self._look_up_own(token_ids)
        local = token_ids - self.vocab.start
        is_elsewhere = (local < 0) | (local >= self.vocab.length)
        rows = self._look_up_own(local.masked_fill(is_elsewhere, 0))
        return self.group.all_reduce(rows.masked_fill_(is_elsewhere.unsqueeze(-1), 0))

    def _look_up_own(self, token_ids: torch.Tensor) -> torch.Tensor:
        weight = plain_weight(self)
        if weight is not None:
            return F.embedding(token_ids, weight)
        assert self.stored is not None
        return self.stored.rows(token_ids, self.dtype)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = self.look_up(token_ids)
        x = x if self.lora is None else self.lora.adapt(token_ids, x)
        return x if self.scale == 1.0 else x.mul_(self.scale)  # in place: a lookup is a copy


class Head(StorableLayer):
    """``hidden [S, D] -> logits [S, V]`` float32: plus the bias, divided by ``divisor``, then ``softcap * tanh(logits /
    softcap)``. The caller passes only the rows it samples from. Each rank of ``build.tensor`` computes the logits of
    some tokens and gets those of all; with ``is_shared`` unset, each computes all.

    ``weight`` [V, D] is the embedding's own parameter when the two are tied; None makes one.
    """

    is_vocabulary = True

    def __init__(
        self, build: Build, vocab_size: int, hidden_size: int, *, weight: nn.Parameter | None = None,
        divisor: float = 1.0, softcap: float = 0.0, bias: bool = False, is_shared: bool = True
    ):
        super().__init__()
        self.group = build.tensor if is_shared else Group()
        self.shares = [
            self.group.share(vocab_size, "tokens of the vocabulary", rank) for rank in range(self.group.size)
        ]
        own = self.shares[self.group.rank]
        self.weight = build.parameter(own, hidden_size) if weight is None else weight
        self.bias = build.parameter(own) if bias else None
        self.divisor, self.softcap = divisor, softcap
        query = build.query(in_features=hidden_size, out_features=own.length)
        self._linear = LINEAR_FLOAT.choose(query)
        self.lora: HeadBank | None = None
        if build.adapters is not None:
            self.lora = HeadBank(
                self, {"": own}, Share.whole(hidden_size), query, sizes=build.adapters, bias=self.bias,
                find_rows=lambda: build.step.output_rows,
            )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.gather(self.compute_own(hidden))

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Logits [S, V], of what `compute_own` returned on each rank."""
        return self.group.all_gather(own, [share.length for share in self.shares])

    def compute_own(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of this rank's tokens, [S, v]."""
        weight = plain_weight(self)
        if weight is not None:
            logits: torch.Tensor = self._linear(hidden, weight)
        else:
            assert self.stored is not None
            logits = self.stored.multiply(hidden, None, torch.float32)
        if self.bias is not None:
            logits.add_(self.bias)
        if self.lora is not None:
            logits = self.lora.finish(self.lora.begin(hidden), logits)
        if self.divisor != 1.0:
            logits.div_(self.divisor)
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

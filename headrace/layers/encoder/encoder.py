"""`Encoder`: a transformer of the BERT line from an `EncoderSpec`; Devlin et al., arXiv:1810.04805. T tokens, D width.

Refuses: knowing any family; a family brings its spec and its checkpoint names.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from headrace.layers.attention.contract import KvPages
from headrace.layers.batch import ForwardBatch
from headrace.layers.build import Build
from headrace.layers.encoder.spans import TextSpans
from headrace.layers.encoder.spec import EncoderSpec
from headrace.layers.linear import Linear
from headrace.layers.loading import fill_targets, find_targets
from headrace.layers.mlp import Mlp
from headrace.layers.model import ServedModel
from headrace.layers.names import CheckpointNames, drop_training_heads
from headrace.layers.norm import LayerNorm

HARMLESS = ("embeddings.position_ids",)
"""Name endings of tensors that old checkpoints carry and nobody needs."""


class EncoderEmbedding(nn.Module):
    """Word, position and kind of each token, added up and normalised."""

    def __init__(self, spec: EncoderSpec, build: Build):
        super().__init__()
        tables = spec.tables
        self.words = build.parameter(tables.vocab_size, spec.hidden_size)
        self.positions = build.parameter(tables.num_positions, spec.hidden_size)
        self.kinds = build.parameter(tables.num_kinds, spec.hidden_size)
        self.norm = LayerNorm(build, spec.hidden_size, spec.norm_eps)
        self._first_position, self._has_kinds = tables.first_position, tables.num_kinds > 1

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x = F.embedding(batch.token_ids, self.words)
        x += F.embedding(batch.positions + self._first_position, self.positions)
        x += (
            self.kinds[0] if batch.text_kinds is None or not self._has_kinds
            else F.embedding(batch.text_kinds, self.kinds)
        )
        return self.norm(x)


class EncoderBlock(nn.Module):
    """Attention and MLP, each added to its input and normalised."""

    def __init__(self, spec: EncoderSpec, build: Build):
        super().__init__()
        self.num_heads = spec.num_heads
        size = spec.hidden_size
        self.qkv = Linear(build, size, {"q": size, "k": size, "v": size}, bias=True)
        self.output = Linear(build, size, size, bias=True)
        self.attention_norm = LayerNorm(build, size, spec.norm_eps)
        self.mlp = Mlp(spec.mlp, size, build)
        self.mlp_norm = LayerNorm(build, size, spec.norm_eps)

    def forward(self, x: torch.Tensor, spans: TextSpans) -> torch.Tensor:
        x = self.attention_norm(self.output(spans.attend(self.qkv(x), self.num_heads)).add_(x))
        return self.mlp_norm(self.mlp(x).add_(x))


class ClassScores(nn.Module):
    """``hidden [S, D] -> logits [S, C]`` float32 of a text's first token: a dense layer, tanh, and one more."""

    def __init__(self, spec: EncoderSpec, build: Build):
        super().__init__()
        self.dense = Linear(build, spec.hidden_size, spec.hidden_size, bias=True)
        self.output = Linear(build, spec.hidden_size, spec.num_classes, bias=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.output(torch.tanh(self.dense(hidden))).float()


class Encoder(ServedModel):
    """The model of encoder families; see `ServedModel` for the order of calls. It keeps nothing between steps."""

    def __init__(self, spec: EncoderSpec, names: CheckpointNames, build: Build):
        super().__init__()
        self.spec, self.names = spec, names
        self.embedding = EncoderEmbedding(spec, build)
        self.layers = nn.ModuleList(EncoderBlock(spec, build) for _ in range(spec.num_layers))
        self.scores = ClassScores(spec, build) if spec.num_classes else None

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill every parameter from ``(checkpoint name, tensor)`` pairs; raises `WeightError`."""
        targets = find_targets(self, self.names.modules, self.spec.num_layers)
        fill_targets(targets, drop_training_heads(self.names.rename(tensors), wanted=targets.keys()), harmless=HARMLESS)

    def bind_cache(self, pages: list[KvPages | None], group_of_layer: list[int | None]) -> None:
        """No layer has a cache."""
        assert not any(pages), "an encoder keeps nothing between steps"

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, D] after the last layer."""
        x = self.embedding(batch)
        spans = TextSpans(batch.lengths, dtype=x.dtype, device=x.device)
        for layer in self.layers:
            x = layer(x, spans)
        return x

"""`Encoder`: a transformer of the BERT line from an `EncoderSpec`; Devlin et al., arXiv:1810.04805. T tokens, D hidden
size.

n texts of a batch, L tokens of the longest of them. Attention is bidirectional within each text. Knows no families, and
caches nothing between steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from headrace.layers.attention.contract import KvPages
from headrace.layers.batch import ForwardBatch
from headrace.layers.build import Build
from headrace.layers.linear import Linear
from headrace.layers.loading import fill_targets, find_targets
from headrace.layers.lora.contract import AdapterSites
from headrace.layers.lora.sites import find_sites
from headrace.layers.mlp import Mlp
from headrace.layers.model import ServedModel, number_layers
from headrace.layers.names import TRAINING_HEADS, CheckpointNames, drop_training_heads, find_elsewhere
from headrace.layers.narrowing import Narrowing
from headrace.layers.norm import LayerNorm
from headrace.layers.spec import EncoderSpec

MAX_PADDING = 1.25
"""Bound on padding: the longest text of a batch is at most this many times as long as its shortest."""

HARMLESS = ("embeddings.position_ids",)
"""Name endings of tensors that old checkpoints have and no model needs."""


class EncoderEmbedding(nn.Module):
    """Sum of word, position and token-type embeddings, normalised."""

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
        # some checkpoints count positions from the padding token's id + 1
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
        size = spec.hidden_size
        heads, _ = build.tensor.share_heads(spec.num_heads, spec.num_heads)
        self.num_heads, own = heads.length, heads.times(size // spec.num_heads)
        self.qkv = Linear(build, size, {"q": own, "k": own, "v": own}, bias=True)
        self.output = Linear(build, own, size, bias=True)
        self.attention_norm = LayerNorm(build, size, spec.norm_eps)
        self.mlp = Mlp(spec.mlp, size, build)
        self.mlp_norm = LayerNorm(build, size, spec.norm_eps)

    def forward(self, x: torch.Tensor, spans: TextSpans) -> torch.Tensor:
        # post-norm: the residual is added in place to the branch's own output, then normalised
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
    """The model of encoder families; see `ServedModel` for the order of calls. It has no KV cache: a text is computed
    in one step."""

    supports_stages = True

    def __init__(self, spec: EncoderSpec, names: CheckpointNames, build: Build):
        super().__init__()
        self.spec, self.names, self.stage, self.carried_width = spec, names, build.stage, spec.hidden_size
        self.step, self._schemes = build.step, build.schemes
        own = self.stage.layers(spec.num_layers)
        self.embedding = EncoderEmbedding(spec, build) if self.stage.is_first else None
        self._blocks = [EncoderBlock(spec, build) for _ in own]
        self.layers = number_layers(self._blocks, own.start)
        self.scores: ClassScores | None = None
        if spec.num_classes and self.stage.is_last:
            self.scores = ClassScores(spec, replace(build, is_output=True))
        ends = (("embedding", self.stage.is_first), ("scores", self.stage.is_last))
        absent = [part for part, is_here in ends if not is_here]
        self._elsewhere = find_elsewhere(names.modules, own, spec.num_layers, absent)

    def wants(self, name: str) -> bool:
        """See `ServedModel`."""
        return not f"{self.names.rename_one(name)}.".startswith(self._elsewhere)

    def find_narrowing(self) -> Narrowing | None:
        """See `ServedModel`."""
        targets = find_targets(self, self.names.modules)
        return Narrowing(targets.cuts, targets.elsewhere, self.names.rename_one) if targets.cuts else None

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill every parameter from ``(checkpoint name, tensor)`` pairs; raises `WeightError`."""
        targets = find_targets(self, self.names.modules)
        plain = self.names.rename(self._schemes.read(tensors))
        fill_targets(targets, drop_training_heads(plain, wanted=targets.keys()), harmless=HARMLESS)

    def find_adapter_sites(self) -> AdapterSites:
        """See `ServedModel`."""
        return AdapterSites(
            find_sites(self, self.names.modules, self.spec.num_layers), self.names.rename_one,
            self.names.stacked_experts, self.spec.hidden_size, unused=TRAINING_HEADS,
        )

    def bind_cache(self, pages: list[KvPages | None], group_of_layer: list[int | None]) -> None:
        """No layer has a cache."""
        assert not any(pages), "an encoder keeps nothing between steps"

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, D] after the last layer here."""
        self.step.batch = batch
        if batch.carried is not None:
            x = batch.carried
        else:
            assert self.embedding is not None
            x = self.embedding(batch)
        spans = TextSpans(batch.lengths, dtype=x.dtype, device=x.device)
        for layer in self._blocks:
            x = layer(x, spans)
        return x


@dataclass(frozen=True, slots=True)
class TextBatch:
    """n texts of similar length, padded to L tokens. ``tokens`` [n * L] int64: index of each token in the step; padding
    repeats the text's last token. ``mask`` [n, 1, 1, L] is added to the logits (None: no padding). ``real``: indices
    into [n * L] of tokens that are not padding (None: all)."""

    num_texts: int
    tokens: torch.Tensor
    mask: torch.Tensor | None
    real: torch.Tensor | None


class TextSpans:
    """The texts of a step, batched by similar ``lengths``; made once, used by every layer. Index tensors are copied
    from the host every step."""

    def __init__(self, lengths: list[int], *, dtype: torch.dtype, device: torch.device):
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        self._batches = [
            _make_batch([(starts[i], lengths[i]) for i in chosen], dtype, device) for chosen in group_lengths(lengths)
        ]

    def attend(self, qkv: torch.Tensor, num_heads: int) -> torch.Tensor:
        """``qkv`` [T, 3 * D], queries first, to [T, D]; logits are scaled by 1 / sqrt(head dim)."""
        size = qkv.shape[1] // 3
        out = qkv.new_empty(qkv.shape[0], size)
        for batch in self._batches:
            heads = qkv.index_select(0, batch.tokens).view(batch.num_texts, -1, 3, num_heads, size // num_heads)
            q, k, v = heads.permute(2, 0, 3, 1, 4)  # [n, L, 3, H, E] to three of [n, H, L, E]
            found = F.scaled_dot_product_attention(q, k, v, batch.mask).transpose(1, 2).reshape(-1, size)
            if batch.real is None:
                out.index_copy_(0, batch.tokens, found)
            else:
                out.index_copy_(0, batch.tokens[batch.real], found[batch.real])
        return out


def group_lengths(lengths: list[int]) -> list[list[int]]:
    """Indices of the texts in each batch, so that lengths within a batch differ by a factor of at most `MAX_PADDING`.
    """
    groups: list[list[int]] = []
    shortest = 0
    # by ascending length: a batch grows until a text is too long for its first, shortest one
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not groups or lengths[index] > shortest * MAX_PADDING:
            groups.append([])
            shortest = lengths[index]
        groups[-1].append(index)
    return groups


def _make_batch(spans: list[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> TextBatch:
    longest = max(length for _, length in spans)
    begin, length = (torch.tensor(column, device=device)[:, None] for column in zip(*spans, strict=True))
    places = torch.arange(longest, device=device)
    if all(length == longest for _, length in spans):  # equal lengths need no mask, which allows faster kernels
        return TextBatch(len(spans), (begin + places).flatten(), None, None)
    is_real = places < length
    mask = torch.zeros(is_real.shape, dtype=dtype, device=device).masked_fill_(~is_real, float("-inf"))
    return TextBatch(
        len(spans), (begin + places.clamp(max=length - 1)).flatten(), mask[:, None, None],
        torch.where(is_real.flatten())[0]
    )

"""Whisper's decoder over paged keys and values: of a window of sound at the positions of its placeholders, of text
behind them. The step loop, the page accounts and the prefix tree know nothing of it.

T tokens of which t are text, N placeholders, R requests, D hidden size, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from headrace.base.cache import NULL_PAGE
from headrace.base.errors import ConfigError
from headrace.base.media import MediaPlace
from headrace.layers.attention.contract import AttentionBackend, AttentionInputs, AttentionParams, KvPages
from headrace.layers.audio import AudioEncoder, adapt_tensors
from headrace.layers.batch import AlignedTexts, ForwardBatch, GroupStep
from headrace.layers.build import Build
from headrace.layers.linear import Linear
from headrace.layers.loading import fill_targets, find_targets
from headrace.layers.media import EncoderInput, InPieces, MediaModel
from headrace.layers.mlp import Mlp
from headrace.layers.model import ServedModel, number_layers
from headrace.layers.names import CheckpointNames
from headrace.layers.norm import make_norm
from headrace.layers.residual import Norm, Residual
from headrace.layers.self_attention import Attention
from headrace.layers.spec import AttentionSpec, LayerSpec
from headrace.layers.vision import pad_weights
from headrace.layers.vocabulary import Embedding, Head
from headrace.memory.copies import to_device
from headrace.models.whisper.family import WhisperSpec
from headrace.parallel.group import Group
from headrace.parallel.share import Share

HARMLESS = ("proj_out.weight",)
"""The head is the embedding; some files hold it twice."""


@dataclass(slots=True)
class TextStep:
    """The text of a step. ``indices`` [t] int64 among its tokens, None where all are text. ``text`` and ``sound`` are
    what attention to text and to sound reads: in the latter each token is a decode. ``lengths`` [R]: tokens of text of
    each request of the step."""

    indices: torch.Tensor | None
    text: AttentionInputs
    sound: AttentionInputs
    lengths: np.ndarray


Watch = Callable[[torch.Tensor, torch.Tensor, float], None]
"""Called with the queries [t, H, E] of a layer's attention to sound, its pages of keys, and the scale of logits."""


@dataclass(frozen=True)
class HeadWatch:
    """What is read of attention to sound in a step. ``heads``: those of this rank of ``group``."""

    aligned: AlignedTexts
    step: TextStep
    num_positions: int
    heads: Share
    group: Group

    def watch(self, layer: int, q: torch.Tensor, keys: torch.Tensor, scale: float) -> None:
        """Add to ``aligned`` how much its tokens attend to each position of sound in this layer's heads, which are
        those of all ranks."""
        aligned, step, own = self.aligned, self.step, self.heads
        ends = step.lengths.cumsum()
        for request, alignment, weights in zip(aligned.requests, aligned.alignments, aligned.weights, strict=True):
            end, length = int(ends[request]), int(step.lengths[request])
            heads = [head for of, head in alignment.heads if of == layer]
            if not heads or not length:
                continue
            heard = keys.index_select(0, step.sound.page_table[end - 1]).flatten(0, 1)[: self.num_positions]
            found = q.new_zeros(len(heads), length, self.num_positions, dtype=torch.float32)
            for place, head in enumerate(heads):
                if own.start <= head < own.stop:
                    own_q, own_keys = (x[:, head - own.start].float() for x in (q[end - length : end], heard))
                    found[place] = (own_q @ own_keys.T * scale).softmax(dim=-1)
            weights.append(self.group.all_reduce(found))


class CrossAttention(nn.Module):
    """Attention to a window of sound. Keys and values of all windows are computed by `write`, once."""

    def __init__(self, spec: WhisperSpec, build: Build):
        super().__init__()
        heads, _ = build.tensor.share_heads(spec.num_heads, spec.num_heads)
        own = heads.times(spec.head_dim)
        self.head_dim, self.params = spec.head_dim, AttentionParams(spec.head_dim**-0.5)
        self.query = Linear(build, spec.hidden_size, own, bias=True)
        self.key_value = Linear(build, spec.hidden_size, {"k": own, "v": own}, bias=True)
        self.output = Linear(build, own, spec.hidden_size, bias=True)

    def write(self, vectors: torch.Tensor, slots: torch.Tensor, pages: KvPages) -> None:
        """Keys and values of the encoder's output [N, D] into pages; ``slots`` [N] int64."""
        found = self.key_value(vectors).unflatten(-1, (2, -1, self.head_dim))
        for own, part in zip((pages.k, pages.v), found.unbind(1), strict=True):
            own.flatten(0, 1).index_copy_(0, slots, part.to(own.dtype))

    def add(
        self, norm: Norm, residual: Residual, backend: AttentionBackend, pages: KvPages, watch: Watch | None
    ) -> None:
        """As `headrace.layers.residual.Branch.add`; ``watch`` is given queries and keys."""
        q = self.query(norm.add(residual)).unflatten(-1, (-1, self.head_dim))
        if watch is not None:
            watch(q, pages.k, self.params.scale)
        self.output.add_to(residual, backend.attend(q, pages, self.params).flatten(1))


class WhisperBlock(nn.Module):
    """Attention to the text before, to sound, and an MLP, each behind a norm."""

    def __init__(self, spec: WhisperSpec, build: Build):
        super().__init__()
        heads, size, norm = spec.num_heads, spec.hidden_size, spec.norm
        attention = AttentionSpec(heads, heads, spec.head_dim, spec.head_dim**-0.5, qkv_bias=True, output_bias=True)
        self.attention_norm, self.cross_norm, self.mlp_norm = (make_norm(norm, size, build) for _ in range(3))
        self.attention = Attention(
            attention, LayerSpec(0, None), hidden_size=size, norm=norm, rotary=None, build=build
        )
        self.cross, self.mlp = CrossAttention(spec, build), Mlp(spec.mlp, size, build)

    def forward(self, residual: Residual, sound: AttentionBackend, watch: Watch | None = None) -> None:
        assert self.attention.pages is not None
        self.attention.add(self.attention_norm, residual)
        self.cross.add(self.cross_norm, residual, sound, self.attention.pages, watch)
        self.mlp.add(self.mlp_norm, residual)


class WhisperMedia(MediaModel):
    """Windows of sound to the encoder's output; see `MediaModel`."""

    def __init__(self, spec: WhisperSpec, encoder: AudioEncoder, build: Build):
        self._spec, self._encoder, self._device, self._dtype = spec, encoder, build.device, build.dtype
        self.num_pieces = spec.audio.blocks.num_layers + 1

    def encode(self, items: list[EncoderInput]) -> InPieces[list[torch.Tensor]]:
        """See `MediaModel`; the placeholders behind the sound get zeros."""
        x = yield from self._encoder.encode(torch.stack([item.pixels(self._dtype) for item in items]))
        x = self._encoder.norm(x)
        windows = x.unflatten(0, (len(items), -1))
        return list(F.pad(windows, (0, 0, 0, self._spec.num_placeholders - windows.shape[1])))

    def example(self, num_tokens: int) -> list[EncoderInput]:
        """See `MediaModel`."""
        audio, count = self._spec.audio, self._spec.num_placeholders
        frames = torch.zeros(audio.num_frames, audio.num_mels, device=self._device)
        place = MediaPlace("audio", b"", [(0, count)])
        return [EncoderInput(place, {"input_features": frames}) for _ in range(max(1, num_tokens // count))]

    def find_positions(self, num_tokens: int, places: Sequence[MediaPlace]) -> np.ndarray:
        """See `MediaModel`; nothing is rotated."""
        raise AssertionError("positions are learned")


class Whisper(ServedModel):
    """See `ServedModel`."""

    captures_prefill = False  # a prompt has a window, so that no step with prefill is text alone

    def __init__(self, spec: WhisperSpec, names: CheckpointNames, build: Build):
        super().__init__()
        self.spec, self.names, self.step, self._schemes = spec, names, build.step, build.schemes
        self.encoder = AudioEncoder(spec.audio, replace(build, tensor=Group(), adapters=None))
        self.embedding = Embedding(build, spec.vocab_size, spec.hidden_size)
        self.positions = build.parameter(spec.num_positions, spec.hidden_size)
        self._blocks = [WhisperBlock(spec, build) for _ in range(spec.num_layers)]
        self.layers = number_layers(self._blocks, 0)
        self.norm = make_norm(spec.norm, spec.hidden_size, build)
        self.head = Head(build, spec.vocab_size, spec.hidden_size, weight=self.embedding.weight)
        self.media = WhisperMedia(spec, self.encoder, build)
        self._dtype, self._tensor = build.dtype, build.tensor
        self._heads, _ = build.tensor.share_heads(spec.num_heads, spec.num_heads)
        self._backends: tuple[AttentionBackend, AttentionBackend] | None = None

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `ServedModel`."""
        targets = find_targets(self, self.names.modules)
        adapted = adapt_tensors(self.names.rename(self._schemes.read(tensors)))
        fill_targets(targets, pad_weights(adapted, targets, self.encoder), harmless=HARMLESS)

    @property
    def vocabulary(self) -> tuple[Embedding, Head]:
        """See `ServedModel`."""
        return self.embedding, self.head

    def bind_cache(self, pages: list[KvPages | None], group_of_layer: list[int | None]) -> None:
        """See `ServedModel`; raises `ConfigError` for pages that text and sound would share."""
        for block, own, group in zip(self._blocks, pages, group_of_layer, strict=True):
            if own is not None and self.spec.num_placeholders % own.k.shape[1]:
                raise ConfigError(
                    f"page_size must divide the {self.spec.num_placeholders} placeholders of a window of sound, got "
                    f"{own.k.shape[1]}; leave it out", param="page_size",
                )
            block.attention.bind(own, group)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """See `ServedModel`; rows of placeholders are zero."""
        group = batch.groups[self._blocks[0].attention.group]
        if batch.media is not None:
            assert batch.media.indices is not None, "steps with windows are not captured"
            self._write(batch.media.vectors, group.inputs.slots.index_select(0, batch.media.indices))
        step = self._divide(group.inputs)
        if step is None:
            device = batch.token_ids.device
            return torch.zeros(len(batch.token_ids), self.spec.hidden_size, dtype=self._dtype, device=device)
        hidden = self._run(batch, group.backend, step)
        if step.indices is None:
            return hidden
        found = hidden.new_zeros(len(batch.token_ids), hidden.shape[1])
        return found.index_copy_(0, step.indices, hidden)

    def _run(self, batch: ForwardBatch, backend: AttentionBackend, step: TextStep) -> torch.Tensor:
        """Hidden states [t, D]."""
        token_ids, positions = batch.token_ids, batch.positions
        if step.indices is not None:
            token_ids, positions = (x.index_select(0, step.indices) for x in (token_ids, positions))
        text, sound = self._find_backends(backend)
        text.prepare(step.text)
        sound.prepare(step.sound)
        groups = list(batch.groups)
        groups[self._blocks[0].attention.group] = GroupStep(step.text, text)
        self.step.batch = replace(batch, token_ids=token_ids, positions=positions, groups=groups, media=None)
        # padding of a captured step has positions before those of text
        places = (positions - self.spec.num_placeholders).clamp(0, self.spec.num_positions - 1)
        residual = Residual(self.embedding(token_ids).add_(F.embedding(places, self.positions)))
        heads = None if batch.aligned is None else HeadWatch(
            batch.aligned, step, self.spec.audio.num_positions, self._heads, self._tensor
        )
        for layer, block in enumerate(self._blocks):
            block(residual, sound, None if heads is None else partial(heads.watch, layer))
        return self.norm.add(residual)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `ServedModel`."""
        return self.head(hidden)

    def _write(self, vectors: torch.Tensor, slots: torch.Tensor) -> None:
        for block in self._blocks:
            assert block.attention.pages is not None, "bind comes first"
            block.cross.write(vectors, slots, block.attention.pages)

    def _find_backends(self, backend: AttentionBackend) -> tuple[AttentionBackend, AttentionBackend]:
        """The step's own for text, and another one for sound."""
        if self._backends is None or self._backends[0] is not backend:
            self._backends = backend, backend.twin()
        return self._backends

    def _divide(self, whole: AttentionInputs) -> TextStep | None:
        """What the text of a step reads; None where there is none. Of decodes only the device knows lengths."""
        first = self.spec.num_placeholders
        columns = first // self._page_size
        lengths = np.asarray(whole.query_lens_cpu)
        begins = np.asarray(whole.kv_lens_cpu) - lengths
        begins[: whole.num_decodes] = first  # known to be text; what the host says of them are bounds
        hidden = np.clip(first - begins, 0, lengths)  # placeholders of each request
        own, device = lengths - hidden, whole.slots.device
        if not own.any():
            return None
        table, kv_lens, slots, query_start, indices = (
            whole.page_table, whole.kv_lens, whole.slots, whole.query_start, None
        )
        if table.shape[1] <= columns:  # a warm-up, whose requests are shorter than a window
            table = F.pad(table, (0, columns + 1 - table.shape[1]), value=NULL_PAGE)
        # Of a width of its own in every step: kernels are compiled for strides.
        width = -(-self.spec.num_positions // self._page_size)
        pages = F.pad(table[:, columns:], (0, max(0, width + columns - table.shape[1])), value=NULL_PAGE)
        requests = np.flatnonzero(own)
        if hidden.any():
            starts = np.cumsum(lengths) - lengths
            spans = [starts[i] + np.arange(hidden[i], lengths[i]) for i in requests]
            indices = to_device(np.concatenate(spans), device)
            kept = to_device(requests, device)
            table, kv_lens, slots = table.index_select(0, kept), kv_lens.index_select(0, kept), slots[indices]
            query_start = to_device(np.concatenate(([0], np.cumsum(own[requests]))).astype(np.int32), device)
        num_tokens, ends = int(own.sum()), np.maximum(np.asarray(whole.kv_lens_cpu)[requests] - first, 1)
        text = replace(
            whole, num_tokens=num_tokens, query_lens_cpu=list(map(int, own[requests])),
            kv_lens_cpu=list(map(int, ends)), max_query_len=int(own.max()), max_kv_len=int(ends.max()),
            query_start=query_start, kv_lens=(kv_lens - first).clamp_(min=1), slots=slots,
            page_table=pages.clone(memory_format=torch.contiguous_format), last_run=None,
        )
        return TextStep(indices, text, self._listen(text, table[:, :columns], own[requests]), own)

    def _listen(self, text: AttentionInputs, table: torch.Tensor, lengths: np.ndarray) -> AttentionInputs:
        """What attention to sound reads: every token of text is a decode at the end of the window of its request.
        ``table`` [R, pages of a window]."""
        count, heard, device = text.num_tokens, self.spec.audio.num_positions, text.slots.device
        if count != len(lengths):
            table = table.index_select(0, to_device(np.repeat(np.arange(len(lengths)), lengths), device))
        return AttentionInputs(
            num_tokens=count, num_decodes=count, query_lens_cpu=[1] * count, kv_lens_cpu=[heard] * count,
            max_query_len=1, max_kv_len=heard,
            query_start=torch.arange(count + 1, dtype=torch.int32, device=device),
            kv_lens=torch.full((count,), heard, dtype=torch.int32, device=device), slots=text.slots,
            page_table=table.clone(memory_format=torch.contiguous_format),
        )

    @property
    def _page_size(self) -> int:
        pages = self._blocks[0].attention.pages
        assert pages is not None, "bind comes first"
        return pages.k.shape[1]

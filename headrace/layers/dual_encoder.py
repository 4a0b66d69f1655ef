"""`DualEncoder`: texts and images to embeddings that are compared with one another, as CLIP (arXiv:2103.00020) and
SigLIP (arXiv:2303.15343) make them. Caches nothing between steps.

T tokens of n texts, L tokens of the longest of them, D hidden size of an encoder, P size of embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from headrace.base.media import MediaPlace
from headrace.kernels.span_attention import Spans
from headrace.layers.attention.contract import KvPages
from headrace.layers.batch import ForwardBatch
from headrace.layers.build import Build
from headrace.layers.linear import Linear
from headrace.layers.loading import fill_targets, find_targets
from headrace.layers.media import EncoderInput, InPieces, MediaModel, finish
from headrace.layers.media_spec import DualSpec
from headrace.layers.mlp import Mlp
from headrace.layers.model import ServedModel, number_layers
from headrace.layers.names import CheckpointNames
from headrace.layers.norm import make_norm
from headrace.layers.residual import Residual
from headrace.layers.vision import ImageEncoder, VisionBlock, fit_dims, make_spans, pad_weights
from headrace.memory.copies import to_device
from headrace.parallel.group import Group

HARMLESS = ("logit_scale", "logit_bias", "embeddings.position_ids")
"""Of comparing embeddings in training, and of old files."""
MOST_IMAGES = 32
"""Images that are encoded in one call: each has but one placeholder, so that the encoder's budget is no bound."""


class TextEncoder(nn.Module):
    """``token ids [n, L] -> [n, P]``, of the tokens ``lasts``."""

    def __init__(self, spec: DualSpec, build: Build):
        super().__init__()
        text = spec.text
        self.words = build.parameter(spec.num_words, text.hidden_size)
        self.positions = build.parameter(spec.num_positions, text.hidden_size)
        blocks = [VisionBlock(text, build) for _ in range(text.num_layers)]
        self.blocks = number_layers(blocks, 0)
        self.norm = make_norm(text.norm, text.hidden_size, build)
        self.projection = Linear(build, text.hidden_size, spec.hidden_size, bias=spec.projection_bias)
        if spec.is_causal:
            for block in blocks:
                block.attend_by(attend_to_the_left)

    def forward(self, token_ids: torch.Tensor, lasts: torch.Tensor) -> torch.Tensor:
        """``lasts`` [n] int64: indices into [n * L]."""
        count, length = token_ids.shape
        x = F.embedding(token_ids, self.words) + self.positions[:length]
        residual, spans = Residual(x.flatten(0, 1)), make_spans([length] * count, token_ids.device)
        for block in self.blocks:
            block(residual, spans)
        return self.projection(self.norm(residual.add_pending().index_select(0, lasts)))


def attend_to_the_left(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans, scale: float, cos_sin: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention [N, H, E] of each token to those of its span up to itself; spans are of one length."""
    assert cos_sin is None, "positions are learned"
    q, k, v = (x.unflatten(0, (len(spans.lengths), -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2).flatten(0, 1)


class AttentionPool(nn.Module):
    """``[n, N, D] -> [n, D]``: a learned query attends to all patches, then an MLP."""

    def __init__(self, spec: DualSpec, build: Build):
        super().__init__()
        vision = spec.image.vision
        size, self._num_heads = vision.hidden_size, vision.num_heads
        self.probe = build.parameter(size)
        self.qkv = Linear(build, size, {"q": size, "k": size, "v": size}, bias=True)
        self.output = Linear(build, size, size, bias=True)
        self.norm = make_norm(vision.norm, size, build)
        self.mlp = Mlp(vision.mlp, size, build)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length, size = x.shape
        made = self.qkv(torch.cat((self.probe.expand(count, 1, size), x), dim=1).flatten(0, 1))
        heads = made.view(count, length + 1, 3, self._num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = heads[0][:, :, :1], heads[1][:, :, 1:], heads[2][:, :, 1:]
        pooled = self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(count, size))
        return pooled + self.mlp(self.norm(pooled))


class ImageTower(nn.Module):
    """``images [n, C, S, S] -> [n, P]``."""

    def __init__(self, spec: DualSpec, build: Build):
        super().__init__()
        self.spec = spec
        # CLIP's last norm is of the class token alone, which is the same
        self.image = ImageEncoder(spec.image, build)
        size = spec.image.vision.hidden_size
        self.pool = AttentionPool(spec, build) if spec.pools_by_attention else None
        self.projection = None if spec.projection_bias else Linear(build, size, spec.hidden_size)

    def encode(self, images: torch.Tensor) -> InPieces[torch.Tensor]:
        """Yields behind each layer."""
        x = yield from self.image.encode(images, has_class_token=True)
        pooled = x[:, 0].contiguous() if self.pool is None else self.pool(x)
        return pooled if self.projection is None else self.projection(pooled)


class DualMedia(MediaModel):
    """Images to embeddings; see `MediaModel`."""

    def __init__(self, tower: ImageTower, build: Build):
        self._tower, self._device, self._dtype = tower, build.device, build.dtype

    def encode(self, items: list[EncoderInput]) -> InPieces[list[torch.Tensor]]:
        """See `MediaModel`; in one piece, as no step has decodes."""
        pixels, found = torch.cat([item.pixels(self._dtype) for item in items]), []
        for part in pixels.split(MOST_IMAGES):
            found.append(finish(self._tower.encode(part)))
        yield from ()
        return list(torch.cat(found).split(1))

    def example(self, num_tokens: int) -> list[EncoderInput]:
        """See `MediaModel`."""
        spec = self._tower.spec.image
        channels = spec.vision.input_size // spec.patch_size**2
        shape, place = (1, channels, spec.image_size, spec.image_size), MediaPlace("image", b"", [(0, 1)])
        return [
            EncoderInput(place, {"pixel_values": torch.zeros(shape, device=self._device)})
            for _ in range(min(num_tokens, MOST_IMAGES))
        ]

    def find_positions(self, num_tokens: int, places: Sequence[MediaPlace]) -> np.ndarray:
        """See `MediaModel`; nothing is rotated."""
        raise AssertionError("positions are learned")


class DualEncoder(ServedModel):
    """See `ServedModel`. Its hidden states [T, P] are the embedding at the last token of a text or an image, and zero
    elsewhere."""

    is_capturable = captures_prefill = False

    def __init__(self, spec: DualSpec, names: CheckpointNames, build: Build):
        super().__init__()
        self.spec, self.names, self.step, self._schemes = spec, names, build.step, build.schemes
        whole = replace(build, tensor=Group(), adapters=None)
        self.text, self.encoder = TextEncoder(spec, whole), ImageTower(spec, whole)
        self.media = DualMedia(self.encoder, build)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `ServedModel`."""
        targets = find_targets(self, self.names.modules)
        plain = self.names.rename(self._schemes.read(tensors))
        fitted = pad_weights(fit_dims(plain, targets), targets, self)
        fill_targets(targets, fitted, harmless=HARMLESS)

    def bind_cache(self, pages: list[KvPages | None], group_of_layer: list[int | None]) -> None:
        """No layer has a cache."""
        assert not any(pages), "an encoder keeps nothing between steps"

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """See `ServedModel`. Images are computed as a text of one word, too: which requests have one is known to the
        device alone."""
        self.step.batch = batch
        spec, lengths, device = self.spec, np.asarray(batch.lengths), batch.token_ids.device
        ends = lengths.cumsum()
        width = int(lengths.max()) if spec.pad_id is None else spec.num_positions
        places = np.arange(width)
        index = (ends - lengths)[:, None] + np.minimum(places, lengths[:, None] - 1)
        given = batch.token_ids.clamp(max=spec.num_words - 1).index_select(0, to_device(index.ravel(), device))
        token_ids = given.view(len(lengths), width)
        last_places = lengths - 1
        if spec.pad_id is not None:
            is_padding = to_device((places >= lengths[:, None]).astype(np.int64), device).bool()
            token_ids, last_places = token_ids.masked_fill(is_padding, spec.pad_id), np.full(len(lengths), width - 1)
        lasts = to_device(np.arange(len(lengths)) * width + last_places, device)
        embeddings = self.text(token_ids, lasts)
        found = embeddings.new_zeros(len(batch.token_ids), embeddings.shape[1])
        found.index_copy_(0, to_device(ends - 1, device), embeddings)
        return found if batch.media is None else batch.media.replace_embeddings(found)

"""SigLIP over crops of an image and the whole of it: 2 x 2 patches are averaged, a vector ends each row of them, and
another one the crops.

N patches, D hidden size of the encoder, M patches of a crop's side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from headrace.base.media import MediaPlace
from headrace.kernels.span_attention import SPAN_ATTENTION, Spans
from headrace.layers.build import Build
from headrace.layers.linear import Linear
from headrace.layers.media import EncoderInput, InPieces
from headrace.layers.model import number_layers
from headrace.layers.residual import Residual
from headrace.layers.vision import Projector, VisionBlock, cut_patches, make_spans
from headrace.memory.copies import to_device

if TYPE_CHECKING:
    from headrace.models.phi4_multimodal.family import CropsSpec


@dataclass(frozen=True)
class Crop:
    """A crop that has ``rows`` x ``columns`` patches of the image, from its left upper corner on; the others are
    padding. Of these only the ones are computed which are averaged with a patch of the image."""

    rows: int
    columns: int

    def find_used(self, side: int) -> np.ndarray:
        """Numbers of the image's patches."""
        return np.arange(side * side).reshape(side, side)[: self.rows, : self.columns].ravel()

    def find_edge(self, side: int) -> np.ndarray:
        """Numbers of the patches of padding that are averaged with them."""
        places = np.arange(side * side).reshape(side, side)
        wide = places[: self.rows + self.rows % 2, : self.columns + self.columns % 2]
        return np.setdiff1d(wide, places[: self.rows, : self.columns])

    def place_used(self, num_positions: int) -> np.ndarray:
        """Learned positions of the image's patches, of ``num_positions`` a side: NaViT's fractions,
        arXiv:2307.06304, in float32 as the model was trained."""
        bounds = np.arange(1 / num_positions, 1.0, 1 / num_positions).astype(np.float32)
        rows, columns = (
            np.searchsorted(bounds, _fractions(count), side="right") for count in (self.rows, self.columns)
        )
        return (rows[:, None] * num_positions + columns).ravel()


def _fractions(count: int) -> np.ndarray:
    step = np.float32(1) / np.float32(count)
    return np.minimum(np.arange(count, dtype=np.float32) * step, np.float32(1 - 1e-6))


def list_crops(place: MediaPlace, side: int) -> list[Crop | None]:
    """The whole image, then its crops; None for one that is padding alone."""
    rows, columns, down, across = place.grid
    found: list[Crop | None] = [Crop(side, side)]
    for i in range(down):
        for j in range(across):
            high, wide = min(rows - i * side, side), min(columns - j * side, side)
            found.append(Crop(high, wide) if high > 0 and wide > 0 else None)
    return found


@dataclass(frozen=True)
class EdgedSpans(Spans):
    """Spans behind which, in the order of the spans, stand ``edges`` of each: patches of padding that attend to their
    span, and that nothing attends to."""

    edges: list[int] = field(default_factory=list)


class CropsEncoder(nn.Module):
    """Images to vectors of the decoder."""

    def __init__(self, spec: CropsSpec, hidden_size: int, build: Build):
        super().__init__()
        vision, size = spec.vision, spec.vision.hidden_size
        self.spec, self._device = spec, build.device
        self.patches = Linear(build, vision.input_size, size, bias=True)
        self.positions = build.parameter(spec.side**2, size)
        blocks = [VisionBlock(vision, build) for _ in range(vision.num_layers)]
        for block in blocks:
            block.attend_by(self._attend_to_spans)
        self.blocks = number_layers(blocks, 0)
        self.num_layers = len(list(self.blocks)[: spec.last_layer])
        self.newline, self.separator = build.parameter(size), build.parameter(size)
        self.projector = Projector(size, hidden_size, build, activation="gelu")
        self._attend = SPAN_ATTENTION.choose(build.query(head_dim=vision.head_dim))

    def encode(self, items: list[EncoderInput], dtype: torch.dtype) -> InPieces[list[torch.Tensor]]:
        """Vectors [N, hidden size] of each image; yields behind each layer."""
        if not items:
            return []
        side = self.spec.crop_side
        every = [crop for item in items for crop in list_crops(item.place, side)]
        crops = [(i * side**2, crop) for i, crop in enumerate(every) if crop is not None]
        used = [crop.find_used(side) + first for first, crop in crops]
        edges = [crop.find_edge(side) + first for first, crop in crops]
        numbers = np.concatenate((*used, *edges))
        places = np.concatenate([crop.place_used(self.spec.side) for _, crop in crops])
        places = np.pad(places, (0, len(numbers) - len(places)))
        flat = torch.cat([cut_patches(item.pixels(dtype), self.spec.patch_size) for item in items])
        x = self.patches(flat.index_select(0, to_device(numbers, self._device)))
        residual = Residual(x + self.positions.index_select(0, to_device(places, self._device)))
        plain = make_spans([len(each) for each in used], self._device)
        spans = EdgedSpans(plain.lengths, plain.starts, plain.claims, [len(each) for each in edges])
        del flat, x
        for block in list(self.blocks)[: self.spec.last_layer]:
            block(residual, spans)
            yield
        rows = np.zeros(len(every) * side**2, dtype=np.int64)  # of the output, by patch
        rows[numbers] = np.arange(len(numbers))
        return self._arrange(residual.add_pending(), rows, items)

    def _attend_to_spans(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans, scale: float,
        cos_sin: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `SPAN_ATTENTION`."""
        assert isinstance(spans, EdgedSpans) and cos_sin is None
        at = begin = sum(spans.lengths)
        found, start = [self._attend(q[:at], k[:at], v[:at], spans, scale)], 0
        for length, count in zip(spans.lengths, spans.edges, strict=True):
            if count:
                own_q, own_k, own_v = (
                    each[low : low + size].transpose(0, 1)[None]
                    for each, low, size in ((q, begin, count), (k, start, length), (v, start, length))
                )
                found.append(F.scaled_dot_product_attention(own_q, own_k, own_v, scale=scale)[0].transpose(0, 1))
            begin, start = begin + count, start + length
        return torch.cat(found)

    def _arrange(self, x: torch.Tensor, rows: np.ndarray, items: list[EncoderInput]) -> list[torch.Tensor]:
        """The patches [N, D] as vectors of the decoder."""
        side, parts, first = self.spec.crop_side, list[torch.Tensor](), 0
        for item in items:
            high, wide, down, across = item.place.grid
            own = rows[first : first + (1 + down * across) * side**2].reshape(-1, side, side)
            first += own.size
            cut = own[1:].reshape(down, across, side, side).swapaxes(1, 2).reshape(down * side, across * side)
            cut = cut[: high + high % 2, : wide + wide % 2]
            parts.append(torch.cat((self._pool(x, cut), self.separator[None], self._pool(x, own[0]))))
        found = self.projector(torch.cat(parts))
        return list(found.split([len(part) for part in parts]))

    def _pool(self, x: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """Averages of 2 x 2 patches, with a vector behind each row of them."""
        high, wide = rows.shape[0] // 2, rows.shape[1] // 2
        own = x.index_select(0, to_device(np.ascontiguousarray(rows.ravel()), x.device))
        pooled = own.view(high, 2, wide, 2, -1).float().mean((1, 3)).to(x.dtype)
        return torch.cat((pooled, self.newline.expand(high, 1, -1)), dim=1).flatten(0, 1)

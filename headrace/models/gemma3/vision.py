"""Gemma 3's vision part: SigLIP, whose patches are averaged and projected; arXiv:2503.19786, section 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from headrace.base.media import MediaPlace
from headrace.layers.build import Build
from headrace.layers.decoder.multimodal import Tower
from headrace.layers.media import EncoderInput, InPieces
from headrace.layers.norm import RmsNorm
from headrace.layers.vision import ImageEncoder

if TYPE_CHECKING:
    from headrace.models.gemma3.family import PooledImageSpec


class PooledTower(Tower):
    """See `Tower`; an item is one image or several crops of it."""

    def __init__(self, spec: PooledImageSpec, hidden_size: int, build: Build):
        super().__init__()
        self.spec, self.device, self.dtype = spec, build.device, build.dtype
        self.image, self.num_layers = ImageEncoder(spec.image, build), spec.image.vision.num_layers
        size = spec.image.vision.hidden_size
        self.norm = RmsNorm(build, size, spec.norm_eps, offset=1.0)
        self.projection = build.parameter(size, hidden_size)

    def encode(self, items: list[EncoderInput]) -> InPieces[list[torch.Tensor]]:
        """See `Tower`."""
        pixels = [item.pixels(self.dtype) for item in items]
        counts, side = [len(each) for each in pixels], self.spec.image.side
        pieces = self.image.encode(torch.cat(pixels))
        del items, pixels
        x = yield from pieces
        grid = x.transpose(1, 2).unflatten(2, (side, side))
        pooled = F.avg_pool2d(grid, side // self.spec.tokens_per_side).flatten(2).transpose(1, 2)
        found = self.norm(pooled.reshape(-1, x.shape[-1]).contiguous()) @ self.projection
        return list(found.split([count * self.spec.tokens_per_side**2 for count in counts]))

    def example(self, num_tokens: int) -> list[EncoderInput]:
        """See `Tower`."""
        count, size = self.spec.tokens_per_side**2, self.spec.image.image_size
        place = MediaPlace("image", b"", [(0, count)])
        return [
            EncoderInput(place, {"pixel_values": torch.zeros(1, 3, size, size, device=self.device)})
            for _ in range(max(1, num_tokens // count))
        ]

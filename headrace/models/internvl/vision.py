"""InternVL's vision part: InternViT, whose patches are joined in blocks and projected; arXiv:2404.16821, section 3."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.base.media import MediaPlace
from headrace.layers.build import Build
from headrace.layers.decoder.multimodal import Tower
from headrace.layers.media import EncoderInput, InPieces
from headrace.layers.vision import ImageEncoder, Projector

if TYPE_CHECKING:
    from headrace.models.internvl.family import ShuffledImageSpec

NORM_EPS = 1e-5


class ShuffledTower(Tower):
    """See `Tower`; an item is one image or several tiles of it."""

    def __init__(self, spec: ShuffledImageSpec, hidden_size: int, build: Build):
        super().__init__()
        self.spec, self.device, self.dtype = spec, build.device, build.dtype
        self.image, self.num_layers = ImageEncoder(spec.image, build), spec.image.vision.num_layers
        self.projector = Projector(
            spec.image.vision.hidden_size * spec.merge**2, hidden_size, build, activation=spec.activation,
            norm_eps=NORM_EPS,
        )
        self._count = (spec.image.side // spec.merge) ** 2

    def encode(self, items: list[EncoderInput]) -> InPieces[list[torch.Tensor]]:
        """See `Tower`."""
        pixels = [item.pixels(self.dtype) for item in items]
        counts, merge = [len(each) for each in pixels], self.spec.merge
        pieces = self.image.encode(torch.cat(pixels))
        del items, pixels
        x = yield from pieces
        side = self.spec.image.side // merge
        # [n, rows, m, columns, m, D]: the elements of a block row by row
        blocks = x.view(len(x), side, merge, side, merge, x.shape[-1]).transpose(2, 3)
        found = self.projector(blocks.reshape(-1, merge**2 * x.shape[-1]))
        return list(found.split([count * self._count for count in counts]))

    def example(self, num_tokens: int) -> list[EncoderInput]:
        """See `Tower`."""
        size, place = self.spec.image.image_size, MediaPlace("image", b"", [(0, self._count)])
        return [
            EncoderInput(place, {"pixel_values": torch.zeros(1, 3, size, size, device=self.device)})
            for _ in range(max(1, num_tokens // self._count))
        ]

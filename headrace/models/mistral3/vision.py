"""Pixtral's vision encoder and Mistral 3's projector, before which a product merges blocks of patches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.base.media import MediaPlace
from headrace.layers.build import Build
from headrace.layers.decoder.multimodal import Tower
from headrace.layers.linear import Linear
from headrace.layers.media import EncoderInput, InPieces
from headrace.layers.norm import RmsNorm
from headrace.layers.vision import Projector, SizedImageEncoder, crop_to_grid

if TYPE_CHECKING:
    from headrace.models.mistral3.family import MergedVisionSpec


class MergedTower(Tower):
    """See `Tower`; ``grid`` of an item is its image's height and width in pixels, which the array may exceed."""

    def __init__(self, spec: MergedVisionSpec, hidden_size: int, build: Build):
        super().__init__()
        self.spec, self.device, self.dtype = spec, build.device, build.dtype
        size = spec.image.vision.hidden_size
        self.sized, self.num_layers = SizedImageEncoder(spec.image, build), spec.image.vision.num_layers
        self.norm = RmsNorm(build, size, spec.norm_eps)
        self.merger = Linear(build, size * spec.merge**2, size)
        self.projector = Projector(size, hidden_size, build, activation=spec.activation, bias=spec.projector_bias)

    def encode(self, items: list[EncoderInput]) -> InPieces[list[torch.Tensor]]:
        """See `Tower`."""
        x, grids = yield from self.sized.encode([
            crop_to_grid(item.pixels(self.dtype), item.place) for item in items
        ])
        sizes = [rows * columns for rows, columns in grids]
        parts = [self._merge(part, *grid) for part, grid in zip(self.norm(x).split(sizes), grids, strict=True)]
        found = self.projector(self.merger(torch.cat(parts)))
        return list(found.split([len(part) for part in parts]))

    def _merge(self, x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Patches of one image as rows of blocks, the elements of a channel together."""
        merge = self.spec.merge
        x = x.unflatten(0, (rows, columns))[: rows // merge * merge, : columns // merge * merge]
        x = x.unflatten(1, (-1, merge)).unflatten(0, (-1, merge))  # [rows / m, m, columns / m, m, D]
        return x.permute(0, 2, 4, 1, 3).reshape(-1, x.shape[-1] * merge**2)

    def example(self, num_tokens: int) -> list[EncoderInput]:
        """See `Tower`."""
        side = max(1, int(np.sqrt(num_tokens))) * self.spec.merge * self.spec.image.patch_size
        place = MediaPlace("image", b"", [(0, num_tokens)], (side, side))
        return [EncoderInput(place, {"pixel_values": torch.zeros(1, 3, side, side, device=self.device)})]

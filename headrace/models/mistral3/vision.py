"""Pixtral's vision encoder and Mistral 3's projector: images of any size, rotary positions of rows and columns, blocks
of patches merged by a product; arXiv:2410.07073, section 2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.base.media import MediaPlace
from headrace.layers.build import Build
from headrace.layers.decoder.multimodal import Tower
from headrace.layers.linear import Linear
from headrace.layers.media import EncoderInput, upload
from headrace.layers.mlp import ACTIVATIONS
from headrace.layers.model import number_layers
from headrace.layers.norm import RmsNorm, make_norm
from headrace.layers.residual import Residual
from headrace.layers.vision import VisionBlock, cut_patches, make_spans, place_patches

if TYPE_CHECKING:
    from headrace.models.mistral3.family import MergedVisionSpec


class MergedTower(Tower):
    """See `Tower`; ``grid`` of an item is its image's height and width in pixels, which the array may exceed."""

    def __init__(self, spec: MergedVisionSpec, hidden_size: int, build: Build):
        super().__init__()
        self.spec, self.device, self.dtype = spec, build.device, build.dtype
        vision, size = spec.vision, spec.vision.hidden_size
        self.patches = Linear(build, vision.input_size, size, bias=False)
        self.first_norm = make_norm(vision.norm, size, build)
        self.blocks = number_layers([VisionBlock(vision, build) for _ in range(vision.num_layers)], 0)
        self.norm = RmsNorm(build, size, spec.norm_eps)
        self.merger = Linear(build, size * spec.merge**2, size)
        self.up = Linear(build, size, hidden_size, bias=spec.projector_bias)
        self.down = Linear(build, hidden_size, hidden_size, bias=spec.projector_bias)
        self._activate = ACTIVATIONS[spec.activation]

    def encode(self, items: list[EncoderInput]) -> list[torch.Tensor]:
        """See `Tower`."""
        spec = self.spec
        grids = [(1, *(size // spec.patch_size for size in item.place.grid)) for item in items]
        places = upload(place_patches(grids, 1), self.device)
        counts = [rows * columns for _, rows, columns in grids]
        x = self.first_norm(self.patches(torch.cat([self._cut(item) for item in items])))
        cos_sin, spans = self._rotate(places), make_spans(counts, self.device)
        residual = Residual(x)
        for block in self.blocks:
            block(residual, spans, cos_sin)
        x = residual.add_pending()
        parts = [
            self._merge(part, rows, columns)
            for part, (_, rows, columns) in zip(self.norm(x).split(counts), grids, strict=True)
        ]
        found = self.down(self._activate(self.up(self.merger(torch.cat(parts)))))
        return list(found.split([len(part) for part in parts]))

    def _cut(self, item: EncoderInput) -> torch.Tensor:
        height, width = item.place.grid
        return cut_patches(item.pixels()[:, :, :height, :width].to(self.dtype), self.spec.patch_size)

    def _rotate(self, places: torch.Tensor) -> torch.Tensor:
        """[N, E]: rows turn by the even frequencies of the head, columns by the odd ones."""
        dim = self.spec.vision.head_dim
        steps = torch.arange(0, dim, 2, dtype=torch.float32, device=self.device) / dim
        frequencies = self.spec.theta**-steps
        rows, columns = places.float()
        angles = torch.cat((rows[:, None] * frequencies[0::2], columns[:, None] * frequencies[1::2]), dim=-1)
        return torch.cat((angles.cos(), angles.sin()), dim=-1)

    def _merge(self, x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Patches of one image as rows of blocks, the elements of a channel together."""
        merge = self.spec.merge
        x = x.unflatten(0, (rows, columns))[: rows // merge * merge, : columns // merge * merge]
        x = x.unflatten(1, (-1, merge)).unflatten(0, (-1, merge))  # [rows / m, m, columns / m, m, D]
        return x.permute(0, 2, 4, 1, 3).reshape(-1, x.shape[-1] * merge**2)

    def example(self, num_tokens: int) -> list[EncoderInput]:
        """See `Tower`."""
        side = max(1, int(np.sqrt(num_tokens))) * self.spec.merge * self.spec.patch_size
        place = MediaPlace("image", b"", [(0, num_tokens)], (side, side))
        return [EncoderInput(place, {"pixel_values": torch.zeros(1, 3, side, side, device=self.device)})]

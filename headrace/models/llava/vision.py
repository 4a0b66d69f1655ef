"""LLaVA's vision part: patches through two products, arXiv:2310.03744; tiles of large images, arXiv:2408.03326."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from headrace.base.media import MediaPlace
from headrace.layers.build import Build
from headrace.layers.decoder.multimodal import Tower
from headrace.layers.media import EncoderInput, InPieces
from headrace.layers.media_spec import ImageSpec, SizedImageSpec
from headrace.layers.vision import ImageEncoder, Projector, SizedImageEncoder, crop_to_grid

if TYPE_CHECKING:
    from headrace.models.llava.family import ProjectedImageSpec


class ProjectedTower(Tower):
    """See `Tower`; an item is one image, whole or whole and in tiles."""

    def __init__(self, spec: ProjectedImageSpec, hidden_size: int, build: Build):
        super().__init__()
        assert isinstance(spec.image, ImageSpec)
        self.spec, self.device, self.dtype = spec, build.device, build.dtype
        self.image = ImageEncoder(spec.image, build)
        self.num_layers = len(list(self.image.blocks)[: spec.last_layer])
        self.projector = Projector(
            spec.image.vision.hidden_size, hidden_size, build, activation=spec.activation, bias=spec.projector_bias
        )
        self.newline = build.parameter(hidden_size) if spec.tiles is not None else None

    def encode(self, items: list[EncoderInput]) -> InPieces[list[torch.Tensor]]:
        """See `Tower`."""
        pixels = [item.pixels(self.dtype) for item in items]
        counts, places = [len(each) for each in pixels], [item.place for item in items]
        pieces = self.image.encode(torch.cat(pixels), self.spec.last_layer)
        del items, pixels
        x = yield from pieces
        found = self.projector(x.flatten(0, 1)).unflatten(0, (len(x), -1))
        parts = found.split(counts)
        if self.newline is None:
            return [part.flatten(0, 1) for part in parts]
        return [self._put_together(part, place) for part, place in zip(parts, places, strict=True)]

    def _put_together(self, tiles: torch.Tensor, place: MediaPlace) -> torch.Tensor:
        """Vectors of tiles [n, side^2, D]: those of the whole image, then rows of the large one without its padding,
        each with the newline's vector behind it."""
        assert self.spec.tiles is not None and self.newline is not None
        if len(tiles) == 1:
            return torch.cat((tiles[0], self.newline[None]))
        grid, side = self.spec.tiles.find_grid(*place.grid), self.spec.tiles.features
        (high, wide), (top, left) = grid.features, grid.padding
        x = tiles[1:].unflatten(0, grid.tiles).unflatten(2, (side, side))  # [rows, columns, side, side, D]
        x = x.permute(4, 0, 2, 1, 3).reshape(-1, high, wide)[:, top : high - top, left : wide - left]
        if grid.resized != tuple(x.shape[1:]):
            x = F.interpolate(x[None], grid.resized, mode="bilinear")[0]
        x = torch.cat((x, self.newline[:, None, None].expand(-1, x.shape[1], 1)), dim=-1)
        return torch.cat((tiles[0], x.flatten(1).T))

    def example(self, num_tokens: int) -> list[EncoderInput]:
        """See `Tower`."""
        assert isinstance(self.spec.image, ImageSpec)
        count, size = self.spec.image.side**2, self.spec.image.image_size
        place = MediaPlace("image", b"", [(0, count + (self.newline is not None))])
        return [
            EncoderInput(place, {"pixel_values": torch.zeros(1, 3, size, size, device=self.device)})
            for _ in range(max(1, num_tokens // count))
        ]


class SizedTower(Tower):
    """See `Tower`; images of any size, by Pixtral's encoder."""

    def __init__(self, spec: ProjectedImageSpec, hidden_size: int, build: Build):
        super().__init__()
        assert isinstance(spec.image, SizedImageSpec)
        self.device, self.dtype, self._patch_size = build.device, build.dtype, spec.image.patch_size
        self.sized, self.num_layers = SizedImageEncoder(spec.image, build), spec.image.vision.num_layers
        self.projector = Projector(
            spec.image.vision.hidden_size, hidden_size, build, activation=spec.activation, bias=spec.projector_bias
        )

    def encode(self, items: list[EncoderInput]) -> InPieces[list[torch.Tensor]]:
        """See `Tower`."""
        x, grids = yield from self.sized.encode([
            crop_to_grid(item.pixels(self.dtype), item.place) for item in items
        ])
        return list(self.projector(x).split([rows * columns for rows, columns in grids]))

    def example(self, num_tokens: int) -> list[EncoderInput]:
        """See `Tower`."""
        side = max(1, int(num_tokens**0.5)) * self._patch_size
        place = MediaPlace("image", b"", [(0, num_tokens)], (side, side))
        return [EncoderInput(place, {"pixel_values": torch.zeros(1, 3, side, side, device=self.device)})]

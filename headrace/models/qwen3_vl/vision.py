"""Qwen3-VL's vision encoder: learned positions, resampled to an image's grid, and outputs of some layers that are added
behind the decoder's first ones (DeepStack, arXiv:2406.04334). N patches, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.base.media import MediaPlace
from headrace.layers.build import Build
from headrace.layers.decoder.multimodal import Tower
from headrace.layers.linear import Linear
from headrace.layers.media import EncoderInput, InPieces
from headrace.layers.model import number_layers
from headrace.layers.residual import Residual
from headrace.layers.vision import PatchMerger, VisionBlock, make_spans, place_patches, rotate_by_places
from headrace.memory.copies import to_device

if TYPE_CHECKING:
    from headrace.models.qwen3_vl.family import DeepstackVisionSpec

THETA = 10000.0


class DeepstackTower(Tower):
    """See `Tower`."""

    def __init__(self, spec: DeepstackVisionSpec, hidden_size: int, build: Build):
        super().__init__()
        self.spec, self.device, self.dtype = spec, build.device, build.dtype
        vision, self.num_layers = spec.vision, spec.vision.num_layers
        self.patches = Linear(build, vision.input_size, vision.hidden_size, bias=True)
        self.positions = build.parameter(spec.side**2, vision.hidden_size)
        self.blocks = number_layers([VisionBlock(vision, build) for _ in range(vision.num_layers)], 0)
        self.merger = PatchMerger(vision, spec.merge, hidden_size, build)
        self.taps = number_layers(
            [PatchMerger(vision, spec.merge, hidden_size, build, norms_merged=True) for _ in spec.tapped_layers], 0
        )

    def encode(self, items: list[EncoderInput]) -> InPieces[list[torch.Tensor]]:
        """See `Tower`."""
        spec, grids = self.spec, [item.place.grid for item in items]
        counts = [item.place.num_tokens for item in items]
        places = place_patches(grids, spec.merge)
        cos_sin = rotate_by_places(to_device(places, self.device), spec.vision.head_dim, THETA)
        frames = make_spans([height * width for time, height, width in grids for _ in range(time)], self.device)
        x = self.patches(torch.cat([item.pixels(self.dtype) for item in items]))
        x += self._resample(places, grids)
        residual, parts = Residual(x), []
        del items, x
        for i, block in enumerate(self.blocks):
            block(residual, frames, cos_sin)
            if i in spec.tapped_layers:
                parts.append(self.taps[spec.tapped_layers.index(i)](residual.add_pending()))
            yield
        merged = torch.cat([self.merger(residual.add_pending()), *parts], dim=-1)
        return list(merged.split(counts))

    def _resample(self, places: np.ndarray, grids: list[tuple[int, ...]]) -> torch.Tensor:
        """Learned positions [N, D], interpolated between the four nearest of the square grid, whose corners are those
        of the image."""
        side = self.spec.side
        counts = [time * height * width for time, height, width in grids]
        corners = []
        for axis, sizes in enumerate(([g[1] for g in grids], [g[2] for g in grids])):
            longest = np.repeat(np.array(sizes), counts)
            at = (places[axis] * (side - 1)).astype(np.float32) / np.maximum(longest - 1, 1).astype(np.float32)
            low = np.minimum(at.astype(np.int64), side - 1)
            share = at - low
            corners.append(((low, 1 - share), (np.minimum(low + 1, side - 1), share)))
        found = None
        for row, row_share in corners[0]:
            for column, column_share in corners[1]:
                weight = to_device((row_share * column_share).astype(np.float32), self.device)
                part = self.positions.index_select(0, to_device(row * side + column, self.device)) * weight[:, None]
                found = part if found is None else found + part
        assert found is not None
        return found.to(self.dtype)

    def example(self, num_tokens: int) -> list[EncoderInput]:
        """See `Tower`."""
        side = max(1, int(num_tokens**0.5)) * self.spec.merge
        place = MediaPlace("image", b"", [(0, (side // self.spec.merge) ** 2)], (1, side, side))
        pixels = torch.zeros(side * side, self.spec.vision.input_size, device=self.device)
        return [EncoderInput(place, {"pixel_values": pixels})]

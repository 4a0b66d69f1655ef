"""Qwen2.5-VL's vision encoder: windowed attention in all but a few layers; arXiv:2502.13923, section 2.1.1.

N patches, D hidden size, O hidden size of the decoder.
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
    from headrace.models.qwen2_5_vl.family import WindowedVisionSpec

THETA = 10000.0


class WindowedTower(Tower):
    """See `Tower`."""

    def __init__(self, spec: WindowedVisionSpec, hidden_size: int, build: Build):
        super().__init__()
        self.spec, self.device, self.dtype = spec, build.device, build.dtype
        vision, self.num_layers = spec.vision, spec.vision.num_layers
        self.patches = Linear(build, vision.input_size, vision.hidden_size, bias=vision.patch_bias)
        self.blocks = number_layers([VisionBlock(vision, build) for _ in range(vision.num_layers)], 0)
        self.merger = PatchMerger(vision, spec.merge, hidden_size, build)

    def encode(self, items: list[EncoderInput]) -> InPieces[list[torch.Tensor]]:
        """See `Tower`."""
        spec, grids = self.spec, [item.place.grid for item in items]
        counts = [item.place.num_tokens for item in items]
        unit = spec.merge**2
        order, lengths = order_windows(grids, spec.merge, spec.window)
        patch_order = (order[:, None] * unit + np.arange(unit)).ravel()
        places = to_device(place_patches(grids, spec.merge)[:, patch_order], self.device)
        cos_sin = rotate_by_places(places, spec.vision.head_dim, THETA)
        windows = make_spans([length * unit for length in lengths], self.device)
        frames = make_spans([height * width for time, height, width in grids for _ in range(time)], self.device)
        pixels = torch.cat([item.pixels(self.dtype) for item in items])
        x = self.patches(pixels.index_select(0, to_device(patch_order, self.device)))
        residual = Residual(x)
        del items, pixels, x
        for i, block in enumerate(self.blocks):
            block(residual, frames if i in spec.full_layers else windows, cos_sin)
            yield
        merged = self.merger(residual.add_pending()).index_select(0, to_device(np.argsort(order), self.device))
        return list(merged.split(counts))

    def example(self, num_tokens: int) -> list[EncoderInput]:
        """See `Tower`."""
        side = max(1, int(num_tokens**0.5)) * self.spec.merge
        place = MediaPlace("image", b"", [(0, (side // self.spec.merge) ** 2)], (1, side, side))
        pixels = torch.zeros(side * side, self.spec.vision.input_size, device=self.device)
        return [EncoderInput(place, {"pixel_values": pixels})]


def order_windows(grids: list[tuple[int, ...]], merge: int, window: int) -> tuple[np.ndarray, list[int]]:
    """Merged patches, by number, in the order of windows; and how many each window has. Windows of a frame are
    consecutive and those of one size follow each other, so that they are computed together."""
    orders, lengths, start = [], [], 0
    for time, height, width in grids:
        rows, columns = height // merge, width // merge
        numbers = np.arange(rows * columns).reshape(rows, columns)
        parts = [
            numbers[top : top + window, left : left + window].ravel()
            for top in range(0, rows, window) for left in range(0, columns, window)
        ]
        parts.sort(key=len, reverse=True)
        for _ in range(time):
            orders += [part + start for part in parts]
            lengths += [len(part) for part in parts]
            start += rows * columns
    return np.concatenate(orders), lengths

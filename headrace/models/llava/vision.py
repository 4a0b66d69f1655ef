"""LLaVA's vision part: patches of CLIP or SigLIP through two products; arXiv:2310.03744."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from headrace.base.media import MediaPlace
from headrace.layers.build import Build
from headrace.layers.decoder.multimodal import Tower
from headrace.layers.linear import Linear
from headrace.layers.media import EncoderInput
from headrace.layers.mlp import ACTIVATIONS
from headrace.layers.vision import ImageEncoder

if TYPE_CHECKING:
    from headrace.models.llava.family import ProjectedImageSpec


class Projector(nn.Module):
    """``[N, D] -> [N, O]``."""

    def __init__(self, spec: ProjectedImageSpec, hidden_size: int, build: Build):
        super().__init__()
        self.up = Linear(build, spec.image.vision.hidden_size, hidden_size, bias=spec.projector_bias)
        self.down = Linear(build, hidden_size, hidden_size, bias=spec.projector_bias)
        self._activate = ACTIVATIONS[spec.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._activate(self.up(x)))


class ProjectedTower(Tower):
    """See `Tower`; an item is one image."""

    def __init__(self, spec: ProjectedImageSpec, hidden_size: int, build: Build):
        super().__init__()
        self.spec, self.device, self.dtype = spec, build.device, build.dtype
        self.image = ImageEncoder(spec.image, build)
        self.projector = Projector(spec, hidden_size, build)

    def encode(self, items: list[EncoderInput]) -> list[torch.Tensor]:
        """See `Tower`."""
        pixels = [item.pixels().to(self.dtype) for item in items]
        x = self.image(torch.cat(pixels), self.spec.last_layer)
        found = self.projector(x.flatten(0, 1))
        return list(found.split([len(each) * x.shape[1] for each in pixels]))

    def example(self, num_tokens: int) -> list[EncoderInput]:
        """See `Tower`."""
        count, size = self.spec.image.side**2, self.spec.image.image_size
        place = MediaPlace("image", b"", [(0, count)])
        return [
            EncoderInput(place, {"pixel_values": torch.zeros(1, 3, size, size, device=self.device)})
            for _ in range(max(1, num_tokens // count))
        ]

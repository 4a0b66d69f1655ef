"""Phi-4-multimodal's encoders beside each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.base.media import MediaPlace
from headrace.layers.build import Build
from headrace.layers.decoder.multimodal import Tower
from headrace.layers.media import EncoderInput, InPieces
from headrace.layers.vision import Projector
from headrace.models.phi4_multimodal.audio import STRIDE, Conformer
from headrace.models.phi4_multimodal.vision import CropsEncoder

if TYPE_CHECKING:
    from headrace.models.phi4_multimodal.family import SightAndSoundSpec


class SightAndSoundTower(Tower):
    """See `Tower`; a piece is a layer of both encoders."""

    def __init__(self, spec: SightAndSoundSpec, hidden_size: int, build: Build):
        super().__init__()
        self.spec, self.device, self.dtype = spec, build.device, build.dtype
        self.crops = CropsEncoder(spec.crops, hidden_size, build)
        self.audio = Conformer(spec.audio, build)
        self.alone, self.beside_images = (
            Projector(spec.audio.hidden_size, hidden_size, build, activation="gelu") for _ in range(2)
        )
        self.num_layers = max(self.crops.num_layers, spec.audio.num_layers)

    def encode(self, items: list[EncoderInput]) -> InPieces[list[torch.Tensor]]:
        """See `Tower`."""
        images, clips = ([i for i, item in enumerate(items) if item.place.kind == kind] for kind in ("image", "audio"))
        seen, heard = yield from _run_both(
            self.crops.encode([items[i] for i in images], self.dtype),
            self.audio.encode([items[i] for i in clips], self.dtype),
        )
        found = dict(zip(images, seen, strict=True))
        for i, positions in zip(clips, heard, strict=True):
            projector = self.beside_images if items[i].place.is_beside_other else self.alone
            found[i] = projector(positions)
        return [found[i] for i in range(len(items))]

    def example(self, num_tokens: int) -> list[EncoderInput]:
        """See `Tower`."""
        crops = self.spec.crops
        half, side = crops.crop_side // 2, crops.crop_side * crops.patch_size
        down = max(1, (num_tokens - half * (half + 1)) // (half * (half + 1)))
        count = half * (half + 1) * (down + 1) + 1
        place = MediaPlace("image", b"", [(0, count)], (down * crops.crop_side, crops.crop_side, down, 1))
        pixels = torch.zeros(1 + down, crops.vision.input_size // crops.patch_size**2, side, side, device=self.device)
        clip = MediaPlace("audio", b"", [(0, num_tokens)], (num_tokens * STRIDE,))
        frames = torch.zeros(1, num_tokens * STRIDE, self.spec.audio.num_mels, device=self.device)
        return [EncoderInput(place, {"pixel_values": pixels}), EncoderInput(clip, {"input_features": frames})]


def _run_both(
    first: InPieces[list[torch.Tensor]], second: InPieces[list[torch.Tensor]]
) -> InPieces[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Two computations side by side, as many pieces as the longer one has."""
    found: dict[int, list[torch.Tensor]] = {}
    while True:
        for i, run in enumerate((first, second)):
            if i not in found:
                try:
                    next(run)
                except StopIteration as end:
                    found[i] = end.value
        if len(found) == 2:
            return found[0], found[1]
        yield

"""Qwen2-Audio's audio part: Whisper's encoder over the clip alone, pairs averaged, a projection."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from headrace.base.media import MediaPlace
from headrace.layers.audio import AudioEncoder, adapt_tensors
from headrace.layers.build import Build
from headrace.layers.decoder.multimodal import Tower
from headrace.layers.linear import Linear
from headrace.layers.media import EncoderInput, InPieces

if TYPE_CHECKING:
    from headrace.models.qwen2_audio.family import PooledAudioSpec

PREFIXES = ("audio_tower.", "model.audio_tower.")


class PooledAudioTower(Tower):
    """See `Tower`; an item is one clip."""

    def __init__(self, spec: PooledAudioSpec, hidden_size: int, build: Build):
        super().__init__()
        self.spec, self.device, self.dtype = spec, build.device, build.dtype
        self.audio, self.num_layers = AudioEncoder(spec.audio, build), spec.audio.blocks.num_layers
        self.projector = Linear(build, spec.audio.blocks.hidden_size, hidden_size, bias=True)

    def encode(self, items: list[EncoderInput]) -> InPieces[list[torch.Tensor]]:
        """See `Tower`."""
        frames = torch.cat([item.pixels(self.dtype) for item in items]).transpose(1, 2)
        lengths = [(item.place.grid[0] + 1) // 2 for item in items]
        x = yield from self.audio.encode(frames, lengths)
        # positions in pairs; of an odd number the last one has no vector
        pairs = [own[: len(own) // 2 * 2].unflatten(0, (-1, 2)) for own in x.split(lengths)]
        found = self.projector(self.audio.norm(torch.cat(pairs).float().mean(1).to(self.dtype)))
        return list(found.split([len(own) for own in pairs]))

    def example(self, num_tokens: int) -> list[EncoderInput]:
        """See `Tower`."""
        audio = self.spec.audio
        most = audio.num_positions // 2
        place = MediaPlace("audio", b"", [(0, most)], (audio.num_frames,))
        features = torch.zeros(1, audio.num_mels, audio.num_frames, device=self.device)
        return [EncoderInput(place, {"input_features": features}) for _ in range(max(1, num_tokens // most))]

    def adapt(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """See `Tower`."""
        return adapt_tensors(tensors, prefix=PREFIXES)

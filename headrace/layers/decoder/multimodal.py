"""`MultimodalDecoder`: a decoder whose placeholders take the output of an encoder. T tokens, D hidden size, N
placeholders.

What is special to an encoder is in the class that ``EncoderKind.tower`` names. Every rank has the whole encoder, those
of later pipeline stages too: parts of its output may be added behind their layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from headrace.base.media import MediaPlace
from headrace.base.registry import load_target
from headrace.layers.batch import ForwardBatch
from headrace.layers.build import Build
from headrace.layers.decoder.decoder import HARMLESS, Decoder
from headrace.layers.loading import Targets, find_targets
from headrace.layers.media import CapturedVectors, EncoderInput, InPieces, MediaModel, grid_positions
from headrace.layers.media_spec import MultimodalSpec
from headrace.layers.names import CheckpointNames
from headrace.layers.residual import Residual
from headrace.layers.rotary import RotaryTable
from headrace.layers.vision import fit_dims, pad_weights
from headrace.parallel.group import Group


class Tower(nn.Module):
    """An encoder, built as ``Class(spec, hidden_size, build)``; ``hidden_size`` is the decoder's. `encode` yields
    behind each of ``num_layers`` layers."""

    num_layers: int

    def encode(self, items: list[EncoderInput]) -> InPieces[list[torch.Tensor]]:
        """Vectors [N, parts * D] of each item."""
        raise NotImplementedError

    def example(self, num_tokens: int) -> list[EncoderInput]:
        """Items of about so many placeholders."""
        raise NotImplementedError

    def adapt(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """A checkpoint's tensors, those of the encoder in the form of its parameters."""
        return tensors


class OneTower(MediaModel):
    """A model with one encoder."""

    def __init__(self, tower: Tower, spec: MultimodalSpec, rope_length: int, dtype: torch.dtype):
        self._tower, self._spec, self.rope_length = tower, spec, rope_length
        self.num_pieces = tower.num_layers + 1
        self.is_whole = spec.is_whole
        if not spec.is_whole:  # their attention reads from the host which tokens see each other
            self.captured = CapturedVectors(spec.hidden_size * spec.encoder.num_parts, dtype)

    def encode(self, items: list[EncoderInput]) -> InPieces[list[torch.Tensor]]:
        """See `MediaModel`."""
        return self._tower.encode(items)

    def example(self, num_tokens: int) -> list[EncoderInput]:
        """See `MediaModel`."""
        return self._tower.example(num_tokens)

    def find_positions(self, num_tokens: int, places: Sequence[MediaPlace]) -> np.ndarray:
        """See `MediaModel`."""
        return grid_positions(num_tokens, places, self._spec.merge, self._spec.tokens_per_second)


class MultimodalDecoder(Decoder):
    """See `ServedModel`."""

    def __init__(self, spec: MultimodalSpec, names: CheckpointNames, build: Build):
        super().__init__(spec, names, build)
        self.spec: MultimodalSpec = spec
        self.encoder: Tower = load_target(spec.encoder.tower)(
            # no adapters: the rows that have some are tokens of the decoder
            spec.encoder, spec.hidden_size, replace(build, tensor=Group(), adapters=None)
        )
        tables = {id(found): found for found in self.modules() if isinstance(found, RotaryTable)}
        self._axial = next((table for table in tables.values() if len(table.axes)), None)
        if self._axial is not None:
            assert len(tables) == 1, "layers of a model with several axes of positions rotate alike"
        rope_length = 0 if self._axial is None else self._axial.cos_sin.shape[0]
        self.media = OneTower(self.encoder, spec, rope_length, build.dtype)

    def _fit_tensors(
        self, tensors: Iterable[tuple[str, torch.Tensor]], targets: Targets
    ) -> Iterable[tuple[str, torch.Tensor]]:
        return pad_weights(fit_dims(self.encoder.adapt(tensors), targets), targets, self.encoder)

    def _find_targets(self) -> tuple[Targets, tuple[str, ...]]:
        modules, harmless = self.names.modules, HARMLESS
        if self.spec.vocabulary.tied or self.head is None:
            harmless = (*harmless, *(f"{theirs}.weight" for theirs, ours in modules.items() if ours == "head"))
            modules = {theirs: ours for theirs, ours in modules.items() if ours != "head"}
        return find_targets(self, modules), harmless

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """See `ServedModel`."""
        positions = batch.rope_positions
        if positions is not None and positions.dim() == 2 and self._axial is not None:
            numbers = torch.arange(positions.shape[1], device=positions.device)
            batch = replace(batch, rope_positions=numbers, rotations=self._axial.combine(positions))
        return super().forward(batch)

    def _enter(self, batch: ForwardBatch) -> torch.Tensor:
        x = super()._enter(batch)
        return x if batch.media is None or not self.stage.is_first else batch.media.replace_embeddings(x)

    def _after_layer(self, i: int, residual: Residual, batch: ForwardBatch) -> None:
        # DeepStack, arXiv:2406.04334: part i + 1 of the vectors is added behind layer i
        if batch.media is not None and i + 1 < self.spec.encoder.num_parts:
            batch.media.add_part(i + 1, residual.add_pending())

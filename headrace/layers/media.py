"""What encoders take, and the positions of tokens among media. Not here: encoders (``vision.py`` and families)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from headrace.base.media import ARRAYS, LEVELS, MediaPlace

T = TypeVar("T")
InPieces = Generator[None, None, T]
"""A computation that yields between its pieces and returns its result. Between them other steps are computed, and its
tensors stay: what is not needed any more should be deleted."""


def finish(pieces: InPieces[T]) -> T:
    """Compute all that is left."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            found: T = end.value
            return found


@dataclass(frozen=True)
class EncoderInput:
    """An item on the device: its ``arrays`` by the processor's names."""

    place: MediaPlace
    arrays: dict[str, torch.Tensor]

    def pixels(self, dtype: torch.dtype) -> torch.Tensor:
        """The pixels of an image or a video, the frames of a clip; looked up where they are bytes."""
        values, levels = self.arrays[ARRAYS[self.place.kind]], self.arrays.get(LEVELS)
        if levels is None:
            return values.to(dtype)
        channels, size = levels.shape
        tables = torch.arange(0, channels * size, size, dtype=torch.int32, device=values.device)
        indices = values.reshape(len(values), channels, -1) + tables[:, None]
        return levels.to(dtype).view(-1).index_select(0, indices.view(-1)).view(values.shape)


@dataclass(frozen=True)
class CapturedVectors:
    """What captured steps hold for each token: a vector of ``size`` elements of ``dtype``."""

    size: int
    dtype: torch.dtype


class MediaModel(ABC):
    """The encoders of a model. ``rope_length``: above 0, `find_positions` says what tokens of requests with media are
    rotated by, numbers below it. ``is_whole``: placeholders of an item attend to one another in both directions.
    ``num_pieces``: of `encode`, which yields one time less. ``captured``: for models whose steps with placeholders may
    be captured as CUDA graphs."""

    rope_length: int = 0
    is_whole: bool = False
    num_pieces: int = 1
    captured: CapturedVectors | None = None

    @abstractmethod
    def encode(self, items: list[EncoderInput]) -> InPieces[list[torch.Tensor]]:
        """The output of each item [N, W], for `headrace.layers.batch.MediaVectors`; N is its number of placeholders."""

    @abstractmethod
    def example(self, num_tokens: int) -> list[EncoderInput]:
        """Media of about so many placeholders, to measure what encoding takes."""

    @abstractmethod
    def find_positions(self, num_tokens: int, places: Sequence[MediaPlace]) -> np.ndarray:
        """Positions [3, num_tokens] int64 in time, height and width of a prompt with media."""


def grid_positions(num_tokens: int, places: Sequence[MediaPlace], merge: int, tokens_per_second: float) -> np.ndarray:
    """Positions [3, num_tokens] in time, height and width. Text counts on all three axes. The placeholders of a run
    have the coordinates of their ``merge`` x ``merge`` patches from the next number on, and text goes on behind the
    longer side. ``tokens_per_second``: how far apart moments of a video are, where the item says how many seconds lie
    between them; else consecutive. Qwen2-VL, arXiv:2409.12191, section 2.1."""
    found = np.empty((3, num_tokens), dtype=np.int64)
    at = position = 0

    def add_text(end: int) -> None:
        nonlocal at, position
        found[:, at:end] = np.arange(position, position + end - at)
        position, at = position + end - at, end

    for place in places:
        _, height, width = place.grid
        height, width = height // merge, width // merge
        interval = tokens_per_second * place.numbers.get("second_per_grid_ts", 1.0) if place.kind == "video" else 1.0
        for offset, count in place.runs:
            add_text(offset)
            moments = np.arange(count // (height * width))
            axes = np.meshgrid(
                (moments * np.float32(interval)).astype(np.int64), np.arange(height), np.arange(width), indexing="ij"
            )
            found[:, offset : offset + count] = np.stack([axis.ravel() for axis in axes]) + position
            position, at = position + max(height, width), offset + count
    add_text(num_tokens)
    return found

"""`Layout`: which ranks compute what together; `Stage`: the layers of a rank, and how layers are divided. Torch-free.

Rank 0 is in the last pipeline stage, as it samples. The ranks of a stage are neighbours, and so are their devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise

from headrace.base.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """The place of ``rank`` among ``pipeline`` stages of ``tensor`` ranks each."""

    rank: int = 0
    tensor: int = 1
    pipeline: int = 1

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline

    @property
    def stage(self) -> int:
        """The number of this rank's stage, 0 for that of the first layers."""
        return self.pipeline - 1 - self.rank // self.tensor

    @property
    def tensor_rank(self) -> int:
        """This rank's number among those of its stage."""
        return self.rank % self.tensor

    @property
    def previous(self) -> int | None:
        """The rank of the same number in the stage before; None in the first stage."""
        return self.rank + self.tensor if self.stage else None

    @property
    def next(self) -> int | None:
        """The rank of the same number in the stage behind; None in the last stage."""
        return self.rank - self.tensor if self.rank >= self.tensor else None

    def tensor_ranks(self, stage: int | None = None) -> list[int]:
        """The ranks of a stage, by default of this rank's."""
        first = (self.pipeline - 1 - (self.stage if stage is None else stage)) * self.tensor
        return list(range(first, first + self.tensor))


@dataclass(frozen=True)
class Stage:
    """Layers ``[start, stop)`` of a model; ``stop`` is None in the last stage. By default all."""

    start: int = 0
    stop: int | None = None

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.start == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the final norm and the head."""
        return self.stop is None

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the model is elsewhere."""
        return self.is_first and self.is_last

    def layers(self, count: int) -> range:
        """Its layers of a model of ``count``."""
        return range(self.start, count if self.stop is None else self.stop)


def divide_layers(
    weights: Sequence[int], head: int, stages: int, begins: Sequence[int] | None = None
) -> list[int]:
    """How many layers each stage gets, at least one, such that the largest stage is as small as it can be.
    ``weights``: of each layer, ``head``: of what the last stage has besides, ``begins``: the layers that a stage may
    begin with, 0 first; None for all. Raises `ConfigError` with fewer of these than stages."""
    if begins is not None:  # layers that stay together are divided as one
        blocks = list(pairwise([*begins, len(weights)]))
        left, sizes = iter([stop - start for start, stop in blocks]), [sum(weights[i:j]) for i, j in blocks]
        return [sum(islice(left, count)) for count in divide_layers(sizes, head, stages)]
    count = len(weights)
    if count < stages:
        raise ConfigError(
            f"{count} layers cannot be divided among {stages} stages; set pipeline_parallel_size to {count} or less",
            param="pipeline_parallel_size",
        )
    sums = [0, *accumulate(weights)]
    # best[stop]: (the largest part of layers [0, stop) in so many stages, the parts' ends), smallest first
    best: list[tuple[int, tuple[int, ...]] | None] = [(sums[stop], (stop,)) for stop in range(count + 1)]
    for stage in range(1, stages):
        extra = head if stage == stages - 1 else 0
        found: list[tuple[int, tuple[int, ...]] | None] = [None] * (count + 1)
        for stop in range(stage + 1, count + 1):
            choices = []
            for start in range(stage, stop):
                before = best[start]
                assert before is not None
                # of equal ones, that with fewer layers in the last stage, whose process schedules and samples as well
                choices.append((max(before[0], sums[stop] - sums[start] + extra), -start, (*before[1], stop)))
            largest, _, ends = min(choices)
            found[stop] = largest, ends
        best = found
    last = best[count]
    assert last is not None
    return [stop - start for start, stop in zip((0, *last[1]), last[1], strict=False)]


def read_division(text: str, num_layers: int, stages: int) -> list[int]:
    """The layers of each stage as ``pipeline_layers`` states them, such as ``16,16``; raises `ConfigError`."""
    parts = [part.strip() for part in text.split(",")]
    counts = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 6]
    if len(counts) != len(parts) or len(counts) != stages or min(counts) < 1 or sum(counts) != num_layers:
        example = ",".join(map(str, divide_layers([1] * num_layers, 0, stages)))
        raise ConfigError(
            f"pipeline_layers must be {stages} numbers of layers, each at least 1, that add up to {num_layers}, such "
            f"as {example}; got {text!r}", param="pipeline_layers",
        )
    return counts


def stage_of(counts: Sequence[int], stage: int) -> Stage:
    """The stage of that number, where stage i has ``counts[i]`` layers."""
    start = sum(counts[:stage])
    return Stage(start, None if stage == len(counts) - 1 else start + counts[stage])

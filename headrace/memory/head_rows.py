"""`HeadRows`: pages as engines exchange them: head by head, so that one which divides KV heads among other ranks finds
its own. P pages, n of them copied, K kv heads, H of them on this rank.

A row of a pool's pages (`PageCopier`) has its parts one after another, each with H heads in the middle of its dims; an
exchanged row has K heads, and of each head all parts. Both have the same bytes in another order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.base.errors import ConfigError
from headrace.memory.pools import PagePart
from headrace.parallel.share import Share

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class _Run:
    """Consecutive parts of one shape, ``count`` of [before, H, after bytes]: from byte ``begin`` of a pool's row on,
    and from byte ``head_begin`` of an exchanged head."""

    begin: int
    head_begin: int
    count: int
    before: int
    after: int

    @property
    def head_bytes(self) -> int:
        """Of one head in all of these parts."""
        return self.count * self.before * self.after


class HeadRows:
    """Of one cache group. ``share``: of its kv heads, which this rank holds. Raises `ConfigError` for parts whose heads
    cannot be told apart and are divided."""

    def __init__(self, parts: Sequence[PagePart], share: Share):
        if any(part.head_dim is None for part in parts) and share.is_whole:
            share = Share.whole(1)  # heads that cannot be told apart are one
        self.share, self._runs = share, list[_Run]()
        shapes = [_shape_of(part, share) for part in parts]
        begin = head_begin = index = 0
        while index < len(shapes):
            count = next((c for c in range(1, len(shapes) - index) if shapes[index + c] != shapes[index]),
                         len(shapes) - index)
            run = _Run(begin, head_begin, count, *shapes[index])
            self._runs.append(run)
            begin, head_begin, index = begin + run.head_bytes * share.length, head_begin + run.head_bytes, index + count
        self.num_bytes = head_begin * share.size
        self._head_bytes = head_begin
        self._word = math.gcd(8, *(number for run in self._runs for number in (run.after, run.begin, run.head_begin)))

    @property
    def is_plain(self) -> bool:
        """Whether both kinds of rows are the same."""
        return self.share.size == 1

    def to_peers(self, own: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy rows of the pool, [n, own bytes] uint8, into this rank's part of ``rows`` [n, `num_bytes`] uint8."""
        for theirs, ours in self._pairs(rows, own):
            theirs.copy_(ours)

    def from_peers(self, own: torch.Tensor, rows: torch.Tensor) -> None:
        """The reverse of `to_peers`."""
        for theirs, ours in self._pairs(rows, own):
            ours.copy_(theirs)

    def _pairs(self, rows: torch.Tensor, own: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """By run, views [n, H, count, before, after] of both."""
        word = math.gcd(self._word, rows.data_ptr() or 8, own.data_ptr() or 8)
        rows, own = rows.view(WORDS[word]), own.view(WORDS[word])
        start, heads = self.share.start * self._head_bytes // word, self.share.length
        mine = rows[:, start : start + heads * self._head_bytes // word].unflatten(1, (heads, -1))
        pairs = []
        for run in self._runs:
            at, size = run.head_begin // word, run.head_bytes // word
            shape = run.count, run.before, run.after // word
            theirs = mine[:, :, at : at + size].unflatten(2, shape)
            ours = own[:, run.begin // word : run.begin // word + size * heads]
            pairs.append((theirs, ours.unflatten(1, (run.count, run.before, heads, -1)).permute(0, 3, 1, 2, 4)))
        return pairs


def _shape_of(part: PagePart, share: Share) -> tuple[int, int]:
    """Elements before the heads of a page, and bytes behind them."""
    tensor, page = part.tensor, part.tensor.shape[1:]
    if share.size == 1:
        return 1, math.prod(page) * tensor.element_size()
    if part.head_dim is None:
        raise ConfigError(
            f"pages of this model ({part.name}) cannot be divided by heads: serve it with one rank beside a "
            "disaggregation_mode", param="tensor_parallel_size"
        )
    heads = part.head_dim - 1
    assert page[heads] == share.length, f"{part.name} has {page[heads]} heads, the rank {share.length}"
    return math.prod(page[:heads]), math.prod(page[heads + 1 :]) * tensor.element_size()


def count_heads(parts: Sequence[PagePart]) -> int:
    """The kv heads of a pool's parts; 1 where they cannot be told apart."""
    counts = [1 if part.head_dim is None else part.tensor.shape[part.head_dim] for part in parts]
    return min(counts, default=1)

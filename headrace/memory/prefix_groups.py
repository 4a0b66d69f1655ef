"""`PrefixFinder`: which decodes of a step begin with the same pages. On the host, in numpy, from the plans' appends.

Refuses: tensors, and deciding pages. R decodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.base.cache import NULL_PAGE, CacheLayout
from headrace.base.step import PageAppend, RowStart
from headrace.kernels.attention import LEAST_MEMBERS, PREFIX_STEP, count_packed

LEAST_DECODES = 16
"""Fewer decodes are bound by other things than their keys."""
LEAST_KEYS = 256
"""The fewest keys that a group has in common."""
LEAST_PART = 0.5
"""Of the keys of each two neighbours in a group, the part that they have in common at least: with less, hardly less is
read."""
LEAST_SAVED = 1 / 3
"""Of all keys of a step, the part that is not read again at least."""
LAUNCH_KEYS, DECODE_KEYS, REST_KEYS = 8192, 192, 32
"""What it costs, in keys that must be saved: the second launch, each decode that merges what two launches found, and
each key of the longest rest, which one program reads alone while others may have ended. The first two are twice what an
H200 measured beside 8 kv heads, where 1,000 keys of a prefix take 0.53 us of decodes one by one; the third is estimated
from the latency of a tile."""


@dataclass(slots=True)
class GroupedDecodes:
    """Decodes by groups that begin with the same pages. ``order`` [R]: indices of the decodes, so that each group
    stands side by side; None if it does. In that order: ``keys`` [R], how many leading keys each has in common with its
    group, a multiple of `PREFIX_STEP`, 0 without a group; ``groups`` [N, 2], first decode and number of decodes."""

    order: np.ndarray | None
    keys: np.ndarray
    groups: np.ndarray

    def pack(self, size: int) -> np.ndarray:
        """``keys`` and then ``groups``, with room for ``size`` decodes and for the most groups of these."""
        packed = np.zeros(count_packed(size), dtype=np.int64)
        packed[: len(self.keys)] = self.keys
        packed[size : size + self.groups.size] = self.groups.ravel()
        return packed


class PrefixFinder:
    """The page tables of some cache groups on the host, and what they have in common. ``members`` [cache groups]: the
    most decodes of a group, 0 for cache groups whose backend has no use for it."""

    def __init__(self, layout: CacheLayout, members: list[int]):
        self._page_size = layout.page_size
        self._most = min(most for most in members if most)
        assert self._most >= 2 * LEAST_MEMBERS, "or an equal division leaves too few"
        num_entries = -(-layout.max_model_len // layout.page_size) + 1
        # zeros: memory is committed only where a page is noted
        self._tables = {
            group: np.zeros((layout.max_rows, num_entries), dtype=np.int32)
            for group, most in enumerate(members) if most
        }
        self._num_noted = {group: [0] * layout.max_rows for group in self._tables}
        self.has_changed = False
        """Whether entries of a row have been replaced since `find` was called."""

    def note(self, starts: list[RowStart], appends: list[PageAppend]) -> None:
        """Keep what a plan says of page tables; bounds were checked."""
        for start in starts:
            for counts in self._num_noted.values():
                counts[start.row] = 0
        for append in appends:
            table = self._tables.get(append.group)
            if table is not None:
                counts, stop = self._num_noted[append.group], append.start + len(append.pages)
                table[append.row, append.start : stop] = append.pages
                self.has_changed = self.has_changed or append.start < counts[append.row]
                counts[append.row] = max(counts[append.row], stop)

    def find(self, rows: np.ndarray, ends: np.ndarray, *, sorts: bool) -> GroupedDecodes | None:
        """Groups of the decodes of ``rows`` [R], each of one token, with ``ends`` [R] keys after the step at most; None
        where they save too little. ``sorts``: the decodes may be put in another order, else only neighbours are
        found."""
        self.has_changed = False
        if len(rows) < LEAST_DECODES:
            return None
        num_full = (ends - 1) // self._page_size  # what decodes share are full pages
        least = -(-LEAST_KEYS // self._page_size)
        tables = list(self._tables.values())
        probe = np.where(num_full >= least, tables[0][rows, least - 1], NULL_PAGE)
        if not _has_repeated(probe):
            return None
        order = None
        if sorts:
            order = self._sort(tables[0], rows, num_full, least)
            rows, ends, num_full = rows[order], ends[order], num_full[order]
        common = self._count_common(tables, rows, num_full)  # [R - 1], pages of a decode and the one before it
        keys = common * self._page_size // PREFIX_STEP * PREFIX_STEP
        enough = np.maximum(LEAST_KEYS, LEAST_PART * np.maximum(ends[1:], ends[:-1]))
        firsts = self._divide(keys >= enough)
        counts = np.diff(firsts, append=len(rows))
        # the least of a group's pairs; its first decode stands for itself
        keys = np.concatenate((num_full[:1] * self._page_size, keys))
        keys[firsts] = num_full[firsts] * self._page_size
        least_keys = np.where(counts >= LEAST_MEMBERS, np.minimum.reduceat(keys, firsts), 0)
        keys = np.repeat(least_keys, counts)
        saved, rests = int((least_keys * (counts - 1)).sum()), ends - keys
        costs = LAUNCH_KEYS + DECODE_KEYS * len(rows) + max(0, REST_KEYS * int(rests.max()) - int(rests.sum()))
        if saved < max(costs, LEAST_SAVED * ends.sum()):
            return None
        return GroupedDecodes(order, keys, np.stack((firsts, counts), 1)[least_keys > 0])

    def _sort(self, table: np.ndarray, rows: np.ndarray, num_full: np.ndarray, least: int) -> np.ndarray:
        """Indices by pages at some entries, those nearest to the beginning first: decodes with the same pages up to one
        of them stand side by side. Otherwise they stay in order."""
        columns = []
        entry = least
        while entry <= int(num_full.max()):
            columns.append(np.where(num_full >= entry, table[rows, entry - 1], NULL_PAGE))
            entry *= 2
        return np.lexsort(columns[::-1])

    def _count_common(self, tables: list[np.ndarray], rows: np.ndarray, num_full: np.ndarray) -> np.ndarray:
        """[R - 1]: with how many of the same full pages each decode and the one before it begin, in all tables."""
        most = np.minimum(num_full[1:], num_full[:-1])
        num_entries = int(most.max())
        for table in tables:
            own = table[rows, :num_entries]
            differs = (own[1:] != own[:-1]) | (own[1:] == NULL_PAGE)
            most = np.where(differs.any(1), np.minimum(most, differs.argmax(1)), most)
        return most

    def _divide(self, is_linked: np.ndarray) -> np.ndarray:
        """First decodes of groups, ascending; decodes that are linked to the one before them are a run, which is
        divided equally into as few groups as can hold it."""
        firsts = np.flatnonzero(np.concatenate(([True], ~is_linked)))
        counts = np.diff(firsts, append=len(is_linked) + 1)
        numbers = -(-counts // self._most)  # groups of each run
        place = np.arange(len(is_linked) + 1) - np.repeat(firsts, counts)
        group = place * np.repeat(numbers, counts) // np.repeat(counts, counts)
        is_first = np.concatenate(([True], (group[1:] != group[:-1]) | ~is_linked))
        return np.flatnonzero(is_first)


def _has_repeated(pages: np.ndarray) -> bool:
    """Whether some page occurs often enough for a group."""
    ordered = np.sort(pages)
    apart = LEAST_MEMBERS - 1
    return bool(((ordered[apart:] == ordered[:-apart]) & (ordered[apart:] != NULL_PAGE)).any())

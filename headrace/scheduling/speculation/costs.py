"""`StepCosts`: how long a decode step takes, by its number of entries, learned from measured steps."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable

MEMORY = 9
"""Measured steps whose median counts: up to four outliers in a row are ignored."""
SCALE_RATE = 0.2
"""How fast all sizes follow one step: contexts grow, clocks change. The size itself follows as the mean of many."""
TABLE_WEIGHT, MOST_WEIGHT = 16.0, 64.0
"""Steps that an entry of the table counts as, and that count at most."""
STALE_NOTES = 1024
"""Notes without one of its own after which a size is taken as in the table again, or as not known: what was measured
badly once would else never be tried again."""
FEW_NOTES = 32
"""The same for a size with fewer than `MEMORY` notes, whose first step may have been held up by anything; four times as
many after each further attempt that ended so."""
FEW_EXTRAS = 3
"""Steps of a size that was measured without drafts, after which their median tells what drafts add."""
UNKNOWN_SLOPE = 0.25
"""Beyond the largest known size twice as many entries are taken to cost so much more. Optimistic enough to be tried,
and corrected as soon as it is."""
REFRESH = 16
"""Notes after which the curve is made anew."""


def round_size(num_entries: int) -> int:
    """The size that a step counts as: sizes far apart from one are measured in groups, which keeps the table small."""
    step = 1 if num_entries <= 64 else 8 if num_entries <= 512 else 64
    return -(-num_entries // step) * step


class _Knot:
    """A measured size. ``seconds`` is relative to the common scale; ``recent`` are ratios of measured to expected.
    ``is_plain``: by steps without drafts, of as many rows as entries."""

    __slots__ = ("is_plain", "noted", "recent", "seconds", "weight")

    def __init__(self, seconds: float, weight: float, noted: int):
        self.seconds = seconds
        self.weight = weight
        self.noted = noted
        self.is_plain = False
        self.recent: deque[float] = deque(maxlen=MEMORY)


class StepCosts:
    """Seconds by number of entries: a curve through measured sizes that never falls, linear between them.

    A step's time depends on more than its entries (above all on the lengths of contexts), and those sizes that are not
    used now were measured under other conditions. So a measured step moves the whole curve quickly, and its own size
    against the others slowly.
    """

    def __init__(self, table: Iterable[tuple[int, float]] = ()):
        """``table``: known ``(entries, seconds)``, for instance of the sizes that were captured."""
        self._scale = 1.0
        self._table = {round_size(entries): seconds for entries, seconds in table}
        self._knots = {size: _Knot(seconds, TABLE_WEIGHT, 0) for size, seconds in self._table.items()}
        self._sizes: list[int] = []
        self._values: list[float] = []
        self._attempts: Counter[int] = Counter()  # by size, those that were given up with few notes
        self._extras: deque[float] = deque(maxlen=MEMORY)
        self._extra_noted = 0
        self._num_notes = 0
        self._refresh()

    @property
    def is_known(self) -> bool:
        """Whether any size has been measured."""
        return bool(self._knots)

    @property
    def sizes(self) -> list[int]:
        """The measured sizes, ascending; the curve bends there alone."""
        return self._sizes

    def seconds(self, num_entries: float) -> float:
        """Expected seconds of a step with so many entries; 0 when nothing has been measured."""
        sizes, values = self._sizes, self._values
        if not sizes:
            return 0.0
        index = bisect_left(sizes, num_entries)
        if index == len(sizes):
            return self._scale * values[-1] * (1.0 + UNKNOWN_SLOPE * (num_entries / sizes[-1] - 1.0))
        if index == 0 or sizes[index] == num_entries:
            return self._scale * values[index]
        low, high = sizes[index - 1], sizes[index]
        share = (num_entries - low) / (high - low)
        return self._scale * (values[index - 1] + share * (values[index] - values[index - 1]))

    @property
    def scale(self) -> float:
        """How much slower steps are now than when the table was made."""
        return self._scale

    @property
    def extra_s(self) -> float:
        """Seconds that a step takes longer because it has drafts, whatever its size: the host plans and reads more.
        Known where steps of one size came with and without; 0 until then, and where sizes were measured with drafts
        alone, whose seconds contain it."""
        return max(0.0, sorted(self._extras)[len(self._extras) // 2]) if len(self._extras) >= FEW_EXTRAS else 0.0

    def note_time(
        self, num_entries: int, seconds: float, *, apart: float = 0.0, has_drafts: bool = False
    ) -> None:
        """A step of so many entries, without prefill, took so long, ``apart`` of it for something else."""
        if seconds <= 0.0 or num_entries <= 0:
            return
        size = round_size(num_entries)
        knot = self._knots.get(size)
        self._num_notes += 1
        is_new = False
        if has_drafts and knot is not None and knot.is_plain and knot.weight >= MEMORY:
            self._extras.append(seconds - apart - self._scale * knot.seconds)
            self._extra_noted = self._num_notes
        else:
            is_new = self._note_size(size, knot, seconds, apart, has_drafts).weight < MEMORY
        if self._num_notes % REFRESH == 0:
            self._drop_stale()
        if self._num_notes % REFRESH == 0 or is_new:
            self._refresh()

    def _note_size(self, size: int, knot: _Knot | None, seconds: float, apart: float, has_drafts: bool) -> _Knot:
        """Move the curve and the size's own knot, new if it has none, towards a measured step; returns the knot."""
        if has_drafts:
            apart += self.extra_s
        elif knot is not None and not knot.is_plain and size not in self._table:
            knot = None  # it was measured with drafts, and contains what they add
        if knot is None:
            knot = self._knots[size] = _Knot((self.seconds(size) or seconds) / self._scale, 0.0, 0)
            self._refresh()
        knot.is_plain |= not has_drafts
        knot.recent.append(seconds / (knot.seconds + apart / self._scale))
        ratio = sorted(knot.recent)[len(knot.recent) // 2] / self._scale
        # A size that is new is put where it was measured; the others stay where they are.
        self._scale *= 1.0 + SCALE_RATE * (ratio - 1.0) * knot.weight / (knot.weight + 4.0)
        knot.seconds *= 1.0 + (ratio - 1.0) / (knot.weight + 1.0)
        knot.weight = min(knot.weight + 1.0, MOST_WEIGHT)
        knot.noted = self._num_notes
        return knot

    def _drop_stale(self) -> None:
        if self._num_notes - self._extra_noted > STALE_NOTES:
            self._extras.clear()
        for size, knot in list(self._knots.items()):
            is_sure = knot.weight >= MEMORY
            patience = STALE_NOTES if is_sure else min(STALE_NOTES, FEW_NOTES << 2 * self._attempts[size])
            if self._num_notes - knot.noted <= patience:
                continue
            self._attempts[size] += not is_sure
            if size in self._table:
                self._knots[size] = _Knot(self._table[size], TABLE_WEIGHT, self._num_notes)
            else:
                del self._knots[size]

    def _refresh(self) -> None:
        """Fit a curve that never falls, by weighted least squares: pool adjacent sizes while an earlier one is
        slower."""
        pools: list[list[float]] = []  # mean seconds, weight, number of sizes
        for size in sorted(self._knots):
            knot = self._knots[size]
            pools.append([knot.seconds, knot.weight + 1.0, 1])
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                mean, weight, count = pools.pop()
                last = pools[-1]
                last[0] = (last[0] * last[1] + mean * weight) / (last[1] + weight)
                last[1] += weight
                last[2] += count
        self._sizes = sorted(self._knots)
        self._values = [mean for mean, _, count in pools for _ in range(int(count))]


class DraftCosts:
    """Time that drafting on the device adds to a step, relative to the steps of the same table: the drafter runs over
    the step's tokens once, and then once for each draft, for all rows together."""

    def __init__(self, follows: Iterable[tuple[int, float]], drafts: Iterable[tuple[int, float]]):
        """``follows``: ``(entries, seconds)``; ``drafts``: ``(rows, seconds)`` of one draft each."""
        self._follows, self._drafts = StepCosts(follows), StepCosts(drafts)

    def seconds(self, num_entries: float, num_rows: int, num_drafts: int) -> float:
        """Seconds of a step's drafting; 0 without drafts."""
        if not num_drafts:
            return 0.0
        return self._follows.seconds(num_entries) + num_drafts * self._drafts.seconds(num_rows)

"""`Acceptance`: how likely drafts are right, learned from those that were verified.

What all rows have in common is learned by position, or by the drafter's own probability where it states one; what is
special to a row is one factor. Probabilities are handled as levels, ``-RESOLUTION * ln p`` rounded: they add up along
a row's drafts, and few distinct ones remain, which makes the sweep of the policy cheap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

RESOLUTION = 12
LEVELS = 80
"""Drafts at this level or above are not worth a thought: they survive with a probability of 0.1 %."""

SURVIVAL = tuple(math.exp(-level / RESOLUTION) for level in range(LEVELS))
"""Probability by level."""

_BINS = 10
_PRIOR = 0.8  # of a draft without a stated probability; hopeful, or it would never be tried
_PRIOR_WEIGHT, _ROW_WEIGHT = 3.0, 40.0  # drafts that the priors count as
_KEEP, _ROW_KEEP = 0.995, 0.98  # of the evidence, with each draft; so some 200 and 50 count
_FORGET = 0.03  # of the evidence, with each time it speaks against drafts
_MOST_CURVES = 4096
_STREAK = 4  # failures in a row after which forgetting slows to half


def level_of(probability: float) -> int:
    """The level of a probability, at most `LEVELS`."""
    return LEVELS if probability <= SURVIVAL[-1] else min(LEVELS, round(-RESOLUTION * math.log(probability)))


class _Rate:
    """A share of successes: those seen, decayed, and a prior. ``level`` follows."""

    __slots__ = ("level", "prior", "successes", "tries")

    def __init__(self, prior: float):
        self.prior = prior
        self.successes = self.tries = 0.0
        self.level = level_of(prior)

    @property
    def probability(self) -> float:
        return (self.successes + _PRIOR_WEIGHT * self.prior) / (self.tries + _PRIOR_WEIGHT)

    def note(self, is_right: bool) -> bool:
        """Count a draft; returns whether the level changed."""
        self.successes = _KEEP * self.successes + is_right
        self.tries = _KEEP * self.tries + 1.0
        return self._update()

    def forget(self, share: float) -> bool:
        """Let the evidence fade; returns whether the level changed."""
        self.successes *= 1.0 - share
        self.tries *= 1.0 - share
        return self._update()

    def _update(self) -> bool:
        before, self.level = self.level, level_of(self.probability)
        return self.level != before


class _Row:
    """A row against what is expected of its drafts: ``offset`` is added to the level of each of them."""

    __slots__ = ("accepted", "expected", "failures", "offset")

    def __init__(self) -> None:
        self.accepted = self.expected = 0.0
        self.failures = self.offset = 0

    def update(self) -> None:
        factor = (self.accepted + _ROW_WEIGHT) / (self.expected + _ROW_WEIGHT)
        self.offset = max(-RESOLUTION // 2, round(-RESOLUTION * math.log(factor)))


class Acceptance:
    """Acceptance rates of one engine's drafts. Evidence against drafts fades while none are verified, and the slower,
    the longer the streak of failures was: rows and methods with a bad record are tried again, but rarely."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._positions: list[_Rate] = []
        self._bins = [_Rate(min(0.95, (index + 0.5) / _BINS)) for index in range(_BINS)]
        self._failures = 0
        # Of the levels as they are now: by a row's offset and number of drafts, or its offset, the level of its lead
        # and its probabilities. Rows have much in common, so most curves are found here.
        self._curves: dict[tuple[int, int], tuple[int, ...]] = {}
        self._stated_curves: dict[tuple[int, int, tuple[float, ...]], tuple[int, ...]] = {}

    def start(self, key: int) -> None:
        """A new row; nothing is known of it."""
        self._rows[key] = _Row()

    def stop(self, key: int) -> None:
        """The row is gone."""
        self._rows.pop(key, None)

    def curves(self, keys: Sequence[int], most_per_key: Sequence[int]) -> list[tuple[int, ...]]:
        """For every row the levels of surviving so many drafts, ascending, without those beyond `LEVELS`."""
        rows, known = self._rows, self._curves
        result = []
        for key, most in zip(keys, most_per_key, strict=True):
            kind = (rows[key].offset, most)
            curve = known.get(kind)
            if curve is None:
                curve = known[kind] = self._make_curve(*kind)
            result.append(curve)
        return result

    def curve(self, key: int, probabilities: Sequence[float], lead: float) -> tuple[int, ...]:
        """The same for one row whose drafter states probabilities."""
        kind = (self._rows[key].offset, 0 if lead >= 1.0 else level_of(lead), tuple(probabilities))
        curve = self._stated_curves.get(kind)
        if curve is None:
            if len(self._stated_curves) >= _MOST_CURVES:
                self._stated_curves.clear()
            curve = self._stated_curves[kind] = self._make_stated_curve(*kind)
        return curve

    def _make_stated_curve(self, offset: int, level: int, probabilities: tuple[float, ...]) -> tuple[int, ...]:
        bins, levels = self._bins, []
        for probability in probabilities:
            level += max(0, bins[min(_BINS - 1, int(probability * _BINS))].level + offset)
            if level >= LEVELS:
                break
            levels.append(level)
        return tuple(levels)

    def _make_curve(self, offset: int, most: int) -> tuple[int, ...]:
        level, levels = 0, []
        for position in range(most):
            level += max(0, self._position(position).level + offset)
            if level >= LEVELS:
                break
            levels.append(level)
        return tuple(levels)

    def _position(self, position: int) -> _Rate:
        while len(self._positions) <= position:  # as likely as the one before it, at first
            before = self._positions[-1].probability if self._positions else _PRIOR
            self._positions.append(_Rate(before))
        return self._positions[position]

    def note(self, key: int, num_drafts: int, num_accepted: int, probabilities: Sequence[float] | None) -> None:
        """Note that ``num_accepted`` of ``num_drafts`` were right. Drafts behind the first wrong one tell nothing."""
        num_tried = min(num_drafts, num_accepted + 1)
        expected, has_changed = 0.0, False
        for index in range(num_tried):
            if probabilities is None:
                rate = self._position(index)
            else:
                rate = self._bins[min(_BINS - 1, int(probabilities[index] * _BINS))]
            expected += rate.probability
            has_changed |= rate.note(index < num_accepted)
        if has_changed:
            self._drop_curves()
        self._failures = 0 if num_accepted else self._failures + 1
        row = self._rows.get(key)
        if row is not None:
            keep = _ROW_KEEP**num_tried
            row.accepted = keep * row.accepted + num_accepted
            row.expected = keep * row.expected + expected
            row.failures = 0 if num_accepted else row.failures + 1
            row.update()

    def forget_rows(self, keys: Sequence[int]) -> None:
        """Nothing was verified for these rows, because of their record."""
        for key in keys:
            row = self._rows[key]
            if row.offset > 0:
                keep = 1.0 - _patience(row.failures)
                row.accepted *= keep
                row.expected *= keep
                row.update()

    def forget(self) -> None:
        """Nothing was verified for any row."""
        share = _patience(self._failures)
        if any([rate.forget(share) for rate in (*self._positions, *self._bins)]):
            self._drop_curves()

    def _drop_curves(self) -> None:
        self._curves.clear()
        self._stated_curves.clear()


def _patience(failures: int) -> float:
    return math.ldexp(_FORGET, -min(failures // _STREAK, 8))

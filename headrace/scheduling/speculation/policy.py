"""`DraftPolicy`: how many drafts each row verifies in a step, so that the most tokens are expected per second.

A step of R rows and M drafts is expected to make R + (sum of the survival probabilities of the drafts) tokens in
t(R + M) seconds, plus the time of drafting on a device. A draft survives if it and all before it are right. The best M
drafts of a step are those most likely to survive, so one sweep over them, best first, finds the best M.

Refuses: what the drafts are. Rows are named by integers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from headrace.scheduling.speculation.acceptance import LEVELS, SURVIVAL, Acceptance
from headrace.scheduling.speculation.costs import DraftCosts, StepCosts

MARGIN = 1.005
"""Drafts must promise so much more than none: the costs are measured, not known."""
WORTH = 1.4
"""Share of tokens that drafts must promise to add, over the share of time that they add to the step. Where a step is
bound by arithmetic the two are close, and rows that get ahead of others leave smaller steps behind: 256 requests of
one length were done 8 % later with drafts that made a tenth more tokens per second while all of them ran."""
LOSS_SHARE = 0.003
"""Share of all step time that drafts may lose, net, over what they gain."""
BASELINE_STEPS = 256
"""Steps with drafts after which one goes without. Not where a device makes drafts: rows left out cannot go on."""
LOSS_STEPS = 1.0
"""Steps that drafts may lose in advance, before they gain anything."""
RISK = 0.5
"""Share of that balance that a step may risk: another one is planned before it is known how this one ends. So a large
batch begins with drafts of few rows, which tell as much."""
GAIN_STEPS = 8.0
"""Steps that they may lose at once after they have gained as much."""


class Choice(NamedTuple):
    """A row's drafts by their probabilities. ``lead``: probability that the first one gets a chance at all; below 1 if
    a step in flight must end as guessed."""

    key: int
    probabilities: Sequence[float]
    lead: float = 1.0


class _Cut(NamedTuple):
    """The drafts of a step: all below a level of survival and some of that level; the step takes ``seconds``."""

    num_chosen: int
    seconds: float
    level: int
    num_of_level: int


class LossLimit:
    """Bounds what drafts may lose, whatever the estimates say. ``balance_s``, in seconds, falls by what drafts added to
    a step and rises by what those that were right saved; without gains it rises by `LOSS_SHARE` of the time alone. No
    step may risk more than the balance."""

    def __init__(self) -> None:
        self.balance_s = 0.0
        self._step_s = 0.0

    def note_step(self, seconds: float) -> None:
        """A step, which takes so long without drafts."""
        if self._step_s == 0.0:
            self.balance_s = LOSS_STEPS * seconds
        elif self.balance_s < LOSS_STEPS * seconds:
            self.balance_s += LOSS_SHARE * seconds
        self._step_s = seconds
        self.settle(0.0, 0.0)

    def settle(self, cost_s: float, saved_s: float) -> None:
        """Drafts made a step longer by ``cost_s``, and other steps of ``saved_s`` needless."""
        self.balance_s = min(GAIN_STEPS * self._step_s, self.balance_s + saved_s - cost_s)


class DraftPolicy:
    """One engine's policy. With ``fixed`` it always allows that many drafts and learns nothing. ``drafting``:
    what making drafts costs, where a device does; as measured with the table of ``costs``, and it rises and falls with
    that.

    Acceptance is learned from `note`, step times from `note_time`. Before the first step time no drafts are chosen.
    """

    def __init__(self, costs: StepCosts, *, fixed: int | None = None, drafting: DraftCosts | None = None):
        self._costs = costs
        self._fixed = fixed
        self._drafting = drafting
        self._acceptance = Acceptance()
        self._limit = LossLimit()
        self._num_drafted = 0  # steps with drafts since the latest one without
        # Seconds that an accepted token saves, and that a draft costs, as of the latest choice.
        self._token_s = self._draft_s = 0.0

    @property
    def is_fixed(self) -> bool:
        """Whether it always allows the same number."""
        return self._fixed is not None

    @property
    def is_ready(self) -> bool:
        """Whether it can choose: step times are known, or are not asked for."""
        return self._fixed is not None or self._costs.is_known

    def start(self, key: int) -> None:
        """A row that may get drafts."""
        self._acceptance.start(key)

    def stop(self, key: int) -> None:
        """The row is gone; unknown keys are ignored."""
        self._acceptance.stop(key)

    def note_time(self, num_entries: int, seconds: float, *, num_rows: int | None = None, num_drafted: int = 0) -> None:
        """A step of decodes alone took so long. ``num_rows``: its rows, if it had drafts; ``num_drafted``: how many
        drafts per row a device made in it."""
        rows = num_entries if num_rows is None else num_rows
        apart = self._draft_seconds(num_entries, rows, num_drafted)
        self._costs.note_time(num_entries, seconds, apart=apart, has_drafts=num_entries > rows)
        self._limit.note_step(self._costs.seconds(rows))

    def _draft_seconds(self, num_entries: float, num_rows: int, num_drafts: int) -> float:
        # Not learned apart: steps verify what the step before drafted, so the two are measured together only.
        drafting = self._drafting
        return 0.0 if drafting is None else drafting.seconds(num_entries, num_rows, num_drafts) * self._costs.scale

    def note(self, key: int, num_drafts: int, num_accepted: int, probabilities: Sequence[float] | None = None) -> None:
        """A row verified its first ``num_drafts`` drafts, and the first ``num_accepted`` of them were right.
        ``probabilities``: those of the proposal, if it had any."""
        if num_drafts > 0:
            self._acceptance.note(key, num_drafts, num_accepted, probabilities)
            self._limit.settle(num_drafts * self._draft_s, num_accepted * self._token_s)

    def note_void(self, num_drafts: int) -> None:
        """Note drafts that were verified in vain, because the step before them sampled other tokens than guessed."""
        self._limit.settle(num_drafts * self._draft_s, 0.0)

    def pays(self, num_rows: int) -> bool:
        """Whether a certain draft would pay in a step of so many rows: if not, none needs to be made."""
        if self._fixed is not None:
            return self._fixed > 0
        base = self._costs.seconds(num_rows)
        if base <= 0.0 or self._limit.balance_s <= 0.0:
            return False
        extra_s = self._costs.extra_s
        return any(
            more * base > WORTH * num_rows * (self._costs.seconds(num_rows + more) + extra_s - base)
            for more in (1, 2, 4, 8, num_rows) if more <= 8 * num_rows
        )

    def choose(
        self, keys: Sequence[int], most_per_key: Sequence[int], budget_entries: int, *, num_others: int = 0
    ) -> list[int]:
        """The number of drafts for each row, at most ``most_per_key``; with the rows' own tokens, and those of others
        in the step, there are at most ``budget_entries`` entries. For drafts without probabilities."""
        if self._fixed is not None:
            return self._choose_fixed(most_per_key, budget_entries - len(keys) - num_others)
        if not any(most_per_key):
            return [0] * len(keys)
        curves = self._acceptance.curves(keys, most_per_key)
        counts = self._select(curves, len(keys) + num_others, budget_entries)
        if not any(counts):
            self._acceptance.forget()
        return counts

    def choose_among(self, choices: Sequence[Choice], num_rows: int, budget_entries: int) -> list[int]:
        """The same for those rows of ``num_rows`` that have proposals."""
        if self._fixed is not None:
            return self._choose_fixed([len(c.probabilities) for c in choices], budget_entries - num_rows)
        curves = [self._acceptance.curve(c.key, c.probabilities, c.lead) for c in choices]
        counts = self._select(curves, num_rows, budget_entries)
        self._num_drafted += any(counts)
        if self._num_drafted > BASELINE_STEPS:  # what a step without drafts costs must be measured now and then
            self._num_drafted = 0
            return [0] * len(choices)
        idle = [c.key for c, count in zip(choices, counts, strict=True) if count == 0]
        self._acceptance.forget_rows(idle)
        if len(idle) == len(choices):
            self._acceptance.forget()
        return counts

    def survival(self, key: int, probabilities: Sequence[float]) -> float:
        """The probability that all of a row's drafts are right."""
        curve = self._acceptance.curve(key, probabilities, 1.0)
        return SURVIVAL[curve[-1]] if curve and len(curve) == len(probabilities) else 0.0

    def _choose_fixed(self, most_per_key: Sequence[int], budget: int) -> list[int]:
        return fill_up([min(self._fixed or 0, most) for most in most_per_key], budget)

    def _select(self, curves: Sequence[tuple[int, ...]], num_rows: int, budget_entries: int) -> list[int]:
        """Numbers of drafts from curves of survival levels."""
        distinct = Counter(curves)
        distinct.pop((), None)
        base_s = self._costs.seconds(num_rows)
        budget = budget_entries - num_rows
        if not distinct or base_s <= 0.0 or budget <= 0 or self._limit.balance_s <= 0.0:
            return [0] * len(curves)
        cut = self._find_cut(distinct, num_rows, budget, base_s)
        if cut.num_chosen == 0:
            return [0] * len(curves)
        self._token_s, self._draft_s = base_s / num_rows, (cut.seconds - base_s) / cut.num_chosen
        return _spread(curves, distinct, cut)

    def _find_cut(
        self, distinct: Counter[tuple[int, ...]], num_rows: int, budget: int, base_s: float
    ) -> _Cut:
        """Which of the drafts to verify, best first. Within a level the rate
        is monotone between the sizes at which the cost curve bends, so only those and the ends of levels are tried."""
        counts, depths = [0] * LEVELS, [0] * LEVELS  # drafts of each level; the deepest position of any of them
        for curve, number in distinct.items():
            for depth, level in enumerate(curve, 1):
                counts[level] += number
                if depth > depths[level]:
                    depths[level] = depth
        seconds, sizes = self._costs.seconds, self._costs.sizes
        most_s = base_s + RISK * self._limit.balance_s
        best, best_rate = _Cut(0, base_s, 0, 0), MARGIN * num_rows / base_s
        extra_s = self._costs.extra_s
        chosen, tokens, depth = 0, float(num_rows), 0
        for level, count in enumerate(counts):
            if not count:
                continue
            depth = max(depth, depths[level])
            count = min(count, budget - chosen)
            first = bisect_right(sizes, num_rows + chosen)
            inside = sizes[first : bisect_left(sizes, num_rows + chosen + count)]
            for number in (*(size - num_rows - chosen for size in inside), count):
                entries = num_rows + chosen + number
                total_s = seconds(entries) + extra_s + self._draft_seconds(entries, num_rows, depth)
                gained = tokens - num_rows + number * SURVIVAL[level]
                rate, is_worth = (num_rows + gained) / total_s, gained * base_s >= WORTH * num_rows * (total_s - base_s)
                if rate > best_rate and is_worth and total_s <= most_s:
                    best, best_rate = _Cut(chosen + number, total_s, level, number), rate
            chosen += count
            tokens += count * SURVIVAL[level]
            if chosen >= budget:
                break
        return best


def fill_up(mosts: Sequence[int], budget: int) -> list[int]:
    """As many as each may have, ``budget`` together; the first ones win."""
    counts = []
    for most in mosts:
        counts.append(max(0, min(most, budget)))
        budget -= counts[-1]
    return counts


def _spread(curves: Sequence[tuple[int, ...]], distinct: Counter[tuple[int, ...]], cut: _Cut) -> list[int]:
    """Numbers of drafts of the rows up to a cut; of equal drafts the first rows win."""
    last, left = cut.level, cut.num_of_level
    bounds = {curve: (bisect_left(curve, last), bisect_right(curve, last)) for curve in distinct}
    bounds[()] = (0, 0)
    result = []
    for curve in curves:
        low, high = bounds[curve]
        take = min(high - low, left)
        left -= take
        result.append(low + take)
    return result

"""`StepTimes`: how long a step takes, as a function of what it computes, learned from measured steps.

Non-negative least squares over medians: steps of like work form a class, of which the median of the last few counts. So
a step that was held up counts for nothing, and a million steps of one kind do not outweigh what was learned of others.
Refuses: clocks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

MEMORY = 7
"""Measured steps of a class whose median counts: up to three outliers are ignored."""
MOST_CLASSES = 96
"""Classes that are kept; the one noted longest ago is forgotten first."""
FRESH_NOTES, LEAST_WEIGHT = 64, 0.05
"""Notes after which a class that had none of its own counts a quarter, and so on, beside newer ones that say otherwise;
and what it counts at least."""
FIT_NOTES = 16
"""Notes after which the costs are fitted anew; at once for a step like none before."""
SWEEPS = 24
"""Sweeps of coordinate descent in a fit, which starts from the costs of the last one."""
ORDER = (3, 5, 4, 1, 2, 0)
"""The order in which a sweep fits the costs (0: the fixed one). Time that the steps so far cannot attribute goes to
prompt tokens and encoding, which the planner can take in smaller numbers."""
RECENT = 9
"""Steps of decodes and prompts together whose ratios of measured to expected time correct what is expected."""
RECENT_RANK = 6
"""Index of the ratio that counts, in ascending order: a quarter of the steps may take longer than expected."""
MOST_RATIO = 4.0


class StepWork(NamedTuple):
    """The work of a step: decode tokens (drafts included), context tokens that these read, prompt tokens, query-key
    pairs of the prompt tokens, and placeholders whose media are encoded."""

    decodes: int = 0
    context: int = 0
    tokens: int = 0
    pairs: float = 0.0
    encoded: float = 0.0

    @property
    def is_mixed(self) -> bool:
        """Whether decodes wait for anything else."""
        return self.decodes > 0 and (self.tokens > 0 or self.encoded > 0)


class _Step(NamedTuple):
    """A measured one; ``number`` counts them."""

    work: StepWork
    seconds: float
    number: int


class StepTimes:
    """Seconds = fixed + cost · work, costs at least 0."""

    def __init__(self) -> None:
        self._classes: OrderedDict[tuple[int, ...], deque[_Step]] = OrderedDict()
        self._recent: deque[_Step] = deque(maxlen=RECENT)
        self._costs = [0.0] * (1 + len(StepWork._fields))
        self._ratio = 1.0
        self._num_notes = 0

    @property
    def token_s(self) -> float:
        """Seconds for a token of a prompt; 0 while unknown."""
        return self._ratio * self._costs[3]

    @property
    def pair_s(self) -> float:
        """Seconds for a token of a prompt to attend to another one."""
        return self._ratio * self._costs[4]

    @property
    def encoded_s(self) -> float:
        """Seconds for a placeholder's worth of encoding; 0 while unknown."""
        return self._ratio * self._costs[5]

    def seconds(self, work: StepWork) -> float:
        """Expected seconds of a step; 0 before the first note."""
        return self._ratio * self._expect(work)

    def reach(self, target_s: float) -> int:
        """Tokens of prompts beside decodes that surely take less than ``target_s``, or than was measured: time grows
        with them at most in proportion, as weights are read once. At most twice as many as lately: what the costs say
        of larger steps is a guess."""
        return max(
            (int(step.work.tokens * min(2.0, max(1.0, target_s / step.seconds))) for step in self._recent), default=0
        )

    def note(self, work: StepWork, seconds: float) -> None:
        """A step took so long."""
        if seconds <= 0.0:
            return
        self._num_notes += 1
        step = _Step(work, seconds, self._num_notes)
        steps = self._find_class(work)
        steps.append(step)
        if work.is_mixed:
            self._recent.append(step)
        if len(steps) == 1 or self._num_notes % FIT_NOTES == 0:
            self._fit()
        elif work.is_mixed:
            self._correct()

    def _find_class(self, work: StepWork) -> deque[_Step]:
        key = tuple(int(value).bit_length() for value in work)
        found = self._classes.get(key)
        if found is None:
            found = self._classes[key] = deque(maxlen=MEMORY)
            if len(self._classes) > MOST_CLASSES:
                self._classes.popitem(last=False)
        self._classes.move_to_end(key)
        return found

    def _expect(self, work: StepWork) -> float:
        costs = self._costs
        return costs[0] + sum(cost * value for cost, value in zip(costs[1:], work, strict=True))

    def _middle(self, steps: deque[_Step]) -> _Step:
        """The median, by time relative to what is expected of the work."""
        ranked = sorted(steps, key=lambda step: step.seconds / max(self._expect(step.work), 1e-9))
        return ranked[(len(ranked) - 1) // 2]

    def _correct(self) -> None:
        """No few costs fit all steps, as small ones are bound by memory and large ones by computing: where steps are
        now, what is expected follows what was measured last."""
        ratios = sorted(step.seconds / max(self._expect(step.work), 1e-9) for step in self._recent)
        if ratios:
            ratio = ratios[min(RECENT_RANK, len(ratios) // 2 + 1, len(ratios) - 1)]
            self._ratio = min(MOST_RATIO, max(1.0 / MOST_RATIO, ratio))

    def _fit(self) -> None:
        """Least squares of relative errors, by coordinate descent on the normal equations."""
        size = len(self._costs)
        matrix, right = [[0.0] * size for _ in range(size)], [0.0] * size
        for steps in self._classes.values():
            work, seconds, _ = self._middle(steps)
            age = (self._num_notes - steps[-1].number) / FRESH_NOTES
            weight = len(steps) * max(LEAST_WEIGHT, 1.0 / (1.0 + age) ** 2)
            row = [1.0 / seconds, *(value / seconds for value in work)]
            for i in range(size):
                if row[i]:
                    scaled = weight * row[i]
                    right[i] += scaled
                    for j in range(size):
                        matrix[i][j] += scaled * row[j]
        costs = self._costs
        for _ in range(SWEEPS):
            for i in ORDER:
                if matrix[i][i] > 0.0:
                    rest = sum(matrix[i][j] * costs[j] for j in range(size) if j != i)
                    costs[i] = max(0.0, (right[i] - rest) / matrix[i][i])
        self._correct()

"""`Trial`: whether drafts from text pay at all, by measured tokens per second with and without them."""

from __future__ import annotations

from headrace.scheduling.speculation.costs import StepCosts

PLAIN_STEPS = 8
"""Steps without drafts whose times are measured before drafts are tried."""
TRIED_STEPS = 32
"""Steps with them by which they are judged."""
REFRESH_STEPS = 1024
"""Steps with them after which those without are measured anew: contexts grow, clocks change."""
SETTLE_STEPS = 3
"""Steps after a change that tell nothing: they were planned, or waited for steps that were, before it."""
FIRST_PAUSE, LONGEST_PAUSE = 64, 1024
"""Steps for which drafts are given up when they lost; twice as long with every loss in a row."""
LOSS = 0.02
"""Share of the time that drafts may lose: timings vary as much."""
OUTLIER = 8.0
"""Steps that took so many times as long as one without drafts say nothing of drafts."""


class Trial:
    """`DraftPolicy` weighs what a draft adds to a step. What the host does to find drafts is in all steps, those
    without any too, so it cannot see that; where steps are short, as those of a small model on a GPU, it is what they
    wait for. So now and then text is not asked for a few steps, which gives the seconds of a step where nothing is
    done for drafts.

    `note` hears of each step of decodes alone, in order. `is_on` says whether text may be asked in the next plan.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._plain = StepCosts()  # by rows; of steps for which text was not asked
        self._left = PLAIN_STEPS  # steps until the next decision
        self._settling = 0
        self._pause = FIRST_PAUSE
        self._until_refresh = REFRESH_STEPS
        self._spent_s = self._gained_s = 0.0

    def note(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step of so many rows made so many tokens in so much time, since the step before it."""
        if seconds <= 0.0 or num_rows <= 0:
            return
        if self._settling:
            self._settling -= 1
            return
        if self.is_on:
            plain_s = self._plain.seconds(num_rows)
            if seconds <= OUTLIER * plain_s:
                self._spent_s += seconds
                self._gained_s += num_tokens / num_rows * plain_s - seconds
        elif num_tokens == num_rows:  # else some had drafts forced by a grammar
            self._plain.note_time(num_rows, seconds)
        self._left -= 1
        if not self._left:
            self._decide()

    def _decide(self) -> None:
        if not self.is_on:
            self._switch(True, TRIED_STEPS)
        elif self._gained_s < -LOSS * self._spent_s:
            self._switch(False, self._pause)
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)
        else:
            self._pause = FIRST_PAUSE
            self._until_refresh -= TRIED_STEPS
            if self._until_refresh > 0:
                self._switch(True, TRIED_STEPS)
            else:
                self._until_refresh = REFRESH_STEPS
                self._switch(False, PLAIN_STEPS)

    def _switch(self, is_on: bool, num_steps: int) -> None:
        if is_on != self.is_on:
            self._settling = SETTLE_STEPS
        self.is_on, self._left = is_on, num_steps
        self._spent_s = self._gained_s = 0.0

"""`Gathering`: how long an idle engine waits for more requests before it starts a batch.

Closed-loop clients send their next request when one has ended. Requests that ended in the same step are then followed
by others that arrive within milliseconds but one by one; without a wait the first would be prefilled alone while the
rest queue for a whole step. Refuses: reading messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_S = 0.025
"""How long to wait for the first follower, while other requests are queued."""

BETWEEN_S = 0.003
"""How long to wait for each further follower."""

MAX_WAIT_S = 0.05


class Gathering:
    """Waits for as many followers as requests ended together. The total wait is at most the mean time of a first step
    (what the followers would lose by missing it), and at most `MAX_WAIT_S`. After a request that ended alone there is
    no wait: a single client has nobody to be batched with."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        # Followers are counted as the growth of the queue over ``_num_before``.
        self._num_expected = self._num_before = 0
        self._began_at = self._first_step_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the next step should wait, if nothing runs."""
        return self._num_expected > 1

    def note_end(self, num_ended: int, num_waiting: int) -> None:
        """A step ended ``num_ended`` requests, whose clients do not know yet, and ``num_waiting`` are queued."""
        self._num_expected, self._num_before = num_ended, num_waiting

    def note_first_step(self, seconds: float) -> None:
        """Note a step that began with nothing running; keeps a moving average with weight 1/2."""
        self._first_step_s = seconds if not self._first_step_s else 0.5 * (self._first_step_s + seconds)

    def begin(self) -> None:
        """Nothing runs, and something waits."""
        self._began_at = self._clock()

    def patience_ms(self, num_waiting: int) -> int:
        """Milliseconds to wait for the next message, with ``num_waiting`` requests queued; 0: start the step."""
        num_followers = num_waiting - self._num_before
        if num_followers >= self._num_expected:
            return 0
        left_s = self._began_at + min(self._first_step_s, MAX_WAIT_S) - self._clock()
        return max(0, round(min(left_s, BETWEEN_S if num_followers > 0 else FIRST_S) * 1e3))

    def end(self) -> None:
        """The step begins, or others run already."""
        self._num_expected = 0

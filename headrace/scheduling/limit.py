"""`StepLimit`: how many tokens a step may take."""

from __future__ import annotations

LEAST_TOKENS = 16
CALM_STEPS = 512


class StepLimit:
    """All that is configured, until the device runs out of memory: that halves ``tokens``, and every `CALM_STEPS` steps
    without another double it again."""

    def __init__(self, most: int):
        self.tokens = self._most = most
        self._calm = 0

    def shrink(self) -> bool:
        """Halve; False, and nothing done, when a step cannot get any smaller."""
        if self.tokens <= LEAST_TOKENS:
            return False
        self.tokens, self._calm = max(LEAST_TOKENS, self.tokens // 2), 0
        return True

    def count_step(self) -> None:
        """A step was planned."""
        if self.tokens < self._most:
            self._calm += 1
            if self._calm >= CALM_STEPS:
                self.tokens, self._calm = min(self._most, 2 * self.tokens), 0

"""Sliding-window attention: position p reads ``[p - window + 1, p]``; pages wholly before that are freed as p grows."""

from __future__ import annotations

from headrace.base.cache import CacheSpec
from headrace.base.errors import ConfigError


class SlidingWindowPolicy:
    """The pages that overlap the latest ``window`` positions."""

    is_chained = False

    def __init__(self, spec: CacheSpec, page_size: int):
        if spec.window < 1:
            raise ConfigError(
                f"a sliding_window cache group needs a window of at least 1, got {spec.window}", param="window"
            )
        self._page_size = page_size
        self._reach = spec.window - 1  # positions before its own that a query reads

    def first_needed(self, length: int) -> int:
        return max(0, length - self._reach) // self._page_size

    def peak_pages(self, length: int) -> int:
        # The page being filled, and those that its first position reaches back to.
        return min(-(-length // self._page_size), 1 + -(-self._reach // self._page_size))

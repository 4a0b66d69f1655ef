"""Full attention: every position reads all before it, so nothing is freed while a request lives."""

from __future__ import annotations

from headrace.base.cache import CacheSpec


class FullPolicy:
    """All pages from the first on."""

    is_chained = True

    def __init__(self, spec: CacheSpec, page_size: int):
        self._page_size = page_size

    def first_needed(self, length: int) -> int:
        return 0

    def peak_pages(self, length: int) -> int:
        return -(-length // self._page_size)

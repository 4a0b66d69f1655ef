"""`PageAccounts`: which pages of one cache group are free. Page 0, the null page, is never handed out.

Refuses: knowing who holds a page; the ledger and the prefix tree do.
"""

from __future__ import annotations

from headrace.base.cache import NULL_PAGE


class PageAccounts:
    """A stack of free page ids: the page given back last, whose memory is warmest, is handed out first."""

    __slots__ = ("_free", "num_pages")

    def __init__(self, num_pages: int):
        """``num_pages`` counts the null page, as `CacheGroup` does."""
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))

    @property
    def capacity(self) -> int:
        """Pages that can be handed out at all."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out ``count`` pages; the caller made sure that so many are free."""
        if count == 0:
            return []
        assert count <= len(self._free), f"{count} pages asked for, {len(self._free)} free"
        pages = self._free[-count:]
        del self._free[-count:]
        return pages

    def give(self, pages: list[int]) -> None:
        """Take pages back. Steps in flight may still touch them: pages are reused by later plans only, and the device
        runs plans in order."""
        self._free.extend(pages)

    def free_pages(self) -> list[int]:
        """A copy of the free list, for audits."""
        return list(self._free)

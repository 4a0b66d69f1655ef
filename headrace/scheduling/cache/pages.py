"""`PageAccounts`: which pages of one cache group are free. Page 0, the null page, is never handed out.

Refuses: knowing who holds a page; the ledger and the prefix tree do.
"""

from __future__ import annotations

from headrace.base.cache import NULL_PAGE


class PageAccounts:
    """A stack of free page ids. Pages freed last are handed out first, as their memory is warm in caches; several at a
    time are handed out as they were freed, fresh ones in rising order, which is fastest to read."""

    __slots__ = ("_free", "_num_fresh", "_soft_pages", "num_pages")

    def __init__(self, num_pages: int, soft_pages: int = 0):
        """Both numbers are those of `CacheGroup`."""
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._num_fresh = len(self._free)  # pages never handed out; they lie at the bottom
        self._soft_pages = soft_pages or num_pages

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
        pages = self._free[: -count - 1 : -1]  # the top ``count``, from the top down
        del self._free[-count:]
        self._num_fresh = min(self._num_fresh, len(self._free))
        return pages

    def count_excess(self, count: int) -> int:
        """How many of the next ``count`` pages should come from eviction instead: those for which no free page is left,
        and fresh ones (never used, so their memory is not resident) beyond ``soft_pages`` used in all."""
        # The stack's top, free pages that were used before, serves ``count`` first; ``fresh`` is what remains.
        fresh = count - (len(self._free) - self._num_fresh)
        used = self.capacity - self._num_fresh
        return max(count - len(self._free), min(fresh, used + fresh - self._soft_pages), 0)

    def give(self, pages: list[int]) -> None:
        """Take pages back. Steps in flight may still touch them: pages are reused by later plans only, and the device
        runs plans in order."""
        self._free.extend(reversed(pages))

    def free_pages(self) -> list[int]:
        """A copy of the free list, for audits."""
        return list(self._free)

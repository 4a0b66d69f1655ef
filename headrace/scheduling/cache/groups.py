"""Accounting policies of cache groups, one file per kind; `GroupPolicy` is all that the rest of the room knows of them.

A new kind of cache is a file here plus a line in the registry, never a branch in the planner, ledger or tree.
"""

from __future__ import annotations

from typing import Protocol

from headrace.base.cache import CACHE_POLICIES, CacheSpec
from headrace.base.errors import ConfigError
from headrace.base.registry import Registry


class GroupPolicy(Protocol):
    """Which pages one kind of cache has to keep. All groups share one page size and one numbering: entry i of a page
    table is positions ``[i * page_size, (i + 1) * page_size)``.

    ``is_chained``: a prefix is of use only with every page from its start, so pages leave the prefix tree from its
    leaves. Otherwise a node's oldest pages may go first, leaving a tombstone.
    """

    is_chained: bool

    def __init__(self, spec: CacheSpec, page_size: int): ...

    def first_needed(self, length: int) -> int:
        """The first entry that computing any position from ``length`` on still reads. Entries before it may be freed
        once ``length`` positions are computed; a prefix hit of ``length`` tokens needs the entries from it on intact.
        Never falls as ``length`` grows."""

    def peak_pages(self, length: int, at_once: int = 1) -> int:
        """The most pages a request holds at once while it grows to ``length`` tokens, one page at a time, or by up to
        ``at_once`` tokens where these cannot be divided among steps."""


GROUP_POLICIES: Registry[type[GroupPolicy]] = CACHE_POLICIES
GROUP_POLICIES.add("full", "headrace.scheduling.cache.groups:FullPolicy", doc="every position sees all before it")
GROUP_POLICIES.add(
    "sliding_window", "headrace.scheduling.cache.groups:SlidingWindowPolicy",
    doc="every position sees the latest few"
)
GROUP_POLICIES.add(
    "mla", "headrace.scheduling.cache.groups:FullPolicy", doc="latent vectors: every position sees all before it"
)


class FullPolicy:
    """All pages from the first on."""

    is_chained = True

    def __init__(self, spec: CacheSpec, page_size: int):
        self._page_size = page_size

    def first_needed(self, length: int) -> int:
        return 0

    def peak_pages(self, length: int, at_once: int = 1) -> int:
        return -(-length // self._page_size)


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

    def peak_pages(self, length: int, at_once: int = 1) -> int:
        # The page being filled, those that its first position reaches back to, ceil(reach / page_size), and those that
        # a span from its last position on goes on to.
        size = self._page_size
        return min(-(-length // size), 1 + -(-self._reach // size) + (size + at_once - 2) // size)

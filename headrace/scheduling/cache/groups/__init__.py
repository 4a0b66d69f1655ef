"""Accounting policies of cache groups, one file per kind; `GroupPolicy` is all that the rest of the room knows of them.

A new kind of cache is a file here plus a line in the registry, never a branch in the planner, ledger or tree.
"""

from __future__ import annotations

from typing import Protocol

from headrace.base.cache import CacheSpec
from headrace.base.cache_kinds import CACHE_POLICIES
from headrace.base.registry import Registry


class GroupPolicy(Protocol):
    """What one kind of cache needs kept. All groups share one page size and one numbering: entry i of a page table is
    positions ``[i * page_size, (i + 1) * page_size)``.

    ``is_chained``: a prefix is of use only with every page from its start, so pages leave the prefix tree from its
    leaves. Otherwise a node's oldest pages may go first, leaving a tombstone.
    """

    is_chained: bool

    def __init__(self, spec: CacheSpec, page_size: int): ...

    def first_needed(self, length: int) -> int:
        """The first entry that computing any position from ``length`` on still reads. Entries before it may be freed
        once ``length`` positions are computed; a prefix hit of ``length`` tokens needs the entries from it on intact.
        Never falls as ``length`` grows."""

    def peak_pages(self, length: int) -> int:
        """The most pages a request holds at once while it grows to ``length`` tokens, one page at a time."""


GROUP_POLICIES: Registry[type[GroupPolicy]] = CACHE_POLICIES
GROUP_POLICIES.add("full", "headrace.scheduling.cache.groups.full:FullPolicy", doc="every position sees all before it")
GROUP_POLICIES.add(
    "sliding_window", "headrace.scheduling.cache.groups.sliding_window:SlidingWindowPolicy",
    doc="every position sees the latest few"
)
GROUP_POLICIES.add(
    "mla", "headrace.scheduling.cache.groups.full:FullPolicy", doc="latent vectors: every position sees all before it"
)

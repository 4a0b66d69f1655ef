"""`Node`: a run of whole pages in the prefix tree, and how runs are compared."""

from __future__ import annotations


class Node:
    """Pages ``[start, end)`` of every prefix that passes through here.

    ``key`` is the run's token ids, four bytes each. ``pages[g]`` are group g's pages for the LAST ``len(pages[g])``
    pages of the run: complete in a chained group; shorter, down to empty, where the head is a tombstone.
    ``holders`` counts requests whose stored prefix ends exactly here; they keep the node, not its pages, alive.
    ``children`` are found by the bytes of their first page. The root has an empty run and its namespace as label.
    """

    __slots__ = ("children", "end", "holders", "key", "last_use", "namespace", "pages", "parent", "start")

    def __init__(
        self, parent: Node | None, key: bytes, start: int, end: int, pages: list[list[int]], namespace: str = ""
    ):
        self.parent = parent
        self.key = key
        self.start = start
        self.end = end
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.holders = 0
        self.last_use = 0
        self.namespace = namespace

    def first_intact(self, group: int) -> int:
        """The first page of the run that group ``group`` still has (``end`` when it has none)."""
        return self.end - len(self.pages[group])


def count_common_pages(run: bytes, tokens: bytes, at: int, page_bytes: int) -> int:
    """How many whole pages of ``run`` equal ``tokens`` from byte ``at`` on. Compares slices, by bisection: no loop
    over tokens."""
    high = min(len(run), len(tokens) - at) // page_bytes
    if run[: high * page_bytes] == tokens[at : at + high * page_bytes]:
        return high
    low = 0  # pages known to be equal; page number ``high`` is known to differ at the latest
    while high - low > 1:
        middle = (low + high) // 2
        if run[low * page_bytes : middle * page_bytes] == tokens[at + low * page_bytes : at + middle * page_bytes]:
            low = middle
        else:
            high = middle
    return low

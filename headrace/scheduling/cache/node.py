"""`Node`: a run of whole pages in the prefix tree, and how runs are compared."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator


class Node:
    """Pages ``[start, end)``, counted from the beginning of the prompt, of every prefix that passes through here.

    ``key`` is the run's token ids, four bytes each. ``pages[g]`` are group g's pages for the LAST ``len(pages[g])``
    pages of the run: complete in a chained group; shorter, down to empty, where the head is a tombstone.
    ``holders`` counts requests whose stored prefix ends exactly here; they keep the node, not its pages, alive.
    ``is_sound``: a request that read all of the prefix, and these pages of the run, got finite logits. ``children`` are
    found by the bytes of their first page. The root has an empty run and its namespace as label.
    """

    __slots__ = ("children", "end", "holders", "is_sound", "key", "last_use", "namespace", "pages", "parent", "start")

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
        self.is_sound = False
        self.namespace = namespace

    def first_intact(self, group: int) -> int:
        """The first page of the run that group ``group`` still has (``end`` when it has none)."""
        return self.end - len(self.pages[group])


def walk_below(nodes: Iterable[Node]) -> Iterator[Node]:
    """These nodes and all below them, parents first."""
    pending = list(nodes)
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.children.values())


def count_common_pages(run: bytes, tokens: bytes, at: int, page_bytes: int) -> int:
    """How many whole pages of ``run`` equal ``tokens`` from byte ``at`` on. Compares slices, by bisection: no loop
    over tokens."""
    high = min(len(run), len(tokens) - at) // page_bytes
    if run[: high * page_bytes] == tokens[at : at + high * page_bytes]:
        return high
    low = 0  # pages [0, low) are known to be equal; the first that differs is before ``high``
    while high - low > 1:
        middle = (low + high) // 2
        if run[low * page_bytes : middle * page_bytes] == tokens[at + low * page_bytes : at + middle * page_bytes]:
            low = middle
        else:
            high = middle
    return low


SLACK = 64  # heap entries tolerated beyond twice the live ones, before dead ones are cleared out


class EvictionQueue:
    """An LRU queue of nodes: a lazy heap with at most one live entry per node.

    Using a node again costs nothing here: its entry keeps the old time and is put back with the new one when it
    surfaces. Nodes used at the same time are evicted parents first: a window group needs the end of a prefix more than
    its middle (chained groups queue leaves only).
    """

    __slots__ = ("_heap", "_members", "_ticket")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Node]] = []
        self._members: set[Node] = set()
        self._ticket = 0

    def push(self, node: Node) -> None:
        """Queue a node, if it is not already."""
        if node not in self._members:
            self._members.add(node)
            self._enter(node)

    def discard(self, node: Node) -> None:
        """Forget a node that left the tree."""
        if node in self._members:
            self._members.remove(node)
            if len(self._heap) > 2 * len(self._members) + SLACK:
                self._heap.clear()
                for member in self._members:
                    self._enter(member)

    def pop(self) -> Node | None:
        """Take the least recently used node out, or None when there is none."""
        while self._heap:
            last_use, _, _, node = heapq.heappop(self._heap)
            if node not in self._members:
                continue
            if node.last_use > last_use:
                self._enter(node)
                continue
            self._members.remove(node)
            return node
        return None

    def _enter(self, node: Node) -> None:
        self._ticket += 1  # nodes do not compare
        heapq.heappush(self._heap, (node.last_use, node.start, self._ticket, node))

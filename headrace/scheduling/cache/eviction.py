"""`EvictionQueue`: prefix-tree nodes in the order in which their pages should go, least recently used first.

Refuses: deciding what of a node may go; the tree does when it gets the node.
"""

from __future__ import annotations

import heapq

from headrace.scheduling.cache.node import Node

SLACK = 64  # dead heap entries tolerated beyond twice the live ones


class EvictionQueue:
    """A lazy heap with at most one live entry per node.

    Using a node again costs nothing here: its entry keeps the old time and is put back with the new one when it
    surfaces. Nodes used at the same time go parents first: a hit needs the end of a prefix more than its middle.
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

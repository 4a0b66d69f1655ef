"""`FairLine`: who is next among those who share the engine: a tree of clients and their HTTP requests, in which the
children of a node get equal shares of tokens; `divide`: equal shares of a step's tokens.

Start-time fair queuing (Goyal et al. 1996) over the tokens that admitted requests compute, in integers. Refuses: order
within one HTTP request, which is the policy's.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping

from headrace.scheduling.request import Request

SCALE = 1 << 10
"""Units of virtual time per token."""
MAX_IDLE = 256
"""Idle children of a node that are kept with their debts before those without one are dropped."""

Path = tuple[str, ...]
Choose = Callable[[dict[int, Request], Request], Request]
"""``(waiting by arrival number, the oldest of them) -> the next``."""


class Share:
    """A node: a client, an HTTP request, or the root. ``tag`` is the virtual time at which its next request starts: the
    larger, the more it has had. ``clock`` is the virtual time among its children: it advances by the tokens admitted
    below, divided by the number of children that wait, so that a child that was idle starts level with the others."""

    __slots__ = ("ages", "children", "clock", "line", "newcomers", "num_active", "path", "size", "tag", "waiting")

    def __init__(self, path: Path = ()):
        self.path = path
        self.tag = self.clock = 0
        self.size = 0  # requests that wait in it and below
        self.num_active = 0  # children of which any wait
        self.children: dict[str, Share] = {}
        # Heap of (tag, whether it was charged since it waits, arrival number, child); some entries are stale. Of equal
        # tags those who had nothing yet go first.
        self.line: list[tuple[int, bool, int, Share]] = []
        self.newcomers: list[tuple[int, Share]] = []  # heap of (arrival number, child) of those without a row
        self.waiting: dict[int, Request] = {}  # its own, by arrival number; they go before its children's
        self.ages: list[int] = []  # heap of their arrival numbers, some no longer waiting

    def __lt__(self, other: Share) -> bool:
        return id(self) < id(other)  # heaps compare it when all else is equal; any order will do

    def next_child(self) -> Share:
        """The child that has had least. Some child must have a request that waits."""
        line = self.line
        while line[0][0] != line[0][3].tag or not line[0][3].size:
            heapq.heappop(line)
        return line[0][3]

    def next_newcomer(self, num_running: Mapping[Path, int]) -> Share | None:
        """The child that has waited longest without having a row."""
        newcomers = self.newcomers
        while newcomers and (not newcomers[0][1].size or newcomers[0][1].path in num_running):
            heapq.heappop(newcomers)
        return newcomers[0][1] if newcomers else None

    @property
    def priority(self) -> int:
        """The priority of what waits, which is the same for all under the priority policy."""
        node = self
        while not node.waiting:
            node = node.next_child()
        return node.oldest().priority

    def oldest(self) -> Request:
        """The oldest of its own requests, of which there must be one."""
        while self.ages[0] not in self.waiting:
            heapq.heappop(self.ages)
        return self.waiting[self.ages[0]]

    def activate(self, child: Share, seq: int) -> None:
        """A request waits below a child of which none did. What it had beyond its share before is not forgotten."""
        lowest = self.next_child().tag if self.num_active else 0
        child.tag = max(child.tag, self.clock, lowest)
        self.num_active += 1
        heapq.heappush(self.line, (child.tag, False, seq, child))
        heapq.heappush(self.newcomers, (seq, child))

    def forget_idle(self) -> None:
        """Drop children of which none wait: those without a debt, and if that leaves too many, all."""
        if len(self.children) <= 2 * self.num_active + MAX_IDLE:
            return
        self.children = {key: child for key, child in self.children.items() if child.size or child.tag > self.clock}
        if len(self.children) > self.num_active + MAX_IDLE // 2:
            self.children = {key: child for key, child in self.children.items() if child.size}


class FairLine:
    """Requests that wait, by the path of who sent them. O(depth · log n) for each operation but choosing within a node,
    which is the policy's. ``num_running``: requests that have a row, by each beginning of their paths."""

    def __init__(self, choose: Choose, num_running: Mapping[Path, int]):
        self._choose = choose
        self._num_running = num_running
        self._root = Share()
        self._numbers = itertools.count(1)  # below all arrival numbers when negative

    def __len__(self) -> int:
        return self._root.size

    def __contains__(self, share: Share) -> bool:
        node: Share | None = self._root
        for key in share.path:
            node = None if node is None else node.children.get(key)
        return node is share

    def push(self, request: Request, path: Path) -> None:
        """Let a request wait at a node. At an inner one it goes before all that wait below."""
        node = self._root
        node.size += 1
        for key in path:
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Share((*node.path, key))
            if not child.size:
                node.activate(child, request.seq)
            child.size += 1
            node = child
        node.waiting[request.seq] = request
        heapq.heappush(node.ages, request.seq)

    def head(self) -> Share:
        """The node whose turn it is; some request must wait."""
        node = self._root
        while not node.waiting:
            node = node.next_child()
        return node

    def newcomer(self) -> Share | None:
        """The client, or HTTP request of the client whose turn it is, that has no row and has waited longest."""
        node = self._root
        while not node.waiting:
            child = node.next_newcomer(self._num_running)
            if child is not None:
                return child
            node = node.next_child()
        return None

    def let_in(self, newcomer: Share) -> None:
        """Let this one have the next turn at its place, whatever it has had."""
        parent = self._root
        for key in newcomer.path[:-1]:
            parent = parent.children[key]
        newcomer.tag = min(newcomer.tag, parent.next_child().tag)
        heapq.heappush(parent.line, (newcomer.tag, False, -next(self._numbers), newcomer))

    def peek(self) -> Request:
        """The next request; one must wait."""
        node = self.head()
        return self._choose(node.waiting, node.oldest())

    def remove(self, request: Request, path: Path) -> None:
        """Take a request out of the node that it was pushed to."""
        node = self._root
        node.size -= 1
        for key in path:
            child = node.children[key]
            child.size -= 1
            if not child.size:
                node.num_active -= 1
                node.forget_idle()
            node = child
        del node.waiting[request.seq]

    def charge(self, path: Path, num_tokens: int) -> None:
        """Tokens of a request of this path are computed, or with a negative number will not be after all."""
        node, cost = self._root, num_tokens * SCALE
        for key in path:
            child = node.children.get(key)
            if child is None:
                return
            node.clock += cost // max(1, node.num_active)
            child.tag += cost
            if child.size:
                heapq.heappush(node.line, (child.tag, True, next(self._numbers), child))
            node = child


def divide(total: int, demands: dict[Path, int]) -> dict[Path, int]:
    """Max-min fair shares of ``total`` tokens: nobody gets more than the demand, and what one leaves is divided among
    the others; equal shares for the first parts of the paths, then within each for the next."""
    by_first: dict[Path, dict[Path, int]] = {}
    for path, demand in demands.items():
        by_first.setdefault(path[:1], {})[path[1:]] = demand
    shares: dict[Path, int] = {}
    left, order = total, sorted(by_first.items(), key=lambda item: sum(item[1].values()))
    for index, (first, inner) in enumerate(order):
        share = min(sum(inner.values()), left // (len(order) - index))
        left -= share
        nested = divide(share, inner) if len(inner) > 1 else dict.fromkeys(inner, share)
        shares |= {first + rest: part for rest, part in nested.items()}
    return shares

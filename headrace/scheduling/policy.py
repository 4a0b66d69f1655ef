"""Which waiting request goes next: arrival order, longest cached prefix, or priority. `WaitingQueue` asks these.

Refuses: fairness. The queue overrules a policy for a request that was overtaken too often.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

from headrace.base.registry import Registry
from headrace.scheduling.request import Request

MAX_COMPARED = 128
"""Beyond so many waiting requests, longest-prefix goes by arrival: looking all of them up would cost more than it
wins."""

HitPages = Callable[[Request], int]


class Policy(Protocol):
    """``waiting`` maps arrival numbers to the requests that wait now; the queue owns it and keeps it true."""

    def __init__(self, waiting: dict[int, Request], hit_pages: HitPages): ...

    def push(self, request: Request) -> None:
        """A request was added to ``waiting``."""

    def choose(self, oldest: Request) -> Request:
        """The request to admit next; ``oldest`` is the one that arrived first. Removes nothing."""


class FcfsPolicy:
    """First come, first served. A retracted request keeps its place in line."""

    def __init__(self, waiting: dict[int, Request], hit_pages: HitPages):
        pass

    def push(self, request: Request) -> None:
        pass

    def choose(self, oldest: Request) -> Request:
        return oldest


class PriorityPolicy:
    """Highest ``priority`` first, then arrival."""

    def __init__(self, waiting: dict[int, Request], hit_pages: HitPages):
        self._waiting = waiting
        self._heap: list[tuple[int, int]] = []

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (-request.priority, request.seq))

    def choose(self, oldest: Request) -> Request:
        while self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._waiting[self._heap[0][1]]


class LongestPrefixPolicy:
    """Longest prefix in the tree first, so that requests that share one run while it is there; then arrival."""

    def __init__(self, waiting: dict[int, Request], hit_pages: HitPages):
        self._waiting = waiting
        self._hit_pages = hit_pages

    def push(self, request: Request) -> None:
        pass

    def choose(self, oldest: Request) -> Request:
        if len(self._waiting) > MAX_COMPARED:
            return oldest
        hit_pages = self._hit_pages
        return max(self._waiting.values(), key=lambda request: (hit_pages(request), -request.seq))


POLICIES: Registry[type[Policy]] = Registry("scheduling policy")
POLICIES.add("fcfs", "headrace.scheduling.policy:FcfsPolicy")
POLICIES.add("priority", "headrace.scheduling.policy:PriorityPolicy")
POLICIES.add("longest-prefix", "headrace.scheduling.policy:LongestPrefixPolicy")

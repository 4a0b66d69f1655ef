"""`WaitingQueue`: requests that wait for a row, and the policies that choose the next (arrival, priority, longest
prefix).

Refuses: followers of another request's prefill; ``sharing`` keeps those until the prefix tree holds what they wait for.
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
    """``waiting`` maps arrival numbers to the requests that wait now; the queue owns it and keeps it up to date."""

    def __init__(self, waiting: dict[int, Request], hit_pages: HitPages): ...

    def push(self, request: Request) -> None:
        """A request was added to ``waiting``."""

    def choose(self, oldest: Request) -> Request:
        """The request to admit next; ``oldest`` is the one that arrived first. Removes nothing."""


class FcfsPolicy:
    """First come, first served, by arrival: a retracted request is as old as before."""

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
        # Entries are removed lazily. A request that waits again may have two; both are dropped once it does not.
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
POLICIES.add("fcfs", "headrace.scheduling.queue:FcfsPolicy")
POLICIES.add("priority", "headrace.scheduling.queue:PriorityPolicy")
POLICIES.add("longest-prefix", "headrace.scheduling.queue:LongestPrefixPolicy")


class WaitingQueue:
    """The requests that wait for a row. No operation of its own looks at more than a few of them (a policy may).

    Fairness: a step that admits a request ahead of an older one overtakes the oldest. A request that has waited through
    ``starvation_steps`` such steps goes first, whatever the policy. It suffices to watch the oldest: whoever overtakes
    a younger request overtakes the oldest, too.
    """

    def __init__(self, policy_type: type[Policy], starvation_steps: int, hit_pages: HitPages):
        self._waiting: dict[int, Request] = {}
        self._by_age: list[int] = []  # heap of arrival numbers, some no longer waiting
        self._policy = policy_type(self._waiting, hit_pages)
        self._starvation_steps = starvation_steps
        self._overtakings = 0  # steps so far in which the oldest was overtaken
        self._is_overtaken = False  # in the current step: several admissions of one step count once

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request.seq in self._waiting

    def push(self, request: Request) -> None:
        """Let a request wait (again); its age is its arrival, not now."""
        self._waiting[request.seq] = request
        # Kept while a request only follows another one's prefill in between; `admit` clears it.
        if request.wait_mark is None:
            request.wait_mark = self._overtakings
        heapq.heappush(self._by_age, request.seq)
        self._policy.push(request)

    def peek(self) -> Request | None:
        """The next request, or None when none waits."""
        if not self._waiting:
            return None
        oldest = self._oldest()
        if self._overtakings - (oldest.wait_mark or 0) >= self._starvation_steps:
            return oldest
        return self._policy.choose(oldest)

    def admit(self, request: Request) -> None:
        """Remove a request that got a row."""
        if request is not self._oldest():
            self._is_overtaken = True
        request.wait_mark = None
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Remove a request for another reason. Its heap entries stay and are skipped later."""
        del self._waiting[request.seq]

    def end_step(self) -> None:
        """The step's admissions are over: count an overtaking if it had one."""
        self._overtakings += self._is_overtaken
        self._is_overtaken = False

    def _oldest(self) -> Request:
        while self._by_age[0] not in self._waiting:
            heapq.heappop(self._by_age)
        return self._waiting[self._by_age[0]]

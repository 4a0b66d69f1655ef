"""`WaitingQueue`: requests that wait for a row: equal shares for clients and for each client's HTTP requests
(``fairness``), and the policies that choose among the rest (arrival, priority, longest prefix).

Refuses: followers of another request's prefill; ``sharing`` keeps those until the prefix tree holds what they wait for.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Protocol

from headrace.base.registry import Registry
from headrace.scheduling.fairness import FairLine, Path, Share
from headrace.scheduling.request import Request

MAX_COMPARED = 128
"""Beyond so many waiting requests, longest-prefix goes by arrival: looking all of them up would cost more than it
wins."""

HitPages = Callable[[Request], int]


class Policy(Protocol):
    """Requests of a lower ``level`` go first whoever sent them. Those of one level are divided by ``path``, and within
    a path `choose` decides."""

    def __init__(self, hit_pages: HitPages): ...

    def level(self, request: Request) -> int:
        """0 for policies without priorities."""

    def path(self, request: Request) -> Path:
        """Among whom the request has its share: a part of its origin."""

    def overtakes(self, request: Request, oldest: Request) -> bool:
        """Whether admitting ``request`` before ``oldest`` is the policy's doing, and not a matter of shares."""

    def choose(self, waiting: dict[int, Request], oldest: Request) -> Request:
        """The next of those that wait, by arrival number. Removes nothing."""


class FcfsPolicy:
    """First come, first served: a retracted request is as old as before."""

    def __init__(self, hit_pages: HitPages):
        pass

    def level(self, request: Request) -> int:
        return 0

    def path(self, request: Request) -> Path:
        return request.origin

    def overtakes(self, request: Request, oldest: Request) -> bool:
        return False

    def choose(self, waiting: dict[int, Request], oldest: Request) -> Request:
        return oldest


class PriorityPolicy(FcfsPolicy):
    """Highest ``priority`` first, then arrival."""

    def level(self, request: Request) -> int:
        return -request.priority

    def overtakes(self, request: Request, oldest: Request) -> bool:
        return request.priority > oldest.priority


class LongestPrefixPolicy(FcfsPolicy):
    """Longest prefix in the tree first, so that requests that share one run while it is there; then arrival. HTTP
    requests of one client have no shares of their own, as their prefixes may be the same."""

    def __init__(self, hit_pages: HitPages):
        self._hit_pages = hit_pages

    def path(self, request: Request) -> Path:
        return request.origin[:-1]

    def overtakes(self, request: Request, oldest: Request) -> bool:
        return request.origin[:-1] == oldest.origin[:-1]

    def choose(self, waiting: dict[int, Request], oldest: Request) -> Request:
        if len(waiting) > MAX_COMPARED:
            return oldest
        hit_pages = self._hit_pages
        return max(waiting.values(), key=lambda request: (hit_pages(request), -request.seq))


POLICIES: Registry[type[Policy]] = Registry("scheduling policy")
POLICIES.add("fcfs", "headrace.scheduling.queue:FcfsPolicy")
POLICIES.add("priority", "headrace.scheduling.queue:PriorityPolicy")
POLICIES.add("longest-prefix", "headrace.scheduling.queue:LongestPrefixPolicy")


class WaitingQueue:
    """The requests that wait for a row. No operation of its own looks at more than a few of them (a policy may).

    Starvation: a step that admits a request ahead of an older one, because the policy says so, overtakes the oldest. A
    request that has waited through ``starvation_steps`` such steps goes first, whatever the policy. It suffices to
    watch the oldest: whoever overtakes a younger request overtakes the oldest, too. ``num_running`` is that of
    `FairLine`.
    """

    def __init__(
        self, policy_type: type[Policy], starvation_steps: int, hit_pages: HitPages,
        num_running: Mapping[Path, int] | None = None,
    ):
        self._num_running = {} if num_running is None else num_running
        self._policy = policy_type(hit_pages)
        self._waiting: dict[int, tuple[Request, int, Path]] = {}  # with level and path, by arrival number
        self._by_age: list[int] = []  # heap of arrival numbers, some no longer waiting
        self._lines: dict[int, FairLine] = {}  # by level
        self._levels: list[int] = []  # heap of levels; each has a line
        self._starvation_steps = starvation_steps
        self._overtakings = 0  # steps so far in which the oldest was overtaken
        self._is_overtaken = False  # in the current step: several admissions of one step count once

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request.seq in self._waiting

    def push(self, request: Request, *, keeps_turn: bool = False) -> None:
        """Let a request wait (again); its age is its arrival, not now. ``keeps_turn``: it was its turn before, so it
        goes before all of its client that wait for theirs."""
        level, path = self._policy.level(request), self._policy.path(request)
        request.path = path
        if keeps_turn:
            path = path[: len(request.origin) - 1]
        # Kept while a request only follows another one's prefill in between; `admit` clears it.
        if request.wait_mark is None:
            request.wait_mark = self._overtakings
        if level not in self._lines:
            self._lines[level] = FairLine(self._policy.choose, self._num_running)
            heapq.heappush(self._levels, level)
        self._waiting[request.seq] = request, level, path
        self._lines[level].push(request, path)
        heapq.heappush(self._by_age, request.seq)

    def peek(self) -> Request | None:
        """The next request, or None when none waits."""
        if not self._waiting:
            return None
        oldest = self._oldest()
        if self._overtakings - (oldest.wait_mark or 0) >= self._starvation_steps:
            return oldest
        return self._next_line().peek()

    def next_in_turn(self) -> Request | None:
        """The oldest request of the client, or HTTP request, whose turn it is. Cheap, whatever the policy."""
        return self._next_line().head().oldest() if self._waiting else None

    def newcomer(self) -> Share | None:
        """A client, or HTTP request, that waits and has no row."""
        return self._next_line().newcomer() if self._waiting else None

    def let_in(self, newcomer: Share) -> None:
        """Let it have the next turn of its level. That need not be the next level any more: requests that followed what
        was retracted for it wait again, and may have a higher priority."""
        next(line for line in self._lines.values() if newcomer in line).let_in(newcomer)

    def admit(self, request: Request, num_tokens: int = 0) -> None:
        """Remove a request that got a row, for which ``num_tokens`` are expected to be computed."""
        oldest = self._oldest()
        if request is not oldest and self._policy.overtakes(request, oldest):
            self._is_overtaken = True
        request.wait_mark = None
        if request.path:
            self._charge(request, num_tokens)
        self.remove(request)

    def settle(self, request: Request, num_tokens: int) -> None:
        """Correct the expectation: ``num_tokens`` were computed for a request that has ended."""
        if request.charged_len:
            self._charge(request, num_tokens - request.charged_len)

    def remove(self, request: Request) -> None:
        """Remove a request for another reason. Its heap entries stay and are skipped later."""
        _, level, path = self._waiting.pop(request.seq)
        self._lines[level].remove(request, path)

    def end_step(self) -> None:
        """The step's admissions are over: count an overtaking if it had one."""
        self._overtakings += self._is_overtaken
        self._is_overtaken = False

    def _charge(self, request: Request, num_tokens: int) -> None:
        request.charged_len += num_tokens
        line = self._lines.get(self._policy.level(request))
        if line is not None and num_tokens:
            line.charge(request.path, num_tokens)

    def _next_line(self) -> FairLine:
        # Priorities come from users: lines of levels that nobody waits at are dropped.
        while not self._lines[self._levels[0]]:
            del self._lines[heapq.heappop(self._levels)]
        return self._lines[self._levels[0]]

    def _oldest(self) -> Request:
        while self._by_age[0] not in self._waiting:
            heapq.heappop(self._by_age)
        return self._waiting[self._by_age[0]][0]

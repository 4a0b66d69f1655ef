"""`WaitingQueue`: requests that could run now but have no row. Ordered by a policy, bounded by fairness.

Refuses: followers of another request's prefill; ``sharing`` keeps those until they have something to hit.
"""

from __future__ import annotations

import heapq

from headrace.scheduling.policy import HitPages, Policy
from headrace.scheduling.request import Request


class WaitingQueue:
    """No operation looks at more than a few requests, however many wait.

    Fairness: a step that admits a request ahead of an older one overtakes the oldest. A request that has waited through
    ``starvation_steps`` such steps goes first, whatever the policy. Only the oldest need be watched: whoever overtakes
    a younger one overtakes it too.
    """

    def __init__(self, policy_type: type[Policy], starvation_steps: int, hit_pages: HitPages):
        self._waiting: dict[int, Request] = {}
        self._by_age: list[int] = []  # heap of arrival numbers, some no longer waiting
        self._policy = policy_type(self._waiting, hit_pages)
        self._starvation_steps = starvation_steps
        self._overtakings = 0  # steps so far in which the oldest was overtaken
        self._is_overtaken = False

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request.seq in self._waiting

    def push(self, request: Request) -> None:
        """Let a request wait (again); its age is its arrival, not now."""
        self._waiting[request.seq] = request
        if request.wait_mark is None:
            request.wait_mark = self._overtakings
        heapq.heappush(self._by_age, request.seq)
        self._policy.push(request)

    def peek(self) -> Request | None:
        """Who goes next, or None when nobody waits."""
        if not self._waiting:
            return None
        oldest = self._oldest()
        if self._overtakings - (oldest.wait_mark or 0) >= self._starvation_steps:
            return oldest
        return self._policy.choose(oldest)

    def admit(self, request: Request) -> None:
        """The request got a row."""
        if request is not self._oldest():
            self._is_overtaken = True
        request.wait_mark = None
        self.remove(request)

    def remove(self, request: Request) -> None:
        """The request waits no longer, for another reason."""
        del self._waiting[request.seq]

    def end_step(self) -> None:
        """Count an overtaking, if this step had one."""
        self._overtakings += self._is_overtaken
        self._is_overtaken = False

    def _oldest(self) -> Request:
        while self._by_age[0] not in self._waiting:
            heapq.heappop(self._by_age)
        return self._waiting[self._by_age[0]]

"""`SharedPrefills`: in-batch prefix sharing. A request whose next pages another one is computing right now waits for
them instead of computing them again.

Only running requests lead. A leader has its row and pages, so it goes on or leaves the running set; either wakes its
followers. Leaders never follow: there is no cycle, and no deadlock.
"""

from __future__ import annotations

from headrace.scheduling.cache.node import Node
from headrace.scheduling.cache.prefix_tree import PrefixMatch
from headrace.scheduling.queue import WaitingQueue
from headrace.scheduling.request import Request

MAX_WAITS = 8
"""The most leaders that a request follows, one after another; then it computes for itself. Without a bound, it could be
delayed for ever by leaders that are aborted."""

Claim = tuple[Node, bytes]


class SharedPrefills:
    """A running prefill claims the first page that it will add to the tree: (node its stored prefix ends in, tokens of
    the page). A request that hits up to that very node and goes on with that very page shares the prefill."""

    def __init__(self, queue: WaitingQueue, page_size: int, *, is_enabled: bool):
        self._queue = queue
        self._page_size = page_size
        self._is_enabled = is_enabled
        self._leaders: dict[Claim, Request] = {}
        self._claims: dict[Request, Claim] = {}
        self.num_following = 0

    def find_leader(self, request: Request, match: PrefixMatch) -> Request | None:
        """The running request worth waiting for, if any."""
        if not self._leaders or match.node is None or match.node.end != match.num_pages:
            return None
        if request.num_shared_waits >= MAX_WAITS or request.needs_all_tokens:
            return None
        # ``match.node.end == match.num_pages``: the hit ends at a node's end, as a claim's stored prefix does.
        begin = match.num_pages * self._page_size
        end = begin + self._page_size
        if end >= request.known_len:  # one token must be computed, so this page cannot be a hit
            return None
        return self._leaders.get((match.node, request.key_bytes(begin, end)))

    def follow(self, request: Request, leader: Request) -> None:
        """Take a request out of the queue until the leader has stored all that they share, or stopped prefilling."""
        self._queue.remove(request)
        request.leader = leader
        request.num_shared_waits += 1
        request.shared_pages = self._count_shared_pages(request, leader)
        leader.followers.append(request)
        self.num_following += 1

    def update(self, request: Request) -> None:
        """A running request has been admitted or has stored pages: move its claim, and wake the followers whose
        pages are stored now."""
        if not self._is_enabled:
            return
        self._drop_claim(request)
        holding = request.holding
        if request.computed_len < request.goal_len and not request.was_doubted:
            begin = holding.stored * self._page_size
            end = begin + self._page_size
            if end <= request.goal_len:
                claim = (holding.node, request.key_bytes(begin, end))
                # Another running request may have the same claim already; that one keeps leading.
                if self._leaders.setdefault(claim, request) is request:
                    self._claims[request] = claim
        if request.followers:
            # Without a claim nothing more will be stored that could wake them: all go back to the queue.
            has_claim = request in self._claims
            self._wake([f for f in request.followers if not has_claim or f.shared_pages <= holding.stored])

    def leave(self, request: Request) -> None:
        """The request ends or is retracted: it no longer leads or follows. Its followers go back to the queue."""
        self._drop_claim(request)
        self._wake(list(request.followers))
        leader = request.leader
        if leader is not None:
            leader.followers.remove(request)
            request.leader = None
            self.num_following -= 1

    def _wake(self, followers: list[Request]) -> None:
        for follower in followers:
            leader = follower.leader
            assert leader is not None
            leader.followers.remove(follower)
            follower.leader = None
            self.num_following -= 1
            self._queue.push(follower, keeps_turn=True)

    def _drop_claim(self, request: Request) -> None:
        claim = self._claims.pop(request, None)
        if claim is not None:
            del self._leaders[claim]

    def _count_shared_pages(self, request: Request, leader: Request) -> int:
        """The number of leading pages that both have in common and that the request can use; by bisection, as comparing
        slices of an ``array`` is far cheaper than a loop over tokens."""
        # Pages below ``low`` are known to be equal: only the rest of a candidate is compared.
        low, high = 0, min(request.known_len - 1, leader.goal_len) // self._page_size
        while low < high:
            middle = (low + high + 1) // 2
            begin, end = low * self._page_size, middle * self._page_size
            if request.key_bytes(begin, end) == leader.key_bytes(begin, end):
                low = middle
            else:
                high = middle - 1
        return low

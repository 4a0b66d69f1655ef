"""`StorageTier`: pages between host memory and storage: written behind those of the host, and brought back while a
request waits to be queued.

Refuses: what storage holds; it is asked, and may forget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from headrace.base.messages import TierStats
from headrace.base.step import PageMove
from headrace.scheduling.cache.host_tier import HostTier
from headrace.scheduling.cache.ledger import CacheLedger
from headrace.scheduling.request import Request
from headrace.scheduling.transfers import NO_TICKET, Transfers

MOST_WRITING = 64
"""Pages of a group that are on their way to storage at a time: the host cannot evict these."""
BATCH = 16
"""Pages of one move to storage."""
MOST_DISTRUSTED = 1 << 16
"""Keys of distrusted pages that are remembered, the latest."""
LATE_S = 5.0
"""Seconds after which a request is queued without what has not come from storage."""


@dataclass
class _Wait:
    """A request that waits for storage, of so many retractions (``epoch``). ``known``: the pages of its prefix that
    were here when it began; ``hit``: what is on its way makes the prefix so long."""

    epoch: int
    keys: list[bytes]
    known: int
    hit: int


class StorageTier:
    """``ready``: held requests that wait for storage no longer."""

    def __init__(
        self, ledger: CacheLedger, host: HostTier, transfers: Transfers, clock: Callable[[], float], *, is_on: bool
    ):
        self._ledger, self._host, self._transfers, self._clock = ledger, host, transfers, clock
        self.is_on = is_on
        count = len(ledger.policies)
        self._unwritten: list[dict[bytes, None]] = [{} for _ in range(count)]
        self._num_writing = [0] * count
        self._fetching: list[dict[bytes, int]] = [{} for _ in range(count)]  # tickets by key
        self._distrusted: dict[bytes, None] = {}
        self._waiting: dict[int, list[tuple[Request, int]]] = {}  # by ticket: requests with their epochs
        self._generation = 0
        self.held: dict[Request, _Wait] = {}  # by when they began to wait
        self.ready: list[Request] = []
        self.num_written = self.num_read = self.num_failed = self.num_hit_tokens = self.num_late = 0

    @property
    def has_unwritten(self) -> bool:
        """Whether a page waits to be written."""
        return any(self._unwritten)

    # -- to storage ---------------------------------------------------------------------------------------------

    def note_held(self, group: int, key: bytes) -> None:
        """The host has a new page."""
        if self.is_on:
            self._unwritten[group][key] = None

    def distrust(self, keys: list[bytes]) -> None:
        """Read pages with these keys no more, as their numbers may not be finite: storage keeps what it has."""
        if self.is_on:
            self._distrusted.update(dict.fromkeys(keys))
            while len(self._distrusted) > MOST_DISTRUSTED:
                del self._distrusted[next(iter(self._distrusted))]

    def start_writing(self) -> None:
        """Open tickets for pages that the host still has."""
        for group, unwritten in enumerate(self._unwritten):
            while unwritten and self._num_writing[group] < MOST_WRITING:
                keys = [key for key in list(unwritten)[:BATCH]]
                for key in keys:
                    del unwritten[key]
                keys = [key for key in keys if self._host.has(group, key)]
                if keys:
                    pages = self._host.open_read(group, keys)
                    self._num_writing[group] += len(keys)
                    move = PageMove(NO_TICKET, group, "host", "storage", pages, [], keys)
                    self._transfers.open(move, self._end_writing, is_awaited=False)

    def _end_writing(self, move: PageMove, failed: list[int]) -> None:
        self._host.close_read(move.group, move.keys, move.source_pages)
        self._num_writing[move.group] -= len(move.keys)
        self.num_written += len(move.keys) - len(failed)
        self.num_failed += len(failed)

    # -- from storage -------------------------------------------------------------------------------------------

    def start_reading(self, request: Request, keys: list[bytes], known: int) -> bool:
        """Ask storage for pages of a prompt behind the first ``known``, which are here; whether the request has to
        wait for an answer."""
        if not self.is_on or request.skips_tiers or request.needs_all_tokens:
            return False
        if self._distrusted:
            keys = list(takewhile(lambda key: key not in self._distrusted, keys))
        if len(keys) <= known:
            return False
        found: list[set[bytes]] = [set() for _ in self._unwritten]
        for group in range(len(found)):
            wanted = [key for key in keys[known:] if not self._host.has(group, key)]
            if wanted:
                on_end = partial(self._end_asking, request, request.epoch, found)
                ticket = self._transfers.open(PageMove(NO_TICKET, group, "storage", "", [], [], wanted), on_end)
                request.tickets.add(ticket)
        if not request.tickets:
            return False
        request.awaits_until = self._clock() + LATE_S
        self.held[request] = _Wait(request.epoch, keys, known, known)
        return True

    def _end_asking(
        self, request: Request, epoch: int, found: list[set[bytes]], move: PageMove, failed: list[int]
    ) -> None:
        missing = set(failed)
        found[move.group] |= {key for index, key in enumerate(move.keys) if index not in missing}
        if not self._is_waiting(request, epoch):
            return
        request.tickets.discard(move.ticket)
        if not request.tickets:
            self._fetch(request, self.held[request], found)
            self._settle(request)

    def _fetch(self, request: Request, wait: _Wait, found: list[set[bytes]]) -> None:
        """Bring what makes the longest hit into the host."""
        keys, known = wait.keys, wait.known
        hit = self._host.find_hit(
            keys, known, len(keys), lambda group, key: self._host.has(group, key) or key in found[group]
        )
        if hit <= known:
            return
        self._host.touch(keys[:hit])
        wait.hit = hit
        for group, policy in enumerate(self._ledger.policies):
            first = max(known, policy.first_needed(hit * self._ledger.page_size))
            targets, wanted, fetching = [], [], self._fetching[group]
            for key in keys[first:hit]:
                if key in fetching:
                    self._await(request, fetching[key])
                elif not self._host.has(group, key):
                    page = self._host.take(group)
                    if page is None:
                        break
                    targets.append(page)
                    wanted.append(key)
            if wanted:
                move = PageMove(NO_TICKET, group, "storage", "host", [], targets, wanted)
                ticket = self._transfers.open(move, partial(self._end_fetching, self._generation))
                fetching.update(dict.fromkeys(wanted, ticket))
                self._await(request, ticket)

    def _await(self, request: Request, ticket: int) -> None:
        if ticket not in request.tickets:
            request.tickets.add(ticket)
            self._waiting.setdefault(ticket, []).append((request, request.epoch))

    def _end_fetching(self, generation: int, move: PageMove, failed: list[int]) -> None:
        lost = set(failed) if generation == self._generation else set(range(len(move.keys)))
        for index in reversed(range(len(move.keys))):
            self._fetching[move.group].pop(move.keys[index], None)
            if index in lost or move.keys[index] in self._distrusted:
                self._host.give_back(move.group, move.target_pages[index])
            else:
                self._host.put(move.group, move.keys[index], move.target_pages[index])
        self.num_read += len(move.keys) - len(lost)
        self.num_failed += len(failed)
        for request, epoch in self._waiting.pop(move.ticket, []):
            if self._is_waiting(request, epoch):
                request.tickets.discard(move.ticket)
                self._settle(request)

    def expire(self) -> None:
        """Let requests go on that have waited too long."""
        while self.held:
            request, wait = next(iter(self.held.items()))
            if request.epoch == wait.epoch and self._clock() < request.awaits_until:
                return
            if request.epoch == wait.epoch:
                self.num_late += 1
                request.tickets.clear()
                self.ready.append(request)
            del self.held[request]

    def _is_waiting(self, request: Request, epoch: int) -> bool:
        wait = self.held.get(request)
        return wait is not None and wait.epoch == epoch == request.epoch

    def _settle(self, request: Request) -> None:
        if not request.tickets:
            wait = self.held.pop(request)
            if wait.hit > wait.known:  # of what was on its way, not all may have arrived
                arrived = self._host.find_hit(wait.keys, wait.known, wait.hit)
                self.num_hit_tokens += (arrived - wait.known) * self._ledger.page_size
            self.ready.append(request)

    # -- state --------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop the copies that are on their way to the host."""
        self._generation += 1
        for unwritten in self._unwritten:
            unwritten.clear()

    def stats(self) -> TierStats:
        """Without the number of pages, which storage does not tell."""
        return TierStats(
            written_pages_total=self.num_written, read_pages_total=self.num_read, failed_pages_total=self.num_failed,
            hit_tokens_total=self.num_hit_tokens, late_total=self.num_late,
        )

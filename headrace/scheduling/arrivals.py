"""`Arrivals`: what becomes of requests that await pages. With their pages they go on; where a copy failed or is late,
they go back to the queue and compute."""

from __future__ import annotations

from collections.abc import Callable

from headrace.base.step import Arrival
from headrace.scheduling.admission import Admission
from headrace.scheduling.lifecycle import Lifecycle
from headrace.scheduling.queue import WaitingQueue
from headrace.scheduling.request import Request
from headrace.scheduling.running import RunningSet
from headrace.scheduling.sharing import SharedPrefills
from headrace.scheduling.tiering import Tiers


class Arrivals:
    """Ends tickets and waits."""

    def __init__(
        self, *, tiers: Tiers, running: RunningSet, lifecycle: Lifecycle, admission: Admission,
        queue: WaitingQueue, sharing: SharedPrefills, clock: Callable[[], float],
    ):
        self._tiers = tiers
        self._running = running
        self._lifecycle = lifecycle
        self._queue = queue
        self._sharing = sharing
        self._admission = admission
        self._clock = clock

    def commit(self, arrived: list[Arrival]) -> None:
        """End tickets, and let requests go on that wait for none any more."""
        tiers = self._tiers
        if arrived:
            tiers.transfers.commit(arrived)
        ready, tiers.arrived = tiers.arrived, []
        for request in ready:
            if request.skips_tiers:
                self._give_up(request)
            else:
                self._resume(request)

    def enter(self, request: Request) -> None:
        """Queue a request, or hold it while storage is asked for its prefix."""
        if self._tiers.storage.is_on and self._tiers.start_fetching(request, self._admission.match(request)):
            self._running.held[request] = None
        else:
            self._queue.push(request)

    def expire(self) -> None:
        """Stop waiting for what is late, and queue what waits for storage no longer. O(1) when nothing is."""
        storage = self._tiers.storage
        storage.expire()
        ready, storage.ready = storage.ready, []
        for request in ready:
            if request in self._running.held:
                del self._running.held[request]
                self._queue.push(request)
        while self._running.awaiting:
            request = next(iter(self._running.awaiting))
            if self._clock() < request.awaits_until:
                return
            self._tiers.num_late += 1
            self._give_up(request)

    def _resume(self, request: Request) -> None:
        """Its prefix is complete: it goes on behind that."""
        length = request.arriving_len
        self._tiers.num_hit_tokens += length - request.cached_len
        request.cached_len = request.computed_len = request.planned_len = length
        self._admission.note_start(request)
        self._lifecycle.store_computed(request)
        self._running.resume(request)
        self._sharing.update(request)

    def _give_up(self, request: Request) -> None:
        request.skips_tiers = True
        self._lifecycle.retract(request)

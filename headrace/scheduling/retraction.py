"""`Retraction`: who gives way when pages run out, once the prefix tree has nothing left to evict."""

from __future__ import annotations

from headrace.scheduling.admission import OutputForecast
from headrace.scheduling.cache.ledger import CacheLedger
from headrace.scheduling.exits import Exits
from headrace.scheduling.request import Request
from headrace.scheduling.roster import Roster


class Retraction:
    """The lowest priority goes first, then the youngest; the oldest running request never goes.

    So there is always progress: the oldest keeps what it computed and is given whatever the others leave, and alone it
    fits, or it would have been refused on arrival.
    """

    def __init__(
        self, *, ledger: CacheLedger, roster: Roster, exits: Exits, forecast: OutputForecast, by_priority: bool
    ):
        self._ledger = ledger
        self._roster = roster
        self._exits = exits
        self._forecast = forecast
        self._by_priority = by_priority

    def make_room(self, count: int) -> bool:
        """One victim, if ``count`` pages cannot be had in every group otherwise; returns whether there was one."""
        if self._ledger.reserve(count):
            return False
        self.retract_one()
        return True

    def retract_one(self) -> Request:
        """Send one running request back to the queue."""
        victim = self._choose_victim()
        self._exits.retract(victim)
        self._forecast.note_retraction()
        return victim

    def _choose_victim(self) -> Request:
        running = list(self._roster.running())
        oldest = min(running, key=lambda request: request.seq)
        others = [request for request in running if request is not oldest]
        assert others, f"{oldest} runs alone and does not fit; it should have been refused on arrival"
        if self._by_priority:
            return min(others, key=lambda request: (request.priority, -request.seq))
        return max(others, key=lambda request: request.seq)

"""`PageMover`: carries out the page moves of plans, in lanes by where they come from and go to.

Refuses: deciding what moves. A move that cannot be carried out fails; it never raises.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

from headrace.base.step import Arrival, PageMove

logger = logging.getLogger(__name__)

POLL_S = 0.0002
"""How often moves are looked at which cannot say themselves that they have ended: those on a GPU."""


class Lane(Protocol):
    """Moves between two places. All calls come from the thread that executes plans; none waits, but for `reset`."""

    def start(self, move: PageMove) -> None:
        """Begin a move. It ends in a later `poll`, whatever happens; or raises `RuntimeError` or `MemoryError`, when
        nothing of it is under way."""

    def poll(self) -> list[Arrival]:
        """Moves that have ended since."""

    def reset(self) -> None:
        """Wait for all moves or cancel them, and forget them: no page is touched afterwards."""

    def close(self) -> None:
        """`reset`, and free everything."""


def failed(move: PageMove) -> Arrival:
    """Nothing of the move has come."""
    return Arrival(move.ticket, list(range(move.num_pages)))


class PageMover:
    """The lanes of one rank."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._refused: list[Arrival] = []
        self._woken = threading.Event()

    def add(self, source: str, target: str, lane: Lane) -> None:
        """Carry out moves from one place to another in a lane; one lane may serve several pairs."""
        self._lanes[source, target] = lane

    def wake(self) -> None:
        """From any thread: a move has ended."""
        self._woken.set()

    def start(self, moves: list[PageMove]) -> None:
        """Begin the moves of a plan, before its spans are launched."""
        for move in moves:
            lane = self._lanes.get((move.source, move.target))
            if lane is None:
                logger.error("no lane from %r to %r: the pages are computed again", move.source, move.target)
                self._refused.append(failed(move))
                continue
            try:
                lane.start(move)
            except (RuntimeError, MemoryError) as error:  # a device without memory, mostly
                logger.error("%d pages do not move from %s to %s: %s", move.num_pages, move.source, move.target, error)
                self._refused.append(failed(move))

    def poll(self, wait_s: float = 0.0) -> list[Arrival]:
        """Moves that have ended since; waits so long for the first."""
        deadline = time.monotonic() + wait_s
        while True:
            self._woken.clear()  # before looking, or an end in between would be missed
            arrived, self._refused = self._refused, []
            for lane in self._each():
                arrived += lane.poll()
            if arrived or time.monotonic() >= deadline:
                return arrived
            self._woken.wait(POLL_S)

    def reset(self) -> None:
        """End all moves and forget them."""
        for lane in self._each():
            lane.reset()
        self._refused.clear()

    def close(self) -> None:
        """Free everything; idempotent."""
        for lane in self._each():
            lane.close()
        self._lanes.clear()

    def _each(self) -> list[Lane]:
        return list({id(lane): lane for lane in self._lanes.values()}.values())

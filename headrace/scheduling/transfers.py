"""`Transfers`: the tickets of page moves, from the plan that starts a move to the result in which it has arrived.

Refuses: knowing what is moved and why. Whoever opens a ticket is called once when it ends, and owns the pages.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headrace.base.step import Arrival, PageMove

NO_TICKET = 0
"""The ticket of a move that is not open yet."""

OnEnd = Callable[[PageMove, list[int]], None]
"""Called with the move, and the indices of its pages that did not come."""


class Transfers:
    """Open tickets. A ticket ends with its `Arrival`, or when the executor was reset: then nothing has come."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[PageMove, OnEnd]] = {}
        self._unsent: list[PageMove] = []
        self._awaited: set[int] = set()
        self._next_ticket = 1

    @property
    def num_open(self) -> int:
        """Tickets that have not ended."""
        return len(self._open)

    @property
    def num_awaited(self) -> int:
        """Open tickets for which an engine with nothing to compute keeps stepping."""
        return len(self._awaited)

    @property
    def has_unsent(self) -> bool:
        """Whether a move waits for the next plan."""
        return bool(self._unsent)

    def open(self, move: PageMove, on_end: OnEnd, *, is_awaited: bool = True) -> int:
        """Start a move with the next plan; returns its ticket, which replaces the one it has. ``is_awaited``: the
        engine stays awake until it ends."""
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        move = msgspec.structs.replace(move, ticket=ticket)
        self._open[ticket] = move, on_end
        self._unsent.append(move)
        if is_awaited:
            self._awaited.add(ticket)
        return ticket

    def take_moves(self) -> list[PageMove]:
        """The moves of the plan being made."""
        moves, self._unsent = self._unsent, []
        return moves

    def commit(self, arrived: list[Arrival]) -> None:
        """End tickets; those that are unknown ended before, with a reset."""
        for arrival in arrived:
            found = self._open.pop(arrival.ticket, None)
            if found is not None:
                self._end(*found, arrival.failed)

    def forget(self) -> None:
        """The executor was reset, or is about to be before the next plan: every open ticket ends with nothing moved."""
        while self._open:
            _, (move, on_end) = self._open.popitem()
            self._end(move, on_end, list(range(move.num_pages)))
        self._unsent = []  # last: the end of one move may open another, which has then ended too

    def _end(self, move: PageMove, on_end: OnEnd, failed: list[int]) -> None:
        self._awaited.discard(move.ticket)
        on_end(move, failed)

"""`ResponseStore`: responses of ``/v1/responses`` kept in memory, so that later requests can refer to them.

Bounded in bytes and time. A response belongs to the API key that requested it and does not exist for others. Refuses:
disk, and the content of responses.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from headrace.serving.http.protocol.responses import Response

BACKGROUND_BYTES = 16 * 2**20
"""Room for background responses where no others are stored: their clients come back for them."""
OVERHEAD_BYTES = 1024
"""Counted per response and per turn in addition to their texts."""


class Turn:
    """The input and output items of one request, as JSON lists. Turns form a tree by ``previous``: responses that
    continue the same response share its turns. ``num_holders`` counts the stored responses that end in this turn and
    the held turns that continue it; the bytes of a turn count while it is above 0."""

    __slots__ = ("input", "num_holders", "output", "previous")

    def __init__(self, input: bytes, output: bytes, previous: Turn | None):
        self.input, self.output, self.previous = input, output, previous
        self.num_holders = 0

    @property
    def num_bytes(self) -> int:
        return OVERHEAD_BYTES + len(self.input) + len(self.output)

    def history(self) -> list[Turn]:
        """All turns up to this one, oldest first."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.previous
        return turns[::-1]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it was sent, and the last turn of its conversation."""

    body: bytes
    turn: Turn
    expires: float


class RunningResponse(Protocol):
    """A response that is being generated."""

    owner: bytes
    is_running: bool

    def response(self) -> Response:
        """The response so far."""


class ResponseStore:
    """Keeps at most ``max_bytes``, evicting the least recently used; 0: only background responses, in
    `BACKGROUND_BYTES`. ``ttl_s``: seconds that a response is kept after its last use."""

    def __init__(self, max_bytes: int, ttl_s: float, *, clock: Callable[[], float] = time.monotonic):
        self.is_open = max_bytes > 0
        self._max_bytes, self._ttl_s, self._clock = max_bytes or BACKGROUND_BYTES, ttl_s, clock
        # by (owner, response id): equal ids of different owners stay separate
        self._stored: OrderedDict[tuple[bytes, str], StoredResponse] = OrderedDict()
        # An entry disappears with its writer, which the request's task or stream holds.
        self._running: WeakValueDictionary[str, RunningResponse] = WeakValueDictionary()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def note_running(self, response_id: str, response: RunningResponse) -> None:
        """Register a running response; only a weak reference is kept."""
        self._running[response_id] = response

    def find_running(self, owner: bytes, response_id: str) -> RunningResponse | None:
        """The owner's running response with this id."""
        running = self._running.get(response_id)
        return running if running is not None and running.owner == owner else None

    def put(self, owner: bytes, response_id: str, body: bytes, turn: Turn) -> None:
        """Store a response. One larger than the whole store is evicted at once."""
        # a client may choose the id of an earlier response
        self.drop(owner, response_id)
        self._stored[owner, response_id] = StoredResponse(body, turn, self._clock() + self._ttl_s)
        self.num_bytes += OVERHEAD_BYTES + len(body)
        self._hold(turn)
        self._make_room()

    def find(self, owner: bytes, response_id: str) -> StoredResponse | None:
        """The owner's response with this id, if it is still stored; renews its lifetime."""
        self._make_room()
        found = self._stored.pop((owner, response_id), None)
        if found is None:
            return None
        # Reinserted at the end: `_make_room` evicts from the front.
        kept = StoredResponse(found.body, found.turn, self._clock() + self._ttl_s)
        self._stored[owner, response_id] = kept
        return kept

    def drop(self, owner: bytes, response_id: str) -> bool:
        """Delete a response, and the turns that no other response shares; False when it is not stored."""
        self._make_room()
        found = self._stored.pop((owner, response_id), None)
        if found is not None:
            self._release(found)
        return found is not None

    def _make_room(self) -> None:
        """Evict expired and surplus responses. Insertion order is both order of use and order of expiry."""
        while self._stored:
            key, oldest = next(iter(self._stored.items()))
            if self.num_bytes <= self._max_bytes and oldest.expires > self._clock():
                return
            del self._stored[key]
            self._release(oldest)

    def _hold(self, turn: Turn) -> None:
        # A turn may have been released while its continuation ran (which references it): it is counted again here.
        holder: Turn | None = turn
        while holder is not None:
            holder.num_holders += 1
            if holder.num_holders > 1:
                return  # earlier turns are already counted through it
            self.num_bytes += holder.num_bytes
            holder = holder.previous

    def _release(self, stored: StoredResponse) -> None:
        self.num_bytes -= OVERHEAD_BYTES + len(stored.body)
        turn: Turn | None = stored.turn
        while turn is not None:
            turn.num_holders -= 1
            if turn.num_holders:
                return
            self.num_bytes -= turn.num_bytes
            turn = turn.previous

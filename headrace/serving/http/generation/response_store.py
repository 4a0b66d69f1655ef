"""`ResponseStore`: answers of ``/v1/responses`` kept in memory for a while, so that later requests can name them.

Bounded in bytes and in time; whoever asked owns the answer, to everybody else it does not exist. Refuses: disk, and
knowing what an answer looks like.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from headrace.serving.http.protocol.responses import Response

OVERHEAD_BYTES = 1024
"""Counted for an answer and for a turn beside their texts."""


class Turn:
    """What was said from one request to its answer, as JSON lists of items. Answers that go on from the same one share
    the turns before; the last that needs a turn frees it."""

    __slots__ = ("answer", "num_holders", "previous", "question")

    def __init__(self, question: bytes, answer: bytes, previous: Turn | None):
        self.question, self.answer, self.previous = question, answer, previous
        self.num_holders = 0

    @property
    def num_bytes(self) -> int:
        return OVERHEAD_BYTES + len(self.question) + len(self.answer)

    def history(self) -> list[Turn]:
        """All turns up to this one, in order."""
        turns, turn = [], self
        while turn is not None:
            turns.append(turn)
            turn = turn.previous  # type: ignore[assignment]
        return turns[::-1]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer as it was sent, and the conversation it is the end of."""

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
    """Keeps at most ``max_bytes``; the answers least recently used make room. 0: keeps nothing. ``ttl_s``: how long an
    answer is kept after it was last used."""

    def __init__(self, max_bytes: int, ttl_s: float, *, clock: Callable[[], float] = time.monotonic):
        self._max_bytes, self._ttl_s, self._clock = max_bytes, ttl_s, clock
        self._stored: OrderedDict[tuple[bytes, str], StoredResponse] = OrderedDict()
        self._running: WeakValueDictionary[str, RunningResponse] = WeakValueDictionary()
        self.num_bytes = 0

    @property
    def is_open(self) -> bool:
        """Whether anything is kept."""
        return self._max_bytes > 0

    def __len__(self) -> int:
        return len(self._stored)

    def note_running(self, response_id: str, answer: RunningResponse) -> None:
        """Let an answer on its way be found; it is forgotten with its last other reference."""
        self._running[response_id] = answer

    def find_running(self, owner: bytes, response_id: str) -> RunningResponse | None:
        """The owner's answer of that id, if it is on its way."""
        answer = self._running.get(response_id)
        return answer if answer is not None and answer.owner == owner else None

    def put(self, owner: bytes, response_id: str, body: bytes, turn: Turn) -> None:
        """Keep an answer. One that is larger than everything that may be kept is gone at once."""
        if not self.is_open:
            return
        self.drop(owner, response_id)
        self._stored[owner, response_id] = StoredResponse(body, turn, self._clock() + self._ttl_s)
        self.num_bytes += OVERHEAD_BYTES + len(body)
        self._hold(turn)
        self._make_room()

    def find(self, owner: bytes, response_id: str) -> StoredResponse | None:
        """The owner's answer of that id, if it is still there; it is kept for longer then."""
        self._make_room()
        found = self._stored.pop((owner, response_id), None)
        if found is None:
            return None
        kept = StoredResponse(found.body, found.turn, self._clock() + self._ttl_s)
        self._stored[owner, response_id] = kept
        return kept

    def drop(self, owner: bytes, response_id: str) -> bool:
        """Forget an answer, and what was said before it as far as no other answer needs it; False when it is not
        there."""
        self._make_room()
        found = self._stored.pop((owner, response_id), None)
        if found is not None:
            self._release(found)
        return found is not None

    def _make_room(self) -> None:
        """The order of use is the order of expiry, too."""
        while self._stored:
            key, oldest = next(iter(self._stored.items()))
            if self.num_bytes <= self._max_bytes and oldest.expires > self._clock():
                return
            del self._stored[key]
            self._release(oldest)

    def _hold(self, turn: Turn) -> None:
        holder: Turn | None = turn
        while holder is not None:
            holder.num_holders += 1
            if holder.num_holders > 1:
                return  # those before are held by it already
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

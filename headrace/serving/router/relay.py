"""`Relay`: the response of one worker on its way to a client. Nothing is sent before the first piece of the body has
come, so that until then another worker can be asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from starlette.types import Scope, Send

from headrace.serving.http.transport.connection import BodyWriter
from headrace.serving.http_client import Exchange, RawHeaders

RETRY_STATUSES = frozenset({429, 502, 503})
"""Another worker may do what this one refuses: its queue is full, or its engine is not there."""
MAX_HELD_BYTES = 1 << 20
MAX_BACKLOG_BYTES = 1 << 20
"""Most bytes that wait for a client that reads slowly; beyond them the worker's connection is paused."""
HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
})
SET_HERE = HOP_BY_HOP | {b"date", b"x-request-id"}
"""Not passed on to clients: what concerns the connection, and what the server and `RequestLedger` add to every
response."""


def end_to_end(headers: RawHeaders, dropped: frozenset[bytes]) -> RawHeaders:
    """The headers that are meant for the other end (RFC 9110, section 7.6.1), without ``dropped``, of which
    `HOP_BY_HOP` is a part. Names are lower case."""
    kept = [header for header in headers if header[0] not in dropped]
    for name, value in headers:
        if name == b"connection":
            listed = {each.strip().lower() for each in value.split(b",")}
            kept = [header for header in kept if header[0] not in listed]
    return kept


class Relay:
    """A `WorkerSink` that passes the response on. ``status`` is 0 until its head has come. Pieces of a stream are
    written from the worker's callback; for all else the task of `pass_on` wakes up."""

    def __init__(self, scope: Scope, send: Send, writer: BodyWriter, may_retry: bool):
        self.status = 0
        self.is_complete = False
        self.has_begun = False
        """Whether the client gets this response, whatever becomes of it."""
        self.begun_at = 0.0  # `time.perf_counter`, when the head came
        self.beginning = b""
        """The first piece of the body."""
        self.headers: RawHeaders = []
        self._scope, self._send, self._writer, self._may_retry = scope, send, writer, may_retry
        self._exchange: Exchange | None = None
        self._is_started = self._is_ended = self._is_paused = False
        self._is_direct = False  # the head is sent, and nothing is being sent
        self._backlog: list[bytes] = []
        self._backlog_bytes = 0
        self._changed = asyncio.Event()

    @property
    def is_wanted(self) -> bool:
        """See `WorkerSink`."""
        return not self._writer.is_lost

    @property
    def is_held(self) -> bool:
        """Whether the response is one after which another worker can be asked."""
        return self._may_retry and self.status in RETRY_STATUSES and self._backlog_bytes <= MAX_HELD_BYTES

    @property
    def media_type(self) -> str:
        """The ``Content-Type``."""
        return next((value.decode("latin-1") for name, value in self.headers if name == b"content-type"), "")

    def begin(self, status: int, headers: RawHeaders) -> None:
        """See `ResponseSink`."""
        self.status, self.headers, self.begun_at = status, headers, time.perf_counter()

    def take(self, now: float, piece: bytes) -> None:
        """See `ResponseSink`."""
        if self._is_direct and not self._backlog and self._writer.is_free:
            self._writer.write_at_once(piece)  # the way of streamed tokens: no task, no await
            return
        self.beginning = self.beginning or piece
        self._backlog.append(piece)
        self._backlog_bytes += len(piece)
        if self.is_held:
            return
        self.has_begun = True
        if self._backlog_bytes > MAX_BACKLOG_BYTES and not self._is_paused and self._exchange is not None:
            self._is_paused = True
            self._exchange.pause_reading()
        self._changed.set()

    async def pass_on(self, start: Callable[[Callable[[], None]], Exchange]) -> None:
        """Begin an exchange by ``start``, which gets what to call at its end, and send the response as it comes. When
        it has ended, what it has left, if anything, is for `finish`."""
        self._exchange = start(self._end)
        try:
            while not self._is_ended:
                await self._changed.wait()
                self._changed.clear()
                if not self._is_ended:
                    await self._send_backlog()
        finally:
            self.abort()

    def abort(self) -> None:
        """See `WorkerSink`."""
        if self._exchange is not None:
            self._exchange.abort()

    async def finish(self, last: bytes = b"") -> None:
        """Send the rest, and ``last``."""
        await self._start()
        body = b"".join((*self._backlog, last))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def break_off(self) -> None:
        """Send the rest, and leave the body incomplete."""
        await self._send_backlog()

    def _end(self) -> None:
        self._is_ended = True
        self._changed.set()

    async def _start(self) -> None:
        if self._is_started:
            return
        self._is_started = True
        headers = end_to_end(self.headers, SET_HERE)
        request_id = next((value for name, value in self.headers if name == b"x-request-id"), None)
        if request_id is not None:
            self._scope.setdefault("state", {})["request_id"] = request_id.decode("latin-1")
        await self._send({"type": "http.response.start", "status": self.status, "headers": headers})

    async def _send_backlog(self) -> None:
        self._is_direct = False
        await self._start()
        while self._backlog:
            pieces = b"".join(self._backlog)
            self._backlog.clear()
            self._backlog_bytes = 0
            await self._send({"type": "http.response.body", "body": pieces, "more_body": True})
        self._is_direct = True
        if self._is_paused and self._exchange is not None:
            self._is_paused = False
            self._exchange.resume_reading()

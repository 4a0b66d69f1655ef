"""`Relay`: the response of one worker on its way to a client. Nothing is sent before the first piece of the body has
come, so that until then another worker can be asked."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Scope, Send

from headrace.serving.http.transport.connection import body_writer
from headrace.serving.http_client import RawHeaders

RETRY_STATUSES = frozenset({429, 502, 503})
"""Another worker may do what this one refuses: its queue is full, or its engine is not there."""
MAX_HELD_BYTES = 1 << 20
MAX_BACKLOG_BYTES = 1 << 20
"""Of a client that reads slowly; the worker then has to wait."""
_HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
})

_SET_HERE = frozenset({b"date", b"x-request-id"})
"""Added to every response by the server and by `RequestLedger`."""


def end_to_end(headers: RawHeaders, dropped: frozenset[bytes] = frozenset()) -> RawHeaders:
    """The headers that are meant for the other end (RFC 9110, section 7.6.1), without ``dropped``. Names are lower
    case."""
    listed = [value for name, value in headers if name == b"connection"]
    gone = _HOP_BY_HOP | dropped
    if listed:
        gone = gone.union(name.strip().lower() for value in listed for name in value.split(b","))
    return [header for header in headers if header[0] not in gone]


class Relay:
    """A `ResponseSink` that passes the response on. ``status`` is 0 until its head has come."""

    def __init__(self, scope: Scope, send: Send, may_retry: bool):
        self.status = 0
        self.is_complete = False
        self.has_begun = False
        """Whether the client has got anything."""
        self.begun_at = 0.0  # `time.perf_counter`, when the head came
        self.beginning = b""
        """The first piece of the body."""
        self.headers: RawHeaders = []
        self._scope, self._send, self._may_retry = scope, send, may_retry
        self._writer = body_writer(scope)
        self._transport: asyncio.Transport | None = None
        self._is_aborted = self._is_paused = False
        self._backlog: list[bytes] = []
        self._backlog_bytes = 0
        self._sending: asyncio.Task[None] | None = None

    @property
    def is_held(self) -> bool:
        """Whether the response is one after which another worker can be asked."""
        return self._may_retry and self.status in RETRY_STATUSES and self._backlog_bytes <= MAX_HELD_BYTES

    @property
    def media_type(self) -> str:
        """The ``Content-Type``."""
        return next((value.decode("latin-1") for name, value in self.headers if name == b"content-type"), "")

    def connected(self, transport: asyncio.Transport) -> None:
        """See `ResponseSink`."""
        self._transport = transport
        if self._is_aborted:
            transport.abort()

    def begin(self, status: int, headers: RawHeaders) -> None:
        """See `ResponseSink`."""
        self.status, self.headers, self.begun_at = status, headers, time.perf_counter()

    def take(self, now: float, piece: bytes) -> None:
        """See `ResponseSink`."""
        if self.has_begun and self._sending is None and self._writer is not None and self._writer.is_free:
            self._writer.write(piece)  # the way of streamed tokens: no task, no await
            return
        self.beginning = self.beginning or piece
        self._backlog.append(piece)
        self._backlog_bytes += len(piece)
        if self.is_held:
            return
        if self._backlog_bytes > MAX_BACKLOG_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        if self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._send_backlog())

    def abort(self) -> None:
        """Give up the worker's part, as if its connection had broken."""
        self._is_aborted = True
        if self._transport is not None:
            self._transport.abort()

    async def finish(self) -> None:
        """The worker's response is complete: send the rest."""
        await self.flush()
        await self._start()
        await self._send_backlog()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def flush(self) -> None:
        """Wait until what was begun to be sent is sent."""
        if self._sending is not None:
            await self._sending

    async def _start(self) -> None:
        if self.has_begun:
            return
        self.has_begun = True
        headers = end_to_end(self.headers, _SET_HERE)
        request_id = next((value for name, value in self.headers if name == b"x-request-id"), None)
        if request_id is not None:
            self._scope.setdefault("state", {})["request_id"] = request_id.decode("latin-1")
        await self._send({"type": "http.response.start", "status": self.status, "headers": headers})

    async def _send_backlog(self) -> None:
        try:
            await self._start()
            while self._backlog:
                pieces = b"".join(self._backlog)
                self._backlog.clear()
                self._backlog_bytes = 0
                await self._send({"type": "http.response.body", "body": pieces, "more_body": True})
        finally:
            self._sending = None
            if self._is_paused and self._transport is not None:
                self._is_paused = False
                self._transport.resume_reading()

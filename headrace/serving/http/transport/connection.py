"""`BurstWriter`: writes of one turn of an event loop, as one.

A system call for every few bytes wakes their reader each time, and code of the system and our own throw one another out
of the caches when they take turns.


What uvicorn's fast HTTP parser lacks: bounds on the size of a request's head and on the time it may take, bodies of
requests that offer an upgrade, answers that reach clients who are still sending, and streams to clients who know no
chunks. Refuses: upgrades; this server speaks HTTP/1.0 and 1.1.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.types import Message, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.base.errors import RequestError
from headrace.serving.http.protocol.errors import describe_error


class BurstWriter:
    """Stands before a transport. What is written is held until the loop's next turn: then this transport's pieces go
    out together, and those of others right before and behind. Everything but writing is the transport's."""

    __slots__ = ("_held", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport):
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Take bytes; never waits."""
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)

    def close(self) -> None:
        """Send what is held, then close."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._held.clear()
        self._transport.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        if self._held and not self.is_closing():
            self._transport.write(b"".join(self._held))
        self._held.clear()


MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 60.0

REST_TIMEOUT_S, MAX_REST_BYTES = 60.0, 1 << 30
"""How long, and how much, is read and dropped of what a client goes on sending after its answer. Most look at the
answer only when all is sent; the bounds are far above what somebody sends by mistake, and dropping costs a gigabyte
about a second."""
END_OF_HEAD = b"\r\n\r\n"

EXTENSION = "headrace.body"
"""Under this name a scope's ``extensions`` have the request's `BodyWriter`, when the server is this one and nobody
between it and the route looks at bodies."""
UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


def _refusal(status: int, message: str) -> bytes:
    """The whole answer to what could not be read as a request. In OpenAI's form: there is no path to tell another
    by."""
    error = RequestError(message)
    error.status = status
    body = msgspec.json.encode(describe_error(error))
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\ncontent-length: "
        f"{len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


class BodyWriter:
    """Writes pieces of an answer's body at once, past the tasks and wrappers that ``send`` awaits: what a token costs
    most."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = cycle

    @property
    def is_free(self) -> bool:
        """Whether a piece would go straight to a client who keeps up. Else ``send`` knows what to do."""
        cycle = self._cycle
        is_open = cycle.response_started and not cycle.response_complete and cycle.chunked_encoding is True
        return is_open and not cycle.disconnected and not cycle.flow.write_paused

    def write(self, piece: bytes) -> None:
        """Send a piece that is not empty."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


def body_writer(scope: Scope) -> BodyWriter | None:
    """The writer of this request's answer, where there is one."""
    found = scope.get("extensions", {}).get(EXTENSION)
    return found if isinstance(found, BodyWriter) else None


def forgo_writer(scope: Scope) -> None:
    """Whoever looks at bodies on their way out calls this, so that all of them pass through ``send``."""
    scope.get("extensions", {}).pop(EXTENSION, None)


class LingeringWriter(BurstWriter):
    """The first `close` ends only what is written, when ``lingers`` says that the client may still be sending; the
    second closes. A connection that is closed with bytes unread is reset, which takes along the answer before the
    client has read it (RFC 9112, section 9.6)."""

    __slots__ = ("_is_ended", "_lingers")

    def __init__(self, transport: asyncio.Transport, lingers: Callable[[], bool]):
        super().__init__(transport)
        self._is_ended = False
        self._lingers = lingers

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""
        return self._is_ended or self._transport.is_closing()

    def close(self) -> None:
        """Send what is held, then close, or wait for the client to do so."""
        if self.is_closing() or not self._lingers():
            super().close()
            return
        self._flush()
        self._is_ended = True
        try:
            self._transport.write_eof()
        except OSError:  # the client is gone
            self._transport.abort()


class UnframedAnswer:
    """The ``send`` of a request of HTTP/1.0, which knows no chunks: a body whose length nobody states ends with the
    connection."""

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = cycle
        self._send: Callable[..., Any] = cycle.send
        self._is_unframed = False

    async def send(self, message: Message) -> None:
        """As `RequestResponseCycle.send`."""
        if message["type"] == "http.response.start":
            self._is_unframed = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if self._is_unframed:
                self._cycle.chunked_encoding = False
        elif self._is_unframed:
            self._cycle.expected_content_length = len(message.get("body", b""))  # of this piece: it may be any
        await self._send(message)


class BoundedHttp(HttpToolsProtocol):
    """Ends a connection whose request line and headers pass `MAX_HEAD_BYTES`, before they pile up, or do not come
    within `HEAD_TIMEOUT_S`. What a client sends beyond an answer, because it was answered before its body was read, is
    dropped.

    Takes offers of an upgrade out of a head that comes in one piece: the parser drops the body of such a request, and
    Java's HTTP client offers HTTP/2 with every one.
    """

    _is_in_head = True
    _is_dropping = False
    _num_head_bytes = 0
    _num_dropped = 0
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(LingeringWriter(transport, self._drop_rest))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_patience()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_dropping:
            self._num_dropped += len(data)
            if self._num_dropped > MAX_REST_BYTES:
                self.transport.abort()
            if self.transport.is_closing():
                return
        elif self._is_in_head:
            end = data.find(END_OF_HEAD)
            if self._num_head_bytes + end > MAX_HEAD_BYTES:
                self._refuse()
                return
            if end > 0 and not self._num_head_bytes:
                data = UPGRADE.sub(b"", data[:end]) + data[end:]
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse()
        elif self._is_in_head and self._num_head_bytes and self._patience is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._forget_patience()
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope["extensions"] = {EXTENSION: BodyWriter(self.cycle)}
            if self.parser.get_http_version() < "1.1":
                self.cycle.send = UnframedAnswer(self.cycle).send  # its task begins in the loop's next turn

    def on_message_complete(self) -> None:
        self._is_in_head, self._num_head_bytes = True, 0
        if self._is_dropping:
            self._is_dropping = False
            self._forget_patience()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # and no other, whose body is read
            self._drop_rest()

    def send_400_response(self, msg: str) -> None:
        """Of uvicorn: answer what the parser does not take, and close."""
        self.transport.write(_refusal(400, "this is no request of HTTP/1.1, as this server speaks it"))
        self.transport.close()

    def _await_head(self) -> None:
        self._patience = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _forget_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _drop_rest(self) -> bool:
        """Begin to drop what still comes of a request, if anything may."""
        if self._is_in_head:
            return False
        if not self._is_dropping:
            self._is_dropping, self._num_dropped = True, 0
            self._patience = self.loop.call_later(REST_TIMEOUT_S, self.transport.abort)
            self.flow.resume_reading()
        return True

    def _refuse(self) -> None:
        self._is_in_head = False  # whatever still comes is of no head
        self._forget_patience()
        self.transport.write(_refusal(431, f"the request line and headers have more than {MAX_HEAD_BYTES} bytes"))
        self.transport.close()

"""What uvicorn's fast HTTP parser lacks: limits on the size and duration of a request's head, bodies of requests that
offer an upgrade, responses to clients that are still sending, streams to HTTP/1.0 clients, and batched writes. Refuses:
upgrades; this server speaks HTTP/1.0 and 1.1.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import msgspec
from starlette.types import Message, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.base.errors import RequestError
from headrace.serving.http.protocol.errors import describe_error

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 60.0
REST_TIMEOUT_S, MAX_REST_BYTES = 60.0, 1 << 30
"""How long and how much is read and dropped of a body after its response. Most clients read the response only when all
is sent. The limits are far above what is sent by mistake; dropping costs about a second per gigabyte."""
END_OF_HEAD = b"\r\n\r\n"
EXTENSION = "headrace.body"
"""The key in a scope's ``extensions`` under which a route finds the request's `BodyWriter`; absent on other servers and
when middleware reads response bodies."""
UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


class BurstWriter:
    """Wraps a transport and joins the writes of one event loop turn. Each system call wakes the client, and alternating
    between kernel and Python code evicts both from the caches: in the next turn this transport's pieces are written
    together, back to back with those of other connections. All other methods are the transport's."""

    __slots__ = ("_loop", "_pending", "_transport")

    def __init__(self, transport: asyncio.Transport):
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._pending: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Queue bytes; never blocks."""
        if not self._pending:
            self._loop.call_soon(self._flush)
        # The scheduled flush runs in the next turn. The transport's high-water mark does not count `_pending`.
        self._pending.append(data)

    def close(self) -> None:
        """Flush, then close."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._pending.clear()
        self._transport.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        # Checked: writing after `write_eof` raises. A flush scheduled before `close` finds `_pending` empty.
        if self._pending and not self.is_closing():
            self._transport.write(b"".join(self._pending))
        self._pending.clear()


def _refusal(status: int, message: str) -> bytes:
    """The whole response (head and body) to bytes that are not a valid request. In OpenAI's form: no path is known
    that could select another API's."""
    error = RequestError(message)
    error.status = status
    body = msgspec.json.encode(describe_error(error))
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\ncontent-length: "
        f"{len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


class BodyWriter:
    """Writes pieces of a response body directly, without the awaits and wrappers of ``send``, which are most of the
    cost of a streamed token."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = cycle

    @property
    def is_free(self) -> bool:
        """Whether a piece can be written now: the stream is open and the client keeps up. Otherwise use ``send``."""
        cycle = self._cycle
        # `chunked_encoding` is False for HTTP/1.0 (`UnframedResponse`) and for bodies with a declared length.
        is_open = cycle.response_started and not cycle.response_complete and cycle.chunked_encoding is True
        return is_open and not cycle.disconnected and not cycle.flow.write_paused

    def write(self, piece: bytes) -> None:
        """Send a non-empty piece as one chunk."""
        # One chunk of RFC 9112, section 7.1: size in hex, CRLF, data, CRLF. An empty one would end the body.
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


def body_writer(scope: Scope) -> BodyWriter | None:
    """The writer of this request's response, if there is one."""
    found = scope.get("extensions", {}).get(EXTENSION, {}).get("writer")
    return found if isinstance(found, BodyWriter) else None


def drop_writer(scope: Scope) -> None:
    """For middleware that reads response bodies: makes all of them pass through ``send``."""
    scope.get("extensions", {}).pop(EXTENSION, None)


class LingeringWriter(BurstWriter):
    """If ``lingers`` says that the client may still be sending, the first `close` only shuts down the write side; the
    second closes. Closing with unread bytes resets the connection, and the client may lose the response before reading
    it (RFC 9112, section 9.6)."""

    __slots__ = ("_is_ended", "_lingers")

    def __init__(self, transport: asyncio.Transport, lingers: Callable[[], bool]):
        super().__init__(transport)
        self._is_ended = False
        self._lingers = lingers

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""
        return self._is_ended or self._transport.is_closing()

    def close(self) -> None:
        """Flush, then close or wait for the client to close."""
        if self.is_closing() or not self._lingers():
            super().close()
            return
        self._flush()  # before `_is_ended`, which makes `_flush` drop what is pending
        self._is_ended = True
        try:
            self._transport.write_eof()
        except OSError:  # the client is gone
            self._transport.abort()


class UnframedResponse:
    """``send`` for HTTP/1.0, which has no chunked encoding: a body without a declared length ends with the
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
            # uvicorn counts body bytes down from this: set per piece, it accepts any total
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


class BoundedHttp(HttpToolsProtocol):
    """Closes connections whose request line and headers exceed `MAX_HEAD_BYTES` or take longer than `HEAD_TIMEOUT_S`.
    Drops body bytes that arrive after an early response.

    Removes ``Upgrade`` from a head that arrives in one piece: the parser drops the body of such requests, and Java's
    HTTP client offers HTTP/2 with every request.
    """

    _is_in_head = True
    _is_dropping = False
    _num_head_bytes = 0
    _num_dropped = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        writer = LingeringWriter(transport, self._drop_rest)
        super().connection_made(cast("asyncio.Transport", writer))  # it delegates what it does not define
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_dropping:
            self._num_dropped += len(data)
            if self._num_dropped > MAX_REST_BYTES:
                self.transport.abort()
            if self.transport.is_closing():
                return
        elif self._is_in_head:
            # Checked before the parser, which would buffer a head of any size.
            end = data.find(END_OF_HEAD)
            # -1 while the head is incomplete; its size is then checked after the parser.
            if self._num_head_bytes + end > MAX_HEAD_BYTES:
                self._refuse()
                return
            # Only when the whole head is in this piece: a header line may be split between two pieces.
            if end > 0 and not self._num_head_bytes:
                data = UPGRADE.sub(b"", data[:end]) + data[end:]
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse()
        # First bytes of a later request on a kept connection. Between requests uvicorn's keep-alive timer runs.
        elif self._is_in_head and self._num_head_bytes and self._timer is None:
            self._start_head_timer()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._cancel_timer()
        super().on_headers_complete()
        # False when uvicorn made no cycle for this head.
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope["extensions"] = {EXTENSION: {"writer": BodyWriter(self.cycle)}}
            if self.parser.get_http_version() < "1.1":
                # The cycle's task starts in the loop's next turn; uvicorn has no hook for its ``send``.
                self.cycle.send = UnframedResponse(self.cycle).send  # type: ignore[method-assign,assignment]

    def on_message_complete(self) -> None:
        self._is_in_head, self._num_head_bytes = True, 0
        if self._is_dropping:
            self._is_dropping = False
            self._cancel_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # not a pipelined one whose body is still needed
            self._drop_rest()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what the parser rejects: respond and close."""
        self.transport.write(_refusal(400, "not a valid HTTP/1.1 request"))
        self.transport.close()

    def _start_head_timer(self) -> None:
        # `_drop_rest` returns False while a head is read, so this close does not linger.
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop_rest(self) -> bool:
        """Start to drop the rest of the body; returns False if the body has arrived completely. `LingeringWriter` calls
        this to decide whether to linger."""
        if self._is_in_head:
            return False
        if not self._is_dropping:
            self._is_dropping, self._num_dropped = True, 0
            # Bounded in time and bytes: a client that never stops sending must not hold the connection.
            self._timer = self.loop.call_later(REST_TIMEOUT_S, self.transport.abort)
            self.flow.resume_reading()  # paused for back-pressure while the body had a reader
        return True

    def _refuse(self) -> None:
        self._is_in_head = False  # so that `close` lingers, and `data_received` drops what follows unparsed
        self._cancel_timer()
        self.transport.write(_refusal(431, f"the request line and headers have more than {MAX_HEAD_BYTES} bytes"))
        self.transport.close()

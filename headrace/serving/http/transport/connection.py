"""What uvicorn's fast HTTP parser lacks: limits on the size and duration of a request's head, bodies of requests that
offer an upgrade, responses to clients that are still sending, streams to HTTP/1.0 clients, and batched writes. Refuses:
upgrades; this server speaks HTTP/1.0 and 1.1.
"""

from __future__ import annotations

import asyncio
import re
import select
import socket
import sys
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
NOT_HTTP = 400, "not a valid HTTP/1.1 request"
TOO_LONG = 431, f"the request line and headers have more than {MAX_HEAD_BYTES} bytes"
EXTENSION = "headrace.body"
"""The key in a scope's ``extensions`` under which a route finds the request's `BodyWriter`; absent on other servers and
when middleware reads response bodies."""
CHECK_S, FIRST_PROBE_S, LAST_PROBE_S = 0.25, 1.0, 8.0
"""Seconds between two looks at a half-closed connection; until its first probe; most between two probes."""
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
KEEPALIVE_S = 15
UPGRADE = re.compile(rb"\r\n(?i:upgrade):[^\r\n]*")


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
            self._loop.call_soon(self.flush)
        # The scheduled flush runs in the next turn. The transport's high-water mark does not count `_pending`.
        self._pending.append(data)

    def close(self) -> None:
        """Flush, then close."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._pending.clear()
        self._transport.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def flush(self) -> None:
        """Write what is queued now."""
        # Checked: writing after `write_eof` raises. A flush scheduled before `close` finds `_pending` empty.
        if self._pending and not self.is_closing():
            self._transport.write(b"".join(self._pending))
        self._pending.clear()


def describe_refusal(status: int, message: str) -> bytes:
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
        self.flush()  # before `_is_ended`, which makes `flush` drop what is pending
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


class HalfClosed:
    """Watches a connection whose client sends nothing more but may still read. A client that has closed its socket
    sends the same FIN, and its system resets the connection at the next byte that it gets. Streams send such bytes; for
    other responses this sends the interim one that every HTTP/1.1 client expects (RFC 9110, section 15.2), while
    ``may_probe``. For the rest, TCP's own probes find out within about a minute. A reset connection is aborted."""

    def __init__(self, transport: asyncio.Transport, may_probe: Callable[[], bool]):
        self._transport, self._may_probe = transport, may_probe
        self._loop = asyncio.get_running_loop()
        self._began, self._pause_s = self._loop.time(), FIRST_PROBE_S
        self._next_probe = self._began + FIRST_PROBE_S
        peer = transport.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            for option, value in ((socket.TCP_KEEPIDLE, KEEPALIVE_S), (socket.TCP_KEEPINTVL, KEEPALIVE_S)):
                peer.setsockopt(socket.IPPROTO_TCP, option, value)
        self._events = select.poll()
        self._events.register(peer.fileno(), 0)  # errors and hang-ups are always reported
        self._timer = self._loop.call_later(CHECK_S, self._check)

    def cancel(self) -> None:
        """Watch no longer."""
        self._timer.cancel()

    def _check(self) -> None:
        if self._events.poll(0):  # a reset; the event loop does not read any more and would not see it
            self._transport.abort()
            return
        if self._loop.time() >= self._next_probe and self._may_probe():
            self._transport.write(PROBE)
            self._pause_s = min(2 * self._pause_s, LAST_PROBE_S)
            self._next_probe = self._loop.time() + self._pause_s
        self._timer = self._loop.call_later(CHECK_S, self._check)


class MessageBounds:
    """Counts what httptools' parser keeps of a request, however long that is: its head, and of its body what is no
    content, such as an endless trailer; at most `MAX_HEAD_BYTES` of either. Also removes ``Upgrade`` from a head that
    comes in one piece: the parser drops the body of such requests, and Java's HTTP client offers HTTP/2 with each."""

    __slots__ = ("_num_bare", "is_in_head", "num_head_bytes")

    def __init__(self) -> None:
        self.is_in_head = True
        self.num_head_bytes = self._num_bare = 0

    def admit(self, data: bytes) -> bytes | None:
        """What the parser gets of ``data``; None if it has the end of a head that is too long."""
        if not self.is_in_head:
            self._num_bare += len(data)
            return data
        end = data.find(END_OF_HEAD)  # -1 while the head is incomplete, which `is_exceeded` counts after the parser
        if self.num_head_bytes + end > MAX_HEAD_BYTES:
            return None
        # Only when the whole head is in this piece: a line may be split between two pieces.
        if end > 0 and not self.num_head_bytes and b"\r\nupgrade:" in data[:end].lower():
            data = UPGRADE.sub(b"", data[:end]) + data[end:]
        self.num_head_bytes += len(data)
        return data

    @property
    def is_exceeded(self) -> bool:
        """Whether the parser, which has got all that was admitted, keeps too much."""
        return (self.num_head_bytes if self.is_in_head else self._num_bare) > MAX_HEAD_BYTES

    def note_content(self) -> None:
        """The parser has found content of a body, or the end of a head."""
        self.is_in_head, self._num_bare = False, 0

    def note_end(self) -> None:
        """The request is complete."""
        self.is_in_head, self.num_head_bytes = True, 0


class BoundedHttp(HttpToolsProtocol):
    """Closes connections that exceed `MessageBounds`, or whose head takes longer than `HEAD_TIMEOUT_S`. Drops body
    bytes that arrive after an early response. Answers the last requests of a client that has shut down its side."""

    _is_dropping = False
    _num_dropped = 0
    _timer: asyncio.TimerHandle | None = None
    _half_closed: HalfClosed | None = None

    def connection_made(self, transport: Any) -> None:
        self._bounds = MessageBounds()
        writer = LingeringWriter(transport, self._drop_rest)
        super().connection_made(cast("asyncio.Transport", writer))  # it delegates what it does not define
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        if self._half_closed is not None:
            self._half_closed.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's closes always
        """Keep the connection until the complete requests that came are answered; close it if there are none."""
        if not self._bounds.is_in_head or self.cycle is None or self.cycle.response_complete:
            cast("LingeringWriter", self.transport).flush()  # or a response of this turn would be lost
            return False
        self._cancel_timer()
        self._half_closed = HalfClosed(self.transport, self._may_probe)
        return True

    def _may_probe(self) -> bool:
        # without pipelined requests, `cycle` is the one that is being answered
        return not self.pipeline and not self.cycle.response_started and self.cycle.scope["http_version"] == "1.1"

    def data_received(self, data: bytes) -> None:
        bounds = self._bounds
        if self._is_dropping:
            self._num_dropped += len(data)
            if self._num_dropped > MAX_REST_BYTES:
                self.transport.abort()
            if self.transport.is_closing():
                return
        else:
            admitted = bounds.admit(data)
            if admitted is None:
                self._refuse()
                return
            data = admitted
        super().data_received(data)
        if bounds.is_exceeded:
            self._refuse() if bounds.is_in_head else self.transport.abort()
        # First bytes of a later request on a kept connection. Between requests uvicorn's keep-alive timer runs.
        elif bounds.is_in_head and bounds.num_head_bytes and self._timer is None:
            self._start_head_timer()

    def on_headers_complete(self) -> None:
        self._bounds.note_content()
        self._cancel_timer()
        super().on_headers_complete()
        # False when uvicorn made no cycle for this head.
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope["extensions"] = {EXTENSION: {"writer": BodyWriter(self.cycle)}}
            if self.parser.get_http_version() < "1.1":
                # The cycle's task starts in the loop's next turn; uvicorn has no hook for its ``send``.
                self.cycle.send = UnframedResponse(self.cycle).send  # type: ignore[method-assign,assignment]

    def on_body(self, body: bytes) -> None:
        self._bounds.note_content()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._bounds.note_end()
        if self._is_dropping:
            self._is_dropping = False
            self._cancel_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.cycle.response_complete:  # a pipelined one, whose body may still be needed
            return
        if self._half_closed is not None:
            self.transport.close()
        self._drop_rest()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what the parser rejects: respond and close."""
        self.transport.write(describe_refusal(*NOT_HTTP))
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
        if self._bounds.is_in_head:
            return False
        if not self._is_dropping:
            self._is_dropping, self._num_dropped = True, 0
            # Bounded in time and bytes: a client that never stops sending must not hold the connection.
            self._timer = self.loop.call_later(REST_TIMEOUT_S, self.transport.abort)
            self.flow.resume_reading()  # paused for back-pressure while the body had a reader
        return True

    def _refuse(self) -> None:
        self._bounds.note_content()  # so that `close` lingers, and `data_received` drops what follows unparsed
        self._cancel_timer()
        self.transport.write(describe_refusal(*TOO_LONG))
        self.transport.close()

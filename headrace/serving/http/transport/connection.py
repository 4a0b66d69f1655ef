"""`ClientConnection`: a server's or a router's side of a connection to a client. Its requests are answered one after
the other. Refuses: upgrades, as it speaks HTTP/1.0 and 1.1; and what becomes of requests (`Front`)."""

from __future__ import annotations

import asyncio
import math
import select
import socket
import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

from uvicorn import Config
from uvicorn.protocols.utils import get_remote_addr
from uvicorn.server import ServerState

from headrace.serving.http.transport import endpoint
from headrace.serving.http.transport.client_request import PROBE, ClientRequest, Front
from headrace.serving.http.transport.errors import BodyTooLarge, BodyTooSlow
from headrace.serving.http.transport.reading import RequestReader

HEAD_TIMEOUT_S = 60.0
KEEP_ALIVE_S = 75  # longer than that of usual load balancers, which must not reuse a connection while it closes
REST_TIMEOUT_S, MAX_REST_BYTES = 60.0, 1 << 30
"""How long and how much is read and dropped of a body after its response. Most clients read the response only when all
is sent. The limits are far above what is sent by mistake; dropping costs about a second per gigabyte."""
CHECK_S, FIRST_PROBE_S, LAST_PROBE_S = 0.25, 1.0, 8.0
"""Seconds between two looks at a half-closed connection; until its first probe; most between two probes."""
KEEPALIVE_S = 15
MAX_UNSENT_BYTES = 1 << 18
"""Bytes that wait for a client that reads slowly, from which on no more are taken from its worker."""


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

    def write_eof(self) -> None:
        """Flush, then shut down the write side."""
        self.flush()
        self._transport.write_eof()

    def abort(self) -> None:
        """Close at once."""
        self._pending.clear()
        self._transport.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def flush(self) -> None:
        """Write what is queued now."""
        # A flush scheduled before `close` or `write_eof` finds `_pending` empty.
        if self._pending and not self._transport.is_closing():
            self._transport.write(b"".join(self._pending))
        self._pending.clear()


class HalfClosed:
    """Watches a connection whose client sends nothing more but may still read. A client that has closed its socket
    sends the same FIN, and its system resets the connection at the next byte that it gets. Streams send such bytes; for
    other responses this sends `PROBE` while ``may_probe``. For the rest, TCP's own probes find out within about a
    minute. A reset connection is aborted."""

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


class Expected(Enum):
    """What the client has to send, within a time."""

    HEAD, BODY = "a head that has begun", "more of a body"
    REST = "the rest of what is not wanted any more"
    NEXT = "the next request"
    READ = "nothing, but to read what it was sent"


class ClientConnection(asyncio.Protocol):
    """The protocol of a `ListeningServer` whose application is a `Front`. Closes a connection whose heads, or what is
    no content of its bodies, exceed `MAX_HEAD_BYTES`, or that does not send within a time what is `Expected`. Drops
    body bytes that arrive after an early response. Answers the last requests of a client that has shut down its side.
    ``is_paused``: see `Wire`."""

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None
    ):
        self.front: Front = config.loaded_app
        self.transport: Any = None
        self.is_paused = False
        self._server, self._loop = server_state, _loop or asyncio.get_event_loop()
        self._reader = RequestReader(self, None)
        self._requests = self._reader.requests  # in the order in which they came; the first is being answered
        self._is_advancing = self._is_reading_paused = self._is_lingering = False
        self._num_dropped = 0  # bytes that came behind a response to a request that was not complete
        self._expected: Expected | None = None
        self._deadline = self._timer_at = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._half_closed: HalfClosed | None = None

    def connection_made(self, transport: Any) -> None:
        self._server.connections.add(self)  # type: ignore[arg-type]  # uvicorn calls its `shutdown`
        self.transport, self._reader.client = transport, get_remote_addr(transport)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self._expect(Expected.HEAD, HEAD_TIMEOUT_S)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self._expect(None, math.inf)
        if self._timer is not None:
            self._timer.cancel()
        if self._half_closed is not None:
            self._half_closed.cancel()
        if self._requests and self._requests[0].is_begun:
            self._requests[0].lose()
        self._requests.clear()

    def data_received(self, data: bytes) -> None:
        reader, requests = self._reader, self._requests
        if reader.is_over:
            self._drop(len(data))
            return
        if requests and requests[0].is_ended:
            self._drop(len(data))
        reader.feed(data)
        if reader.refusal and requests and not requests[-1].is_whole:
            self._give_up_last()
        self._advance()

    def eof_received(self) -> bool:
        """Keep the connection until the complete requests that came are answered; close it if there are none."""
        requests, self._reader.is_over = self._requests, True
        if requests and not requests[-1].is_whole:
            self._give_up_last()
        if self._is_lingering or not requests:
            return False
        requests[-1].keeps_alive = False
        self._half_closed = HalfClosed(self.transport, self._may_probe)
        return True

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        if self._requests and self._requests[0].answering is not None:
            self._requests[0].answering.resume()
        else:
            self.note_progress()

    def shutdown(self) -> None:
        """Called by uvicorn: close, now or with the response that is being sent."""
        if self._requests:
            self._requests[0].keeps_alive = False
        else:
            self.transport.close()

    def default_lines(self) -> bytes:
        """See `Wire`."""
        return b"".join([b"%b: %b\r\n" % header for header in self._server.default_headers])

    def note_progress(self) -> None:
        """See `Wire`. Also when the client has read what waited for it."""
        if not self._is_advancing:
            self._advance()

    def _advance(self) -> None:
        """Go on with the first request that is not answered. None begins before the client has read what there is for
        it: otherwise it could ask for more and more and read nothing."""
        self._is_advancing, requests = True, self._requests
        try:
            while requests and (requests[0].is_begun or not self.is_paused) and not self.transport.is_closing():
                if not requests[0].is_ended:
                    self._go_on(requests[0])
                if not requests[0].is_ended or not self._leave(requests[0]):
                    break
        finally:
            self._is_advancing = False
        if self._reader.refusal and not (requests or self._is_lingering or self.transport.is_closing()):
            self.transport.write(self._reader.refusal)
            self._close(has_rest=True)
        has_waiting = bool(requests) and (len(requests) > 1 or not requests[0].is_begun or requests[0].is_full)
        if has_waiting != self._is_reading_paused and not self.transport.is_closing():
            self._is_reading_paused = has_waiting
            (self.transport.pause_reading if has_waiting else self.transport.resume_reading)()
        self._set_deadline()

    def _go_on(self, request: ClientRequest) -> None:
        if not request.is_begun:
            request.is_begun = True
            self.front.begin(request)
        if request.is_ended or request.is_taken:
            return
        if request.num_bytes > request.body_limit:
            self.front.refuse(request, BodyTooLarge(f"the body has more than {request.body_limit} bytes"))
        elif request.is_whole:
            request.is_taken = True
            self.front.take(request)
        else:
            self.front.note_body(request)

    def _leave(self, request: ClientRequest) -> bool:
        """Behind a response: whether there may be a next one."""
        if request.is_whole and request.keeps_alive:
            self._requests.popleft()
            self._num_dropped = 0
            return True
        if not request.keeps_alive:
            self._close(has_rest=not request.is_whole)
        return False  # or the rest of its body is dropped as it comes

    def _give_up_last(self) -> None:
        """The last request will not be complete."""
        request = self._requests.pop()
        if request.is_ended and self._reader.refusal:  # it has its response
            self._reader.refusal = b""
            self._close(has_rest=True)
        if request.is_begun:
            request.lose()

    def _close(self, *, has_rest: bool) -> None:
        """Close when all is sent. If the client may still be sending, only the write side: closing with unread bytes
        resets the connection, and the client may lose the response before it has read it (RFC 9112, section 9.6)."""
        self._reader.is_over = True
        if not has_rest:
            self.transport.close()
        elif not self._is_lingering:
            self._is_lingering = True
            try:
                self.transport.write_eof()
            except OSError:  # the client is gone
                self.transport.abort()

    def _drop(self, num_bytes: int) -> None:
        self._num_dropped += num_bytes
        if self._num_dropped > MAX_REST_BYTES:
            self.transport.abort()

    def _may_probe(self) -> bool:
        first = self._requests[0] if len(self._requests) == 1 else None
        return first is not None and not first.has_response and first.scope["http_version"] == "1.1"

    def _set_deadline(self) -> None:
        first = self._requests[0] if self._requests else None
        if self._is_lingering or (first is not None and first.is_ended):
            self._expect(Expected.REST, REST_TIMEOUT_S)
        elif first is None:
            if self._reader.has_partial_head:
                self._expect(Expected.HEAD, HEAD_TIMEOUT_S)
            else:
                self._expect(Expected.NEXT, KEEP_ALIVE_S)
        elif (first.is_whole and first.is_begun) or first.is_full:
            self._expect(None, math.inf)
        else:
            self._expected = None  # each part of a body, and each that was read, gives it time for the next one
            if first.is_begun:
                self._expect(Expected.BODY, endpoint.GAP_TIMEOUT_S)
            else:
                self._expect(Expected.READ, REST_TIMEOUT_S)

    def _expect(self, what: Expected | None, within_s: float) -> None:
        """One timer a connection, which is not touched by requests that come and go: it looks at the deadline when it
        fires, and is set again."""
        if what is self._expected:
            return
        self._expected, self._deadline = what, self._loop.time() + within_s
        if self._timer_at > self._deadline:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = self._deadline
            self._timer = self._loop.call_at(self._deadline, self._look_at_deadline)

    def _look_at_deadline(self) -> None:
        self._timer, self._timer_at = None, math.inf
        expected, self._expected = self._expected, None
        if expected is None:
            return
        left_s = self._deadline - self._loop.time()
        if left_s > 0:
            self._expect(expected, left_s)
        elif expected is Expected.BODY:
            num_bytes = self._requests[0].num_bytes
            message = f"no body data for {endpoint.GAP_TIMEOUT_S:g} s; {num_bytes} bytes were received"
            self.front.refuse(self._requests[0], BodyTooSlow(message))
        elif expected in (Expected.REST, Expected.READ):
            self.transport.abort()
        else:
            self.transport.close()

"""`ClientConnection`: the router's side of a connection to a client, in place of an ASGI server's. Requests are
answered one after the other, inside the callbacks of sockets: no task runs for a request. Refuses: what becomes of
requests (`Front`)."""

from __future__ import annotations

import asyncio
import math
from enum import Enum
from typing import Any

from uvicorn import Config
from uvicorn.protocols.utils import get_remote_addr
from uvicorn.server import ServerState

from headrace.serving.http.listening import KEEP_ALIVE_S
from headrace.serving.http.transport import connection, endpoint
from headrace.serving.http.transport.connection import PROBE, HalfClosed
from headrace.serving.http.transport.errors import BodyTooLarge, BodyTooSlow
from headrace.serving.router.client_request import ClientRequest, Front
from headrace.serving.router.reading import RequestReader

MAX_UNSENT_BYTES = 1 << 18
"""Bytes that wait for a client that reads slowly, from which on no more are taken from its worker."""


class Expected(Enum):
    """What the client has to send, within a time."""

    HEAD, BODY = "a head that has begun", "more of a body"
    REST = "the rest of what is not wanted any more"
    NEXT = "the next request"
    READ = "nothing, but to read what it was sent"


class ClientConnection(asyncio.Protocol):
    """The protocol of a `ListeningServer` whose application is a `Front`. Has the limits of
    `headrace.serving.http.transport.connection.BoundedHttp`, and one for clients that send requests and read no
    responses: `Expected.READ`. ``is_paused``: see `Wire`."""

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
        self._expect(Expected.HEAD, connection.HEAD_TIMEOUT_S)

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
            self.note_end()

    def shutdown(self) -> None:
        """Called by uvicorn: close, now or with the response that is being sent."""
        if self._requests:
            self._requests[0].keeps_alive = False
        else:
            self.transport.close()

    def default_lines(self) -> bytes:
        """See `Wire`."""
        return b"".join([b"%b: %b\r\n" % header for header in self._server.default_headers])

    def note_end(self) -> None:
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
        has_waiting = bool(requests) and not (len(requests) == 1 and requests[0].is_begun)
        if has_waiting != self._is_reading_paused and not self.transport.is_closing():
            self._is_reading_paused = has_waiting
            (self.transport.pause_reading if has_waiting else self.transport.resume_reading)()
        self._set_deadline()

    def _go_on(self, request: ClientRequest) -> None:
        if not request.is_begun:
            request.is_begun = True
            self.front.begin(request)
            if request.expects_continue and not (request.is_whole or request.is_ended):
                self.transport.write(PROBE)  # the interim response for which it waits
        if request.is_ended or request.is_taken:
            return
        if request.num_bytes > request.body_limit:
            self.front.refuse(request, BodyTooLarge(f"the body has more than {request.body_limit} bytes"))
        elif request.is_whole:
            request.is_taken = True
            self.front.take(request)

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
        if self._num_dropped > connection.MAX_REST_BYTES:
            self.transport.abort()

    def _may_probe(self) -> bool:
        first = self._requests[0] if len(self._requests) == 1 else None
        return first is not None and not first.has_response and first.scope["http_version"] == "1.1"

    def _set_deadline(self) -> None:
        first = self._requests[0] if self._requests else None
        if self._is_lingering or (first is not None and first.is_ended):
            self._expect(Expected.REST, connection.REST_TIMEOUT_S)
        elif first is None:
            if self._reader.has_partial_head:
                self._expect(Expected.HEAD, connection.HEAD_TIMEOUT_S)
            else:
                self._expect(Expected.NEXT, KEEP_ALIVE_S)
        elif first.is_whole and first.is_begun:
            self._expect(None, math.inf)
        else:
            self._expected = None  # each part of a body, and each that was read, gives it time for the next one
            if first.is_begun:
                self._expect(Expected.BODY, endpoint.GAP_TIMEOUT_S)
            else:
                self._expect(Expected.READ, connection.REST_TIMEOUT_S)

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

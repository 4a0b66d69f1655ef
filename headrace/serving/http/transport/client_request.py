"""`ClientRequest`: a request of a client, and the way back for its response. Refuses: parsing (``reading.py``) and the
life of the connection (``connection.py``)."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Scope

from headrace.base.errors import HeadraceError
from headrace.serving.http.transport.access import LedgerEntry
from headrace.serving.http.transport.errors import path_of
from headrace.serving.http_client import RawHeaders

CHUNK, LAST_CHUNK = b"%x\r\n%b\r\n", b"0\r\n\r\n"
"""RFC 9112, section 7.1: size in hex, CRLF, data, CRLF."""
NO_BODY = frozenset({204, 304})
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""The interim response that every HTTP/1.1 client expects (RFC 9110, section 15.2)."""
PHRASES: dict[int, str] = {status.value: status.phrase for status in HTTPStatus}
STATUS_LINES = {status: f"HTTP/1.1 {status} {PHRASES.get(status, '')}\r\n".encode() for status in range(200, 1000)}


class Front(Protocol):
    """Decides what becomes of requests. Everything is called in the event loop."""

    def begin(self, request: ClientRequest) -> None:
        """The head has come, and all earlier requests of the connection are answered. Answers at once, or sets
        ``body_limit``."""

    def note_body(self, request: ClientRequest) -> None:
        """More of the body has come."""

    def take(self, request: ClientRequest) -> None:
        """The body has come."""

    def refuse(self, request: ClientRequest, error: HeadraceError) -> None:
        """Something is wrong with the body."""

    def complete_head(self, request: ClientRequest, headers: RawHeaders) -> RawHeaders:
        """The headers with which a response is sent, whose ``status`` is set."""

    def end(self, request: ClientRequest) -> None:
        """The response is complete, or the client has left; called once for each that has begun."""


class Wire(Protocol):
    """The connection of a request."""

    front: Front
    transport: Any
    is_paused: bool
    """Whether the client reads more slowly than it is written to."""

    def default_lines(self) -> bytes:
        """Header lines that every response has."""

    def note_progress(self) -> None:
        """The response to the first request is complete, or more of its body was taken."""


class Answering(Protocol):
    """What answers a request, until its response is complete."""

    def abort(self) -> None:
        """The client has left."""

    def resume(self) -> None:
        """The client, which was slow, has read what there was."""


class ClientRequest:
    """A request whose head has come. ``scope`` is ASGI's, which gates and errors read; ``given`` has the first header
    of each name. ``parts`` is the body as far as it has come and was not taken, of ``num_bytes`` in all, at most
    ``body_limit``; while there are more than ``most_unread`` bytes of it, the client waits. What comes after an early
    response is not kept. ``entry`` and ``undo`` are the front's.

    A response is sent by `respond`, or by `begin`, `write` and `end`; these do nothing once it has ended or the client
    has left. ``status`` is that of the response; 500 until there is one."""

    __slots__ = (
        "_expects_continue", "_head", "_is_bodiless", "_is_chunked", "answering", "body_limit", "entry", "given",
        "has_response", "is_begun", "is_ended", "is_lost", "is_taken", "is_whole", "keeps_alive", "most_unread",
        "num_bytes", "parts", "path", "scope", "status", "undo", "wire",
    )

    def __init__(self, wire: Wire, scope: Scope, *, keeps_alive: bool):
        self.wire, self.scope, self.path = wire, scope, path_of(scope)
        self.given: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self.keeps_alive = keeps_alive
        expects = self.given.get(b"expect", b"").lower() == b"100-continue"
        self._expects_continue = expects and scope["http_version"] == "1.1"
        self.parts: list[bytes] = []
        self.num_bytes = self.body_limit = 0
        self.most_unread: int | None = None
        self.status, self._head = 500, b""
        self.is_whole = self.is_begun = self.is_taken = self.is_ended = self.is_lost = False
        self.has_response = self._is_chunked = self._is_bodiless = False
        self.answering: Answering | None = None
        self.entry: LedgerEntry | None = None
        self.undo: Callable[[], object] | None = None

    @property
    def is_slow(self) -> bool:
        """Whether the client reads more slowly than it is written to."""
        return self.wire.is_paused

    @property
    def is_free(self) -> bool:
        """Whether a response is being sent in chunks to a client that keeps up with it."""
        return self._is_chunked and not (self.is_ended or self.is_lost or self.wire.is_paused)

    @property
    def is_full(self) -> bool:
        """Whether the client must wait before it sends more of the body."""
        most = self.most_unread
        return most is not None and not self.is_ended and sum(map(len, self.parts)) > most

    def invite_body(self) -> None:
        """The body is wanted: send the interim response for which the client may wait."""
        if self._expects_continue and not (self.is_whole or self.has_response):
            self.wire.transport.write(PROBE)
        self._expects_continue = False

    def take_body(self) -> bytes:
        """The body, which is not kept here any longer."""
        body = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts.clear()
        return body

    def join_parts(self, begin: int) -> None:
        """Make one part of those from ``begin`` on: objects of small chunks take many times what they hold."""
        if len(self.parts) > begin + 1:
            self.parts[begin:] = [b"".join(self.parts[begin:])]

    def begin(self, status: int, headers: RawHeaders) -> None:
        """The head of the response, which is sent with what follows. ``headers`` have lower-case names and nothing that
        concerns the connection; a body without length is sent in chunks, or ends with the connection of a client that
        knows none."""
        self.status, self.has_response, scope = status, True, self.scope
        headers = self.wire.front.complete_head(self, headers)
        self._is_bodiless = scope["method"] == "HEAD" or status in NO_BODY
        framing = b""
        if not (self._is_bodiless or b"content-length" in dict(headers)):
            if scope["http_version"] == "1.1":
                self._is_chunked, framing = True, b"transfer-encoding: chunked\r\n"
            else:
                self.keeps_alive = False
        if self._expects_continue and not self.is_whole:
            self.keeps_alive = False  # a body that was not invited may come or not: nobody knows where the next head is
        if not self.keeps_alive:
            framing += b"connection: close\r\n"
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        self._head = b"".join((STATUS_LINES[status], self.wire.default_lines(), lines, framing, b"\r\n"))

    def send_head(self) -> None:
        """Send the head before there is any of the body."""
        self._send(b"")

    def write(self, piece: bytes) -> None:
        """Send a piece of the body, which is not empty: it would end a body in chunks."""
        if self.is_lost or self.is_ended:
            return
        if self._is_chunked and not self._head:  # the way of streamed tokens
            self.wire.transport.write(CHUNK % (len(piece), piece))
        else:
            self._send(self._frame(piece))

    def end(self, last: bytes = b"") -> None:
        """The response is complete with this piece, which may be empty; one system call sends all that is left."""
        if self.is_lost or self.is_ended:
            return
        rest = self._frame(last) if last else b""
        self._send(rest + LAST_CHUNK if self._is_chunked else rest)
        self._finish()
        self.wire.note_progress()

    def break_off(self) -> None:
        """Leave the response incomplete: the connection is closed when what was written is sent."""
        if not (self.is_lost or self.is_ended):
            self.wire.transport.close()

    def respond(self, response: Response) -> None:
        """Send a whole response."""
        if self.is_lost or self.is_ended:
            return
        headers = [header for header in response.raw_headers if header[0] != b"connection"]
        if len(headers) < len(response.raw_headers):  # `respond_error` says close, and nothing else
            self.keeps_alive = False
        self.begin(response.status_code, headers)
        self.end(bytes(response.body))

    def refuse(self, error: HeadraceError) -> None:
        """Send an error as the response."""
        self.wire.front.refuse(self, error)

    def lose(self) -> None:
        """The client has left."""
        if self.is_ended or self.is_lost:
            return
        self.is_lost = True
        if self.answering is not None:
            self.answering.abort()
        self._finish()

    def _frame(self, piece: bytes) -> bytes:
        if self._is_chunked:
            return CHUNK % (len(piece), piece)
        return b"" if self._is_bodiless else piece

    def _send(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        if data:
            self.wire.transport.write(data)

    def _finish(self) -> None:
        self.is_ended, self.answering = not self.is_lost, None
        self.parts.clear()
        self.wire.front.end(self)

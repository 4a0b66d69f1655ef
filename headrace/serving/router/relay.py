"""`Relay`: the response of one worker on its way to a client, from one socket's callback to the other socket. Nothing
is sent before the first piece of the body has come, so that until then another worker can be asked."""

from __future__ import annotations

import time

from headrace.serving.http.transport.client_request import ClientRequest
from headrace.serving.http_client import Exchange, RawHeaders

RETRY_STATUSES = frozenset({429, 502, 503})
"""Another worker may do what this one refuses: its queue is full, or its engine is not there."""
MAX_HELD_BYTES = 1 << 20
HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
})
SET_HERE = HOP_BY_HOP | {b"date", b"x-request-id"}
"""Not passed on to clients: what concerns the connection, and what the server and `LedgerEntry` add to every
response."""


def end_to_end(headers: RawHeaders, dropped: frozenset[bytes]) -> RawHeaders:
    """The headers that are meant for the other end (RFC 9110, section 7.6.1), without ``dropped``, of which
    `HOP_BY_HOP` is a part. Names are lower case."""
    kept = [header for header in headers if header[0] not in dropped]
    if len(kept) < len(headers):
        for name, value in headers:
            if name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
                listed = {each.strip().lower() for each in value.split(b",")}
                kept = [header for header in kept if header[0] not in listed]
    return kept


class Relay:
    """A `WorkerSink` that passes the response on as it comes, and is the `Answering` of its request. ``status`` is 0
    until the head has come."""

    __slots__ = (
        "_client", "_held", "_is_paused", "_may_retry", "_num_held", "beginning", "begun_at", "exchange", "has_begun",
        "headers", "is_complete", "status",
    )

    def __init__(self, client: ClientRequest, may_retry: bool):
        self.status = 0
        self.is_complete = False
        self.has_begun = False
        """Whether the client gets this response, whatever becomes of it."""
        self.begun_at = 0.0  # `time.perf_counter`, when the head came
        self.beginning = b""
        """The first piece of the body."""
        self.headers: RawHeaders = []
        self.exchange: Exchange | None = None
        self._client, self._may_retry = client, may_retry
        self._held: list[bytes] = []
        self._num_held = 0
        self._is_paused = False

    @property
    def is_wanted(self) -> bool:
        """See `WorkerSink`."""
        return not self._client.is_lost

    @property
    def is_held(self) -> bool:
        """Whether the response is one after which another worker can be asked."""
        return self._may_retry and self.status in RETRY_STATUSES and self._num_held <= MAX_HELD_BYTES

    @property
    def media_type(self) -> str:
        """The ``Content-Type``."""
        return next((value.decode("latin-1") for name, value in self.headers if name == b"content-type"), "")

    @property
    def has_length(self) -> bool:
        """Whether the head says how long the body is."""
        return any(name == b"content-length" for name, _ in self.headers)

    def begin(self, status: int, headers: RawHeaders) -> None:
        """See `ResponseSink`."""
        self.status, self.headers, self.begun_at = status, headers, time.perf_counter()

    def take(self, now: float, piece: bytes) -> None:
        """See `ResponseSink`."""
        if not self.has_begun:
            self.beginning = self.beginning or piece
            self._num_held += len(piece)
            self._held.append(piece)
            if self.is_held:
                return
            self._begin()
            piece = b"".join(self._held)
            self._held.clear()
        if self.is_complete:  # `finish` follows, and sends it with the end of the body
            self._held.append(piece)
            return
        client = self._client
        client.write(piece)
        if client.is_slow and not self._is_paused and self.exchange is not None:
            self._is_paused = True
            self.exchange.pause_reading()

    def abort(self) -> None:
        """See `WorkerSink` and `Answering`."""
        if self.exchange is not None:
            self.exchange.abort()

    def resume(self) -> None:
        """See `Answering`."""
        if self._is_paused and self.exchange is not None:
            self._is_paused = False
            self.exchange.resume_reading()

    def finish(self, last: bytes = b"") -> None:
        """Send the rest, and ``last``: the response is complete."""
        if not self.has_begun:
            self._begin()
        self._client.end(b"".join((*self._held, last)))

    def _begin(self) -> None:
        self.has_begun = True
        client = self._client
        request_id = next((value for name, value in self.headers if name == b"x-request-id"), None)
        if request_id is not None:
            client.scope.setdefault("state", {})["request_id"] = request_id.decode("latin-1")
        client.begin(self.status, end_to_end(self.headers, SET_HERE))

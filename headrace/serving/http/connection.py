"""What uvicorn's fast HTTP parser lacks: bounds on the size of a request's head and on the time it may take, and bodies
of requests that offer an upgrade. Refuses: upgrades; this server speaks HTTP/1.1 alone.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.serving.http.burst import BurstWriter

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 60.0
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
END_OF_HEAD = b"\r\n\r\n"
EXTENSION = "headrace.body"
"""Under this name a scope's ``extensions`` have the request's `BodyWriter`, when the server is this one and nobody between it
and the route looks at bodies."""

UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


class BodyWriter:
    """Writes pieces of an answer's body at once, past the tasks and wrappers that ``send`` awaits: what a token costs most."""

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


class BoundedHttp(HttpToolsProtocol):
    """Ends a connection whose request line and headers pass `MAX_HEAD_BYTES`, before they pile up, or do not come within
    `HEAD_TIMEOUT_S`.

    Takes offers of an upgrade out of a head that comes in one piece: the parser drops the body of such a request, and
    Java's HTTP client offers HTTP/2 with every one.
    """

    _is_in_head = True
    _num_head_bytes = 0
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(BurstWriter(transport))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_patience()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
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

    def on_message_complete(self) -> None:
        self._is_in_head, self._num_head_bytes = True, 0
        super().on_message_complete()

    def _await_head(self) -> None:
        self._patience = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _forget_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _refuse(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(TOO_LARGE)
            self.transport.close()

"""`AppConnection`: connections whose requests an ASGI application answers, each in a task; and direct writes of stream
chunks. Refuses: websockets and lifespan events."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol, cast

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Scope
from uvicorn import Config
from uvicorn.server import ServerState

from headrace.base.errors import HeadraceError
from headrace.serving.http.transport.client_request import ClientRequest
from headrace.serving.http.transport.connection import BurstWriter, ClientConnection
from headrace.serving.http_client import RawHeaders

logger = logging.getLogger(__name__)

MAX_UNREAD_BYTES, MAX_UNSENT_BYTES = 1 << 18, 1 << 16
"""Bytes of a body that wait for the application, from which on no more are taken from the client; and bytes that wait
for a client, from which on ``send`` waits."""
NO_LIMIT = 1 << 62
EXTENSION = "headrace.body"
"""The key in a scope's ``extensions`` under which a route finds the request's `BodyWriter`; absent on other servers and
when middleware reads response bodies."""


class BodyWriter(Protocol):
    """Writes pieces of a response body directly, without the awaits and wrappers of ``send``, which are most of the
    cost of a streamed token: a `ClientRequest`."""

    @property
    def is_free(self) -> bool:
        """Whether a piece can be written now: the stream is open and the client keeps up. Otherwise use ``send``."""

    def write(self, piece: bytes) -> None:
        """Send a non-empty piece as one chunk."""


def body_writer(scope: Scope) -> BodyWriter | None:
    """The writer of this request's response, if there is one."""
    writer: BodyWriter | None = scope.get("extensions", {}).get(EXTENSION, {}).get("writer")
    return writer


def drop_writer(scope: Scope) -> None:
    """For middleware that reads response bodies: makes all of them pass through ``send``."""
    scope.get("extensions", {}).pop(EXTENSION, None)


class _Exchange:
    """One request at the application; the `Answering` of its request."""

    def __init__(self, request: ClientRequest):
        self._request = request
        self._changed = asyncio.Event()  # more of the body has come, or the client has read, or has left
        self.error: HeadraceError | None = None  # something is wrong with the body
        self._has_whole_body = False  # and told the application so

    def wake(self) -> None:
        """Look again at the request. See also `Answering`."""
        self._changed.set()

    abort = resume = wake

    async def run(self, app: ASGIApp) -> None:
        """Let the application answer."""
        request = self._request
        try:
            await app(request.scope, self._receive, self._send)
        except Exception as error:  # request edge
            logger.error("%s %s failed", request.scope["method"], request.path, exc_info=error)
        finally:  # also when it is cancelled
            if request.has_response:
                request.break_off()
            else:
                request.respond(PlainTextResponse("Internal Server Error", 500))

    async def _receive(self) -> Message:
        request = self._request
        request.invite_body()
        while not (request.is_lost or request.is_ended):
            if self.error is not None:
                raise self.error
            if request.parts or (request.is_whole and not self._has_whole_body):
                body, self._has_whole_body = request.take_body(), request.is_whole
                request.wire.note_progress()
                return {"type": "http.request", "body": body, "more_body": not self._has_whole_body}
            await self._wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        request = self._request
        while request.is_slow and not request.is_lost:
            await self._wait()
        if request.is_lost or request.is_ended:
            return
        body = message.get("body", b"")
        if message["type"] == "http.response.start":
            headers = [(bytes(name).lower(), bytes(value)) for name, value in message.get("headers", ())]
            if (b"connection", b"close") in headers:
                request.keeps_alive = False
            request.begin(message["status"], [header for header in headers if header[0] != b"connection"])
            request.send_head()
        elif not message.get("more_body", False):
            request.end(body)
            self._changed.set()
        elif body:
            request.write(body)

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class AppFront:
    """The `Front` of an ASGI application. uvicorn waits for ``tasks`` when it ends."""

    def __init__(self, app: ASGIApp, tasks: set[asyncio.Task[None]]):
        self._app, self._tasks = app, tasks

    def begin(self, request: ClientRequest) -> None:
        """See `Front`."""
        request.scope.update({
            "asgi": {"version": "3.0", "spec_version": "2.3"}, "root_path": "", "state": {},
            "server": request.wire.transport.get_extra_info("sockname")[:2],
            "extensions": {EXTENSION: {"writer": request}},
        })
        request.body_limit, request.most_unread = NO_LIMIT, MAX_UNREAD_BYTES  # the application has its own limit
        exchange = request.answering = _Exchange(request)
        task = asyncio.get_running_loop().create_task(exchange.run(self._app))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def note_body(self, request: ClientRequest) -> None:
        """See `Front`."""
        cast("_Exchange", request.answering).wake()

    take = note_body

    def refuse(self, request: ClientRequest, error: HeadraceError) -> None:
        """See `Front`."""
        exchange = cast("_Exchange", request.answering)
        exchange.error = error
        exchange.wake()

    def complete_head(self, request: ClientRequest, headers: RawHeaders) -> RawHeaders:
        """See `Front`."""
        return headers

    def end(self, request: ClientRequest) -> None:
        """See `Front`."""


class AppConnection(ClientConnection):
    """The protocol of a `ListeningServer` whose application is ASGI's."""

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None
    ):
        super().__init__(config, server_state, app_state, _loop)
        self.front = AppFront(cast("ASGIApp", config.loaded_app), server_state.tasks)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(BurstWriter(transport))
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)

    def eof_received(self) -> bool:
        self.transport.flush()  # or a response of this turn would be lost
        return super().eof_received()

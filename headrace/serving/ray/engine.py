"""`EngineReplica`: an engine with the application's routes, called by the gateway; and the records between the two.
Only bytes go in and out. Does not import Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

import msgspec
from starlette.types import Message

from headrace.base import env
from headrace.base.config import EngineConfig
from headrace.base.errors import EngineUnavailable
from headrace.base.server_config import OperationsConfig, ServerConfig
from headrace.service.client.client import EngineClient
from headrace.service.client.replica import Supervision
from headrace.service.cluster import hand_over

logger = logging.getLogger(__name__)

LAST_WORDS_S = 2.0
"""How long an abandoned request may take to notice."""


class EngineSetup(msgspec.Struct, frozen=True):
    """The arguments of a replica."""

    config: EngineConfig
    server: ServerConfig
    operations: OperationsConfig
    log_level: str


class Forwarded(msgspec.Struct, frozen=True, array_like=True):
    """An HTTP request. ``client`` is the address of the sender and its port."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    client: tuple[str, int]


class Head(msgspec.Struct, frozen=True, array_like=True):
    """Status and headers of a response: the first item of a stream whose other items are pieces of the body."""

    status: int
    headers: list[tuple[bytes, bytes]]


class EngineReplica:
    """Ray Serve's deployment ``engine``."""

    async def __init__(self, setup: bytes):  # type: ignore[misc]  # Ray Serve awaits it
        from headrace.serving.http.app import create_app
        from headrace.serving.http.server import read_template

        self._setup = msgspec.msgpack.decode(setup, type=EngineSetup)
        env.set_log_level(self._setup.log_level)
        server = self._setup.server
        self._client = EngineClient(
            hand_over(self._setup.config), supervision=Supervision(server.max_restarts, server.stall_timeout_s),
            chat_template=read_template(server.chat_template),
        )
        async with contextlib.AsyncExitStack() as undo:  # also where Ray gives the replica up: no engine may be left
            undo.push_async_callback(self._client.close)
            await self._client.start()
            await self._client.wait_ready()
            undo.pop_all()
        self._app = create_app(self._client, server, self._setup.operations)

    async def respond(self, request: bytes, hint: bytes) -> AsyncGenerator[bytes, None]:
        """Answer a `Forwarded`: an encoded `Head`, then the body in pieces. ``hint`` is for the router. When the caller
        goes away, the request is aborted."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        task = asyncio.create_task(self._answer(msgspec.msgpack.decode(request, type=Forwarded), messages, gone))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield msgspec.msgpack.encode(Head(message["status"], list(message.get("headers", ()))))
                elif message.get("body"):
                    yield message["body"]
            task.result()
        finally:
            gone.set()
            await asyncio.wait([task], timeout=LAST_WORDS_S)
            task.cancel()

    async def _answer(
        self, request: Forwarded, messages: asyncio.Queue[Message | None], gone: asyncio.Event
    ) -> None:
        bodies: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Message:
            if bodies:
                return bodies.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        await self._app({
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method,
            "scheme": "http", "path": request.path, "raw_path": request.path.encode(), "query_string": request.query,
            "root_path": "", "client": request.client, "server": ("", 0), "headers": request.headers,
        }, receive, messages.put)

    async def check_health(self) -> None:
        """Called by Ray Serve, which replaces a replica that raises. An engine that restarts is not given up yet."""
        if self._client.state == "stopped":
            raise EngineUnavailable("the engine crashed too often and is not restarted")

    async def __del__(self) -> None:
        """Called by Ray Serve after the last request has ended."""
        with contextlib.suppress(AttributeError):  # the constructor raised
            await self._client.close()

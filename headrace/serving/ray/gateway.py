"""`Gateway`: takes HTTP from Ray Serve's proxies and passes requests to engines, with what the router needs to find the
one that has the prompt's beginning in its cache. Refuses: routes, which the engines' application has."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from headrace.base.errors import EngineUnavailable, HeadraceError
from headrace.serving.http.transport.endpoint import read_body
from headrace.serving.http.transport.errors import end_of_stream, path_of, respond_error
from headrace.serving.ray.engine import Forwarded, Head
from headrace.serving.router.prompt_view import view_prompt

logger = logging.getLogger(__name__)

TRIES = 3
"""How many engines a request is given to, if they die before they answer."""
RETRY_AFTER_S = 5.0


class Gateway:
    """Ray Serve's deployment ``gateway``. ``engines`` is the handle of the deployment ``engine``."""

    def __init__(self, engines: Any, max_body_bytes: int):
        self._engines = engines.options(stream=True)
        self._max_body_bytes = max_body_bytes

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request of ASGI. An engine that dies before it answers is replaced by another; after that, the
        client hears of it."""
        if scope["type"] != "http":
            return
        try:
            body = b"".join(await read_body(scope, receive, self._max_body_bytes))
        except ClientDisconnect:
            return
        except HeadraceError as error:
            await respond_error(error, scope)(scope, receive, send)
            return
        request = msgspec.msgpack.encode(Forwarded(
            scope["method"], path_of(scope), scope.get("query_string", b""),
            [(bytes(name), bytes(value)) for name, value in scope["headers"]], body,
            tuple(scope.get("client") or ("", 0)),
        ))
        hint = view_prompt(body).hint
        sender = _Sender(send)
        for num_left in reversed(range(TRIES)):
            try:
                async for piece in self._engines.respond.remote(request, hint):
                    await sender.pass_on(piece)
                await sender.end()
                return
            except asyncio.CancelledError:  # the client is gone; Ray Serve cancels the engine's part
                raise
            except _lost_errors() as error:
                logger.warning("an engine was lost with a request: %s", type(error).__name__)
                if not num_left or sender.head is not None:
                    await sender.fail(scope, receive)
                    return


def _lost_errors() -> tuple[type[Exception], ...]:
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    return RayError, RayServeException


class _Sender:
    """The response to one request."""

    def __init__(self, send: Send):
        self.head: Head | None = None
        self._send = send

    async def pass_on(self, piece: bytes) -> None:
        """Send an item of an engine's stream."""
        if self.head is None:
            self.head = msgspec.msgpack.decode(piece, type=Head)
            await self._send({
                "type": "http.response.start", "status": self.head.status, "headers": self.head.headers
            })
        else:
            await self._send(_body(piece, more=True))

    async def end(self) -> None:
        """All was sent."""
        await self._send(_body(b"", more=False))

    async def fail(self, scope: Scope, receive: Receive) -> None:
        """The engine was lost: a 503, or in a stream of events an error event. Another response that has begun is
        left incomplete, which the client notices."""
        error = EngineUnavailable("the engine was lost while this request ran; try again", retry_after=RETRY_AFTER_S)
        if self.head is None:
            await respond_error(error, scope)(scope, receive, self._send)
            return
        types = [value.decode("latin-1") for name, value in self.head.headers if name.lower() == b"content-type"]
        last = end_of_stream(error, scope, types[0] if types else "")
        if last is None:
            raise error
        await self._send(_body(last, more=False))


def _body(piece: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": piece, "more_body": more}

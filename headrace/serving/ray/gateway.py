"""`Gateway`: takes HTTP from Ray Serve's proxies and passes requests to engines, with what the router needs to find the
one that has the prompt's beginning in its cache. Refuses: routes, which the engines' application has."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from headrace.base.errors import EngineUnavailable
from headrace.serving.http.transport.errors import respond_error
from headrace.serving.ray.engine import Forwarded, Head

logger = logging.getLogger(__name__)

TRIES = 3
"""How many engines a request is given to, if they die before they answer."""
HINT_BYTES = 1 << 18
RETRY_AFTER_S = 5.0


class _Prompt(msgspec.Struct):
    """The fields of any route that hold the prompt, in the order of chat templates."""

    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    input_ids: msgspec.Raw = msgspec.Raw()


def find_hint(body: bytes) -> bytes:
    """The prompt as the body has it: prompts that begin alike have hints that begin alike, whatever other fields there
    are. At most `HINT_BYTES`; empty if the body is no object."""
    try:
        prompt = msgspec.json.decode(body, type=_Prompt)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return b""
    return b"".join(bytes(getattr(prompt, name)) for name in _Prompt.__struct_fields__)[:HINT_BYTES]


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
        body = await self._read_body(receive)
        request = msgspec.msgpack.encode(Forwarded(
            scope["method"], _path_below_root(scope), scope.get("query_string", b""),
            [(bytes(name), bytes(value)) for name, value in scope["headers"]], body,
            tuple(scope.get("client") or ("", 0)),
        ))
        hint = find_hint(body)
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

    async def _read_body(self, receive: Receive) -> bytes:
        """The body; of one that is too large a little too much, so that the engine's application refuses it."""
        pieces, size = [], 0
        while size <= self._max_body_bytes:
            message = await receive()
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if not message.get("more_body"):
                break
        return b"".join(pieces)


def _path_below_root(scope: Scope) -> str:
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path[len(root) :] if root and path.startswith(root + "/") else path


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
        response = respond_error(error, scope)
        if self.head is None:
            await response(scope, receive, self._send)
            return
        types = [value for name, value in self.head.headers if name.lower() == b"content-type"]
        if not types or not types[0].startswith(b"text/event-stream"):
            raise error
        await self._send(_body(b"event: error\ndata: " + bytes(response.body) + b"\n\n", more=False))


def _body(piece: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": piece, "more_body": more}

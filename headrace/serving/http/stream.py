"""`EventStream`: server-sent events of a running generation. The first delta is awaited before the status goes out, so
that early errors get a proper one; later errors are an event of their own before ``[DONE]``.

Nothing piles up here: a delta is taken when the one before is sent, and the engine client merges what waits.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import ClassVar, Protocol

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from headrace.base.errors import HeadraceError
from headrace.service.client.outputs import ChoiceDelta
from headrace.serving.http.errors import SERVER_FAULT
from headrace.serving.http.generation import Ask, Generation, delta_error, open_generation
from headrace.serving.http.protocol.answers import describe_error

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
SSE = b"text/event-stream; charset=utf-8"
HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_encode = msgspec.json.Encoder().encode

Deltas = AsyncGenerator[tuple[int, ChoiceDelta], None]


def frame(event: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(event) + b"\n\n"


def named_frame(name: str, event: object) -> bytes:
    """One server-sent event with a name of its own."""
    return b"event: " + name.encode() + b"\n" + frame(event)


class Events(Protocol):
    """How a route words a stream. All may return nothing, and several frames at once. ``done`` ends every stream, also
    one that failed; unless a dialect says otherwise, all is as at OpenAI's."""

    media_type: ClassVar[bytes] = SSE
    done: ClassVar[bytes] = DONE

    def render(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        """The frames of one delta."""

    def end(self) -> bytes:
        """The frames after the last delta, without ``done``."""

    def fail(self, error: HeadraceError) -> bytes:
        """The frames instead of `end` when the request failed half-way."""
        return frame(describe_error(error))


class EventStream:
    """An ASGI response; made by `start_stream` with the first delta in hand."""

    def __init__(self, generation: Generation, deltas: Deltas, first: tuple[int, ChoiceDelta], events: Events):
        self.status_code = 200
        self._generation = generation
        self._deltas = deltas
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", self._events.media_type), *HEADERS]})
            ending = await self._send_deltas(send)
            await send({"type": "http.response.body", "body": ending + self._events.done, "more_body": False})
        finally:
            await self._deltas.aclose()
            self._generation.close()

    async def _send_deltas(self, send: Send) -> bytes:
        """Send all deltas; what is left to say before the end mark."""
        try:
            body = self._events.render(*self._first)
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            async for index, delta in self._deltas:
                error = delta_error(delta)
                if error is not None:
                    return self._events.fail(error)
                body = self._events.render(index, delta)
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            return self._events.end()
        except Exception:  # the request's edge: the status is out, only an event can tell the client
            logger.exception("a stream failed")
            return self._events.fail(HeadraceError(SERVER_FAULT))


class EventsFactory(Protocol):
    """Makes the wording of a stream once its generation runs."""

    def __call__(self, generation: Generation) -> Events: ...


async def start_stream(request: Request, ask: Ask, wording: EventsFactory) -> EventStream:
    """Submit ``ask`` and wait for its first delta; an error up to there is raised and gets its own status."""
    async with AsyncExitStack() as undo:
        generation = await open_generation(request, ask)
        undo.callback(generation.close)
        deltas = generation.deltas()
        undo.push_async_callback(deltas.aclose)
        first = await anext(deltas)
        error = delta_error(first[1])
        if error is not None:
            raise error
        undo.pop_all()
        return EventStream(generation, deltas, first, wording(generation))
    raise AssertionError("not reached")

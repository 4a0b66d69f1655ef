"""`EventStream`: server-sent events of a running generation. The first delta is awaited before the status goes out, so
that early errors get a proper one; later errors are an event of their own before ``[DONE]``.

Nothing piles up here: a delta is written as it comes while the client keeps up, else it is taken when the one before is
sent, and the engine client merges what waits.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from secrets import token_hex
from typing import ClassVar, Protocol

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from headrace.base.errors import HeadraceError
from headrace.service.client.outputs import ChoiceDelta
from headrace.serving.http.generation.run import Ask, Generation, delta_error, open_generation
from headrace.serving.http.protocol.errors import describe_error
from headrace.serving.http.transport.connection import BodyWriter, body_writer
from headrace.serving.http.transport.errors import SERVER_FAULT

logger = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
SSE = b"text/event-stream; charset=utf-8"
HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_encode = msgspec.json.Encoder().encode
Deltas = AsyncGenerator[tuple[int, ChoiceDelta], None]


def frame(event: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(event) + b"\n\n"


class TextFrames:
    """Frames of events that differ in one text alone: everything else is encoded once."""

    def __init__(self, example: Callable[[str], object]):
        mark = token_hex(16)
        self._head, self._tail = frame(example(mark)).split(_encode(mark))

    def fill(self, text: str) -> bytes:
        """The frame of the event with this text."""
        return self._head + _encode(text) + self._tail


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
        self._is_busy = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {
                    "type": "http.response.start", "status": 200,
                    "headers": [(b"content-type", self._events.media_type), *HEADERS]
                }
            )
            ending = await self._send_deltas(send, body_writer(scope))
            self._is_busy = True
            await send({"type": "http.response.body", "body": ending + self._events.done, "more_body": False})
        finally:
            await self._deltas.aclose()
            self._generation.close()

    async def _send_deltas(self, send: Send, writer: BodyWriter | None) -> bytes:
        """Send all deltas; what is left to say before the end mark."""
        try:
            await self._send(send, self._events.render(*self._first))
            if writer is not None:
                self._write_through(writer)
            async for index, delta in self._deltas:
                error = delta_error(delta)
                if error is not None:
                    return self._events.fail(error)
                await self._send(send, self._events.render(index, delta))
            return self._events.end()
        except Exception:  # the request's edge: the status is out, only an event can tell the client
            logger.exception("a stream failed")
            return self._events.fail(HeadraceError(SERVER_FAULT))

    async def _send(self, send: Send, body: bytes) -> None:
        if body:
            self._is_busy = True  # it may have to wait for a slow client; nothing may overtake it
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self._is_busy = False

    def _write_through(self, writer: BodyWriter) -> None:
        """From now on write deltas as they come, without waking the task that runs `_send_deltas`."""

        def is_free() -> bool:
            return not self._is_busy and writer.is_free

        def write(index: int, delta: ChoiceDelta) -> None:
            body = self._events.render(index, delta)
            if body:
                writer.write(body)

        self._generation.divert(is_free, write)


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

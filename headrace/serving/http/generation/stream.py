"""`EventStream`: the server-sent events of a running generation.

The first delta is awaited before the status is sent, so that early errors get their own status; later errors are an
event before ``[DONE]``. Nothing is buffered here: while the client keeps up, a delta is written when it arrives;
otherwise deltas stay in the engine client, which merges them.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from secrets import token_hex
from typing import ClassVar, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.base.errors import HeadraceError
from headrace.service.client.outputs import ChoiceDelta
from headrace.serving.http.generation.run import Generation, GenerationRequest, delta_error, open_generation
from headrace.serving.http.protocol.errors import describe_error
from headrace.serving.http.transport.asgi import BodyWriter, body_writer
from headrace.serving.http.transport.errors import INTERNAL_ERROR

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
SSE = b"text/event-stream; charset=utf-8"
# nginx buffers responses unless x-accel-buffering is "no"
HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_encode = msgspec.json.Encoder().encode

Deltas = AsyncGenerator[tuple[int, ChoiceDelta], None]


def frame(event: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(event) + b"\n\n"


def named_frame(name: str, event: object) -> bytes:
    """One server-sent event with an ``event:`` line."""
    return b"event: " + name.encode() + b"\n" + frame(event)


class TextFrames:
    """Frames of events that differ in one string only. The bytes before and after it are encoded once per stream.
    ``example`` returns the event with the given string."""

    def __init__(self, example: Callable[[str], object]):
        # Random, so that it occurs once in the frame and `split` returns two parts.
        mark = token_hex(16)
        self._head, self._tail = frame(example(mark)).split(_encode(mark))

    def fill(self, text: str) -> bytes:
        """The frame of the event with this text."""
        return self._head + _encode(text) + self._tail


class Events(Protocol):
    """Encodes the stream of one API. Each method returns the bytes of any number of frames, also none. Every stream
    ends with ``done``, a failed one, too. The defaults are OpenAI's."""

    media_type: ClassVar[bytes] = SSE
    done: ClassVar[bytes] = DONE

    def render(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        """The frames of one delta."""

    def end(self) -> bytes:
        """The frames after the last delta, without ``done``."""

    def fail(self, error: HeadraceError) -> bytes:
        """The frames that replace `end` when the request failed midway."""
        return frame(describe_error(error))


class EventStream(Response):
    """ASGI response that streams a generation; made by `start_stream`. ``first`` is the delta that was already taken
    from ``deltas``. Owns ``generation`` and ``deltas``, and closes both when sending ends or fails."""

    def __init__(self, generation: Generation, deltas: Deltas, first: tuple[int, ChoiceDelta], events: Events):
        super().__init__()
        self._generation = generation
        self._deltas = deltas
        self._first = first
        self._events = events
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", self._events.media_type), *HEADERS]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            last = await self._send_deltas(send, body_writer(scope))
            # Never reset: no direct write may follow the last body.
            self._is_sending = True
            await send({"type": "http.response.body", "body": last + self._events.done, "more_body": False})
        finally:  # also when the client disconnects and ``send`` raises
            await self._deltas.aclose()
            self._generation.close()

    async def _send_deltas(self, send: Send, writer: BodyWriter | None) -> bytes:
        """Send all deltas. Returns the frames that end the stream: those of `Events.end`, or of `Events.fail` if the
        request failed."""
        try:
            await self._send(send, self._events.render(*self._first))
            if writer is not None:  # only now: nothing may be written before the response's head and first chunk
                self._write_through(writer)
            # Nothing is awaited between taking a delta from the stream and setting `_is_sending` in `_send`. So a delta
            # that arrives meanwhile cannot be written directly and overtake it.
            async for index, delta in self._deltas:
                error = delta_error(delta)
                if error is not None:
                    return self._events.fail(error)
                await self._send(send, self._events.render(index, delta))
            return self._events.end()
        except Exception:  # request edge: the status is sent, only an event can report the failure
            logger.exception("a stream failed")
            return self._events.fail(HeadraceError(INTERNAL_ERROR))

    async def _send(self, send: Send, body: bytes) -> None:
        if body:
            self._is_sending = True  # `send` may wait for a slow client: a direct write must not overtake this body
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self._is_sending = False

    def _write_through(self, writer: BodyWriter) -> None:
        """From now on write each delta inside `RequestStream.feed`, without waking the task of `_send_deltas`.
        Deltas that arrive while `is_free` is False stay in the stream, are merged there, and go through
        `_send_deltas`."""

        def is_free() -> bool:
            return not self._is_sending and writer.is_free

        def write(index: int, delta: ChoiceDelta) -> None:
            body = self._events.render(index, delta)
            if body:
                writer.write(body)

        self._generation.divert(is_free, write)


async def start_stream(
    http_request: Request, request: GenerationRequest, events: Callable[[Generation], Events]
) -> EventStream:
    """Submit ``request`` and wait for its first delta; an error until then is raised and gets its own status.
    ``events`` makes the writer once the generation runs."""
    async with AsyncExitStack() as undo:
        # Undone in reverse order: the deltas are closed before the generation.
        generation = await open_generation(http_request, request)
        undo.callback(generation.close)
        deltas = generation.deltas()
        undo.push_async_callback(deltas.aclose)
        first = await anext(deltas)
        error = delta_error(first[1])
        if error is not None:
            raise error
        undo.pop_all()  # from here on `EventStream` closes both
        return EventStream(generation, deltas, first, events(generation))
    raise AssertionError("not reached")  # for mypy: ``__aexit__`` of an exit stack may suppress exceptions

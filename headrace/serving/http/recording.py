"""`Recorder`: sees whole requests and answers pass, for those who log or keep them. `RequestLog` is one of them.

Refuses: keys. Of headers only a few harmless ones are told; texts are told when asked for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.base.config import OperationsConfig
from headrace.serving.http.connection import forgo_writer
from headrace.serving.http.routing import path_of

logger = logging.getLogger(__name__)

MAX_KEPT_BODY = 4 * 2**20
MAX_KEPT_ANSWER = 2**20
MAX_LOGGED_TEXT = 2048
PLAIN_HEADERS = frozenset(
    {"accept", "content-length", "content-type", "host", "traceparent", "user-agent", "x-request-id"}
)
"""Headers whose values may be told. Any other may hold a key."""

PLAIN_FIELDS = frozenset(
    {"model", "response_format", "type", "role", "tool_choice", "reasoning_effort", "effort", "encoding_format", "task"}
)
"""Fields whose short texts may be told although they are texts."""

MAX_PLAIN_TEXT = 64


@dataclass
class Exchange:
    """A request and its answer, each cut off at a limit. ``is_complete``: the answer was sent to its end. ``at`` is by
    the wall clock; ``seconds`` to the end, ``first_byte_s`` to the answer's beginning."""

    method: str
    path: str
    headers: Headers
    at: float
    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    answer: bytearray = field(default_factory=bytearray)
    seconds: float = 0.0
    first_byte_s: float = 0.0
    is_body_cut: bool = False
    is_answer_cut: bool = False
    is_complete: bool = False
    request_id: str = "-"

    @property
    def num_bytes(self) -> int:
        """Of both together."""
        return len(self.body) + len(self.answer)


class Sink(Protocol):
    """Who is given exchanges; called in the event loop."""

    def take(self, exchange: Exchange) -> None:
        """One that has ended."""


class Recorder:
    """Of POST requests to ``paths``. What the application sees and sends is not changed."""

    def __init__(self, app: ASGIApp, sinks: Iterable[Sink], paths: frozenset[str]):
        self._app, self._sinks, self._paths = app, list(sinks), paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or path_of(scope) not in self._paths:
            await self._app(scope, receive, send)
            return
        forgo_writer(scope)
        exchange, begin = Exchange("POST", path_of(scope), Headers(scope=scope), time.time()), time.perf_counter()

        async def note_body() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                exchange.is_body_cut |= _keep(exchange.body, message.get("body", b""), MAX_KEPT_BODY)
            return message

        async def note_answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
            else:
                exchange.first_byte_s = exchange.first_byte_s or time.perf_counter() - begin
                exchange.is_answer_cut |= _keep(exchange.answer, message.get("body", b""), MAX_KEPT_ANSWER)
                exchange.is_complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, note_body, note_answer)
        finally:
            exchange.seconds = time.perf_counter() - begin
            exchange.request_id = scope.get("state", {}).get("request_id") or "-"
            for sink in self._sinks:
                sink.take(exchange)


def _keep(kept: bytearray, more: bytes, limit: int) -> bool:
    """Add what there is room for; whether it was too much."""
    room = limit - len(kept)
    kept += more[:room]
    return len(more) > room


class RequestLog:
    """A line with the headers and fields of each request; with ``has_texts`` its texts, too."""

    def __init__(self, *, has_texts: bool):
        self._has_texts = has_texts

    def take(self, exchange: Exchange) -> None:
        """Log one."""
        headers = {
            name: value[:MAX_LOGGED_TEXT] if name in PLAIN_HEADERS else "***" for name,
            value in exchange.headers.items()
        }
        try:
            fields = shorten(msgspec.json.decode(bytes(exchange.body)), has_texts=self._has_texts)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            fields = f"<{len(exchange.body)} bytes that are no JSON>"
        logger.info("id %s %s headers %s fields %s", exchange.request_id, exchange.path, _line(headers), _line(fields))


def open_log(operations: OperationsConfig) -> RequestLog | None:
    """The log of fields, when more than lines is wanted."""
    return (
        RequestLog(has_texts=operations.log_requests == "prompts") if operations.log_requests in ("fields", "prompts")
        else None
    )


def shorten(value: Any, *, has_texts: bool, name: str = "", depth: int = 0) -> Any:
    """A request's fields as they may be told: numbers and switches as they are, texts by their length or cut off, lists
    and deep parts by their size."""
    if isinstance(value, str):
        if has_texts:
            return value if len(value) <= MAX_LOGGED_TEXT else f"{value[:MAX_LOGGED_TEXT]}... ({len(value)} characters)"
        return value if name in PLAIN_FIELDS and len(value) <= MAX_PLAIN_TEXT else f"<text, {len(value)} characters>"
    if isinstance(value, dict):
        if depth >= 3 and not has_texts:
            return f"<object, {len(value)} fields>"
        if not has_texts and name in ("metadata", "logit_bias"):
            return f"<object, {len(value)} fields>"
        return {
            key[:MAX_PLAIN_TEXT]: shorten(item, has_texts=has_texts, name=key, depth=depth + 1) for key,
            item in list(value.items())[:64]
        }
    if isinstance(value, list):
        return (
            [shorten(item, has_texts=True, depth=depth + 1) for item in value[:64]] if has_texts
            else f"<list, {len(value)} items>"
        )
    return value


def _line(value: Any) -> str:
    """On one line, whatever is in it."""
    return msgspec.json.encode(value).decode()

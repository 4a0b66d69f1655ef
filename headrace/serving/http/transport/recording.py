"""`Recorder`: sees whole requests and answers pass, for those who log or keep them. `RequestLog` is one of them.

Refuses: keys. Of headers only a few harmless ones are told; texts are told when asked for.


A folder of recorded requests: JSON lines in files that are begun anew as they grow; the oldest go when all have
grown.

Refuses: keys; no header is written. Texts of users are: the folder and its files are for their owner's eyes alone.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.base.config import OperationsConfig
from headrace.base.errors import ConfigError
from headrace.serving.http.transport.connection import forgo_writer
from headrace.serving.http.transport.errors import path_of
from headrace.serving.replay import NAME, NO_BODY, Record

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


NUM_FILES = 8
"""Into how many files the limit is divided: this share of the records goes at a time."""

MAX_PENDING = 64 * 2**20
"""Bytes of requests and answers that wait for a slow disk; what comes above is left out."""


class DumpFolder:
    """Writes exchanges on a thread of its own. ``limit`` is in bytes."""

    def __init__(self, folder: str, limit: int):
        self._folder, self._limit = Path(folder), limit
        self._writer = ThreadPoolExecutor(1, "request-dump")
        self._file: FileIO | None = None
        self._lock = threading.Lock()
        self._num_pending = self._num_left_out = 0
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise ConfigError(
                f"dump_requests: cannot write to {folder}: {error.strerror}", param="dump_requests"
            ) from error

    def take(self, exchange: Exchange) -> None:
        """Write one, soon."""
        if self._num_pending > MAX_PENDING:
            self._num_left_out += 1
            if self._num_left_out == 1:
                logger.warning("requests come faster than they can be written to the dump; some are left out")
            return
        self._count(exchange.num_bytes)
        self._writer.submit(self._write, exchange)

    def close(self) -> None:
        """Write what waits, then close."""
        self._writer.shutdown(wait=True)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, exchange: Exchange) -> None:
        try:
            if self._file is None or self._file.tell() >= self._limit // NUM_FILES:
                self._open()
            self._append(msgspec.json.encode(_record(exchange)) + b"\n")
        except OSError as error:
            logger.error("a request cannot be written to the dump: %s", error)
        finally:
            self._count(-exchange.num_bytes)

    def _append(self, line: bytes) -> None:
        """All of a line or, on a full disk, nothing of it."""
        assert self._file is not None
        begin = os.fstat(self._file.fileno()).st_size
        if self._file.write(line) < len(line):
            self._file.truncate(begin)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._num_pending += num_bytes

    def _open(self) -> None:
        """Begin a new file; give up the oldest ones when there is no room for another."""
        if self._file is not None:
            self._file.close()
        files = sorted(self._folder.glob(NAME))
        sizes = {path: path.stat().st_size for path in files}
        while files and sum(sizes.values()) > self._limit - self._limit // NUM_FILES:
            oldest = files.pop(0)
            oldest.unlink()
            del sizes[oldest]
        seconds, rest = divmod(time.time_ns(), 10**9)
        # sorts by time
        name = f"requests-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(seconds))}-{rest:09d}-{os.getpid()}.jsonl"
        self._file = os.fdopen(
            os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0
        )


def _record(exchange: Exchange) -> Record:
    return Record(
        at=exchange.at, path=exchange.path, body=_as_json(exchange), status=exchange.status,
        answer=exchange.answer.decode(errors="replace"),
        seconds=round(exchange.seconds, 6), first_byte_s=round(exchange.first_byte_s, 6),
        request_id=exchange.request_id,
        is_answer_cut=exchange.is_answer_cut, is_complete=exchange.is_complete,
    )


def _as_json(exchange: Exchange) -> msgspec.Raw:
    if exchange.is_body_cut:
        return NO_BODY
    try:
        return msgspec.Raw(msgspec.json.encode(msgspec.json.decode(bytes(exchange.body))))  # on one line, and valid
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NO_BODY

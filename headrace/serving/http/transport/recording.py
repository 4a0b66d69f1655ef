"""`Recorder`: passes whole requests and responses to sinks: `RequestLog` (log lines) and `DumpFolder` (files for
`headrace replay`).

Refuses: keys. Only harmless headers are logged; prompts are logged only if configured.
"""

from __future__ import annotations

import errno
import logging
import math
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

from headrace.base.errors import ConfigError
from headrace.base.server_config import OperationsConfig
from headrace.serving.http.transport.access import in_log
from headrace.serving.http.transport.asgi import drop_writer
from headrace.serving.http.transport.errors import path_of
from headrace.serving.replay import NAME, NO_BODY, Record

logger = logging.getLogger(__name__)
# Bytes kept of one exchange while it runs; with the number of concurrent requests they bound the recorder's memory.
MAX_KEPT_BODY = 4 * 2**20
MAX_KEPT_RESPONSE = 2**20
MAX_LOGGED_TEXT = 2048  # characters

PLAIN_HEADERS = frozenset(
    {"accept", "content-length", "content-type", "host", "traceparent", "user-agent", "x-request-id"}
)
"""Headers whose values may be logged. Any other may hold a key."""

PLAIN_FIELDS = frozenset(
    {"model", "response_format", "type", "role", "tool_choice", "reasoning_effort", "effort", "encoding_format", "task"}
)
"""Fields whose short texts may be logged even without prompts."""
MAX_PLAIN_TEXT = 64


@dataclass
class Exchange:
    """A request and its response, each truncated at a limit (`MAX_KEPT_BODY`, `MAX_KEPT_RESPONSE`). ``is_complete``:
    the response was sent completely. ``at``: seconds since the epoch; ``seconds`` and ``first_byte_s``: from the
    request's arrival to the end and to the first byte of the response's body."""

    method: str
    path: str
    headers: Headers
    at: float
    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    response: bytearray = field(default_factory=bytearray)
    seconds: float = 0.0
    first_byte_s: float = 0.0
    is_body_cut: bool = False
    is_response_cut: bool = False
    is_complete: bool = False
    request_id: str = "-"

    @property
    def num_bytes(self) -> int:
        """Bytes of both bodies."""
        return len(self.body) + len(self.response)


class Sink(Protocol):
    """Takes exchanges; called in the event loop."""

    def take(self, exchange: Exchange) -> None:
        """Take an exchange that has ended."""


class Recorder:
    """Records POST requests to ``paths``. What the application receives and sends is unchanged."""

    def __init__(self, app: ASGIApp, sinks: Iterable[Sink], paths: frozenset[str]):
        self._app, self._sinks, self._paths = app, list(sinks), paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or path_of(scope) not in self._paths:
            await self._app(scope, receive, send)
            return
        drop_writer(scope)  # direct writes would bypass `note_response`
        exchange, begin = Exchange("POST", path_of(scope), Headers(scope=scope), time.time()), time.perf_counter()

        async def note_body() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                # Only the kept copy is cut; the application gets the whole message.
                exchange.is_body_cut |= _keep(exchange.body, message.get("body", b""), MAX_KEPT_BODY)
            return message

        async def note_response(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
            else:
                exchange.first_byte_s = exchange.first_byte_s or time.perf_counter() - begin
                exchange.is_response_cut |= _keep(exchange.response, message.get("body", b""), MAX_KEPT_RESPONSE)
                exchange.is_complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, note_body, note_response)
        finally:  # also for clients that disconnect: ``is_complete`` is then False
            exchange.seconds = time.perf_counter() - begin
            exchange.request_id = scope.get("state", {}).get("request_id") or "-"
            for sink in self._sinks:
                sink.take(exchange)


def _keep(kept: bytearray, more: bytes, limit: int) -> bool:
    """Append ``more`` to ``kept`` until that has ``limit`` bytes; returns whether bytes of ``more`` were dropped."""
    room = limit - len(kept)
    kept += more[:room]
    return len(more) > room


class RequestLog:
    """Logs a line with the headers and fields of each request; with ``has_texts`` also its texts."""

    def __init__(self, *, has_texts: bool):
        self._has_texts = has_texts

    def take(self, exchange: Exchange) -> None:
        """Log one exchange."""
        # By an allowlist: a proxy may add credentials under any header name.
        headers = {
            name: value[:MAX_LOGGED_TEXT] if name in PLAIN_HEADERS else "***"
            for name, value in exchange.headers.items()
        }
        try:
            fields = shorten(msgspec.json.decode(bytes(exchange.body)), has_texts=self._has_texts)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            fields = f"<{len(exchange.body)} bytes, not JSON>"
        name = in_log(exchange.request_id)
        logger.info("id %s %s headers %s fields %s", name, exchange.path, _line(headers), _line(fields))


def open_log(operations: OperationsConfig) -> RequestLog | None:
    """The log of fields, if configured."""
    if operations.log_requests not in ("fields", "prompts"):
        return None
    return RequestLog(has_texts=operations.log_requests == "prompts")


def shorten(value: Any, *, has_texts: bool, name: str = "", depth: int = 0) -> Any:
    """A request's fields for the log: numbers and booleans unchanged, texts truncated or replaced by their length,
    lists and deep objects by their size."""
    if isinstance(value, str):
        if has_texts:
            return value if len(value) <= MAX_LOGGED_TEXT else f"{value[:MAX_LOGGED_TEXT]}... ({len(value)} characters)"
        return value if name in PLAIN_FIELDS and len(value) <= MAX_PLAIN_TEXT else f"<text, {len(value)} characters>"
    if isinstance(value, dict):
        if not has_texts and (depth >= 3 or name in ("metadata", "logit_bias")):
            return f"<object, {len(value)} fields>"
        return {
            key[:MAX_PLAIN_TEXT]: shorten(item, has_texts=has_texts, name=key, depth=depth + 1)
            for key, item in list(value.items())[:64]
        }
    if isinstance(value, list):
        return (
            [shorten(item, has_texts=True, depth=depth + 1) for item in value[:64]] if has_texts
            else f"<list, {len(value)} items>"
        )
    return value


def _line(value: Any) -> str:
    """The value as JSON on one line."""
    return msgspec.json.encode(value).decode()


NUM_FILES = 8
"""Files that the limit is divided into; the oldest is deleted to make room."""

ERROR_PERIOD_S = 60.0
"""Least time between two log lines about exchanges that could not be written."""

MAX_PENDING = 64 * 2**20
"""Bytes of exchanges that wait for a slow disk; further ones are dropped."""


class DumpFolder:
    """Writes exchanges to JSON lines files on a thread; ``limit`` is in bytes. Bodies are written, headers never: the
    files are readable by their owner only."""

    def __init__(self, folder: str, limit: int):
        self._folder, self._limit = Path(folder), limit
        self._writer = ThreadPoolExecutor(1, "request-dump")
        # Used by `__init__`, then by the writer thread alone, and by `close` after that thread has ended.
        self._file: FileIO | None = None
        self._lock = threading.Lock()  # guards `_num_pending`, which the event loop and the writer thread change
        self._num_pending = self._num_dropped = 0
        self._num_lost, self._told_at = 0, -math.inf  # used by the writer thread alone
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise ConfigError(
                f"dump_requests: cannot write to {folder}: {error.strerror}", param="dump_requests"
            ) from error

    def take(self, exchange: Exchange) -> None:
        """Queue one exchange for writing."""
        # The event loop never waits for the disk: beyond the limit, exchanges are dropped.
        if self._num_pending > MAX_PENDING:
            self._num_dropped += 1
            if self._num_dropped == 1:
                logger.warning("requests arrive faster than the dump can be written; some are dropped")
            return
        self._count(exchange.num_bytes)
        self._writer.submit(self._write, exchange)

    def close(self) -> None:
        """Write what is queued, then close."""
        self._writer.shutdown(wait=True)
        if self._num_lost:
            logger.error("%d further requests were not written to the dump", self._num_lost)
        self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None  # first, so that an error leaves no closed file behind
        if file is not None:
            file.close()

    def _write(self, exchange: Exchange) -> None:
        try:
            if self._file is None or self._file.tell() >= self._limit // NUM_FILES:
                self._open()
            self._append(msgspec.json.encode(_record(exchange)) + b"\n")
        except OSError as error:
            self._tell_lost(error)
        finally:
            self._count(-exchange.num_bytes)

    def _tell_lost(self, error: OSError) -> None:
        """Log that exchanges are lost, at most once in `ERROR_PERIOD_S`: a full disk stays full, and the log may be on
        it."""
        self._num_lost += 1
        if time.monotonic() - self._told_at >= ERROR_PERIOD_S:
            self._told_at = time.monotonic()
            lost = "a request" if self._num_lost == 1 else f"{self._num_lost} requests"
            logger.error("%s cannot be written to the dump: %s", lost, error)
            self._num_lost = 0

    def _append(self, line: bytes) -> None:
        """Write the whole line or, on a full disk, nothing."""
        assert self._file is not None
        begin = os.fstat(self._file.fileno()).st_size
        if self._file.write(line) < len(line):
            self._file.truncate(begin)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._num_pending += num_bytes

    def _open(self) -> None:
        """Start a new file; delete the oldest ones if the limit requires it."""
        self._close_file()
        files = sorted(self._folder.glob(NAME))
        sizes = {path: path.stat().st_size for path in files}
        # room for the new file, which grows to a `NUM_FILES`-th of the limit
        while files and sum(sizes.values()) > self._limit - self._limit // NUM_FILES:
            oldest = files.pop(0)
            oldest.unlink()
            del sizes[oldest]
        seconds, rest = divmod(time.time_ns(), 10**9)
        # names sort by time
        name = f"requests-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(seconds))}-{rest:09d}-{os.getpid()}.jsonl"
        # Unbuffered: `_append` must see short writes, and a crash must not lose lines that were written.
        self._file = os.fdopen(
            os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0
        )


def _record(exchange: Exchange) -> Record:
    return Record(
        at=exchange.at, path=exchange.path, body=_as_json(exchange), status=exchange.status,
        answer=exchange.response.decode(errors="replace"),
        seconds=round(exchange.seconds, 6), first_byte_s=round(exchange.first_byte_s, 6),
        request_id=exchange.request_id,
        is_answer_cut=exchange.is_response_cut, is_complete=exchange.is_complete,
    )


def _as_json(exchange: Exchange) -> msgspec.Raw:
    if exchange.is_body_cut:
        return NO_BODY
    try:
        return msgspec.Raw(msgspec.json.encode(msgspec.json.decode(bytes(exchange.body))))  # validated, and on one line
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NO_BODY

"""The event loop of processes that carry many streams: uvloop's where there is one.

`HttpClient`: sends requests to one server and notes when what came back. HTTP/1.1 over connections that are kept.

For load generators, which often run on the server's own cores: a piece of an answer costs a callback and wakes nobody.
Refuses: redirects, compression, proxies.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from headrace.base.errors import ConfigError


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """For `asyncio.Runner`; None is asyncio's own loop, which serves everywhere, slower."""
    try:
        import uvloop
    except ImportError:  # there is none for this platform
        return None
    return uvloop.new_event_loop


MAX_ANSWER_BYTES = 256 << 20

IDLE_S = 2.0
"""How long a connection waits for its next request: some servers close theirs after five seconds, and a request sent at
that moment fails."""


class BrokenExchange(ConnectionError):
    """The server closed its end, or sent what is not HTTP, before the answer was complete."""


@dataclass
class Answer:
    """What came back: pieces of the body with the `time.perf_counter` seconds at which each came. ``status`` is 0 until
    it is known; ``is_complete``: the body came to its end."""

    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list, repr=False)
    is_complete: bool = False

    @property
    def body(self) -> bytes:
        """All of it that came."""
        return b"".join(piece for _, piece in self.pieces)


class _Connection(asyncio.Protocol):
    """One exchange after another. The methods that begin with ``on_`` are called by the parser."""

    def __init__(self) -> None:
        self.is_open = True
        self.idle_since = 0.0
        self._transport: Any = None
        self._now = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._ended: asyncio.Future[None] | None = None
        self._num_bytes = 0
        self._is_measured = False  # the answer tells where its body ends

    async def exchange(self, request: bytes, answer: Answer) -> None:
        """Send a request and fill ``answer`` to its end; raises `BrokenExchange`, `ValueError` for one that is too
        long."""
        self._answer, self._ended = answer, asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        finally:
            if not answer.is_complete:
                self.close()
            self._answer = None

    def close(self) -> None:
        """Drop the connection."""
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._answer is not None and self._answer.status and not self._is_measured and error is None:
            self.on_message_complete()
        self._fail(BrokenExchange(str(error or "the server closed the connection")))

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(BrokenExchange(f"not HTTP: {error}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._is_measured |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        if self._answer is not None:
            self._answer.status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        if self._answer is not None:
            self._answer.pieces.append((self._now, piece))
            self._num_bytes += len(piece)
            if self._num_bytes > MAX_ANSWER_BYTES:
                self._fail(ValueError(f"an answer is longer than {MAX_ANSWER_BYTES} bytes"))

    def on_message_complete(self) -> None:
        answer, ended = self._answer, self._ended
        if answer is None or ended is None or answer.status < 200:  # 1xx: the answer itself follows
            return
        answer.is_complete = True
        self.is_open = self.is_open and self._parser.should_keep_alive()
        self.idle_since = self._now
        self._num_bytes, self._is_measured = 0, False
        if not ended.done():
            ended.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)


class HttpClient:
    """One server at ``base_url``, with or without ``/v1``. Raises `ConfigError` for an address that is none."""

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout_s: float | None = None):
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url must begin with http:// or https://, got {base_url!r}", param="base_url")
        try:
            url = urlsplit(base_url)
            self._host, self._port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
        except ValueError as error:
            raise ConfigError(f"base_url: {error}", param="base_url") from error
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._path = url.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Host": url.netloc.rpartition("@")[2], "Accept": "*/*"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._kept: list[_Connection] = []

    @property
    def root(self) -> str:
        """The address that routes are added to."""
        return f"{'https' if self._tls else 'http'}://{self._headers['Host']}{self._path}"

    def close(self) -> None:
        """Drop the connections that are kept."""
        for connection in self._kept:
            connection.close()
        self._kept.clear()

    async def send(
        self, method: str, route: str, body: bytes | None = None, *, answer: Answer | None = None,
        headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send a request, with a JSON body if there is one, and take its answer to the end; ``answer`` is filled as it
        comes. Raises `OSError` for what goes wrong with the connection (`TimeoutError` after ``timeout_s``,
        `BrokenExchange`)."""
        answer = Answer() if answer is None else answer
        lines = {**self._headers, **(headers or {})}
        if body is not None:
            lines |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        head = (
            f"{method} {self._path}{route} HTTP/1.1\r\n"
            + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        )
        async with asyncio.timeout(self._timeout_s):
            await self._exchange(head.encode() + b"\r\n" + (body or b""), answer)
        return answer

    async def _exchange(self, request: bytes, answer: Answer) -> None:
        connection = self._kept_connection()
        is_kept = connection is not None
        connection = connection or await self._connect()
        try:
            await connection.exchange(request, answer)
        except BrokenExchange:
            if not is_kept or answer.status:
                raise
            connection = await self._connect()  # it was just being closed, as llama.cpp's server does after streams
            await connection.exchange(request, answer)
        if connection.is_open:
            self._kept.append(connection)

    def _kept_connection(self) -> _Connection | None:
        oldest = time.perf_counter() - IDLE_S
        while self._kept:
            connection = self._kept.pop()
            if connection.is_open and connection.idle_since >= oldest:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            _Connection, self._host, self._port, ssl=self._tls
        )
        return connection

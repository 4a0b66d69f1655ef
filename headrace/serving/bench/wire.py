"""`HttpSession`: requests over kept HTTP/1.1 connections, with the moment at which each piece of an answer came.

Does little for each piece, since a load generator often runs on the server's own cores. Refuses: events and JSON
(``connection.py``), redirects, proxies, compression.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

MAX_ANSWER_BYTES = 256 << 20


@dataclass
class Answer:
    """``pieces`` are ``(time.perf_counter, bytes)`` as the body came."""

    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        """All pieces together."""
        return b"".join(piece for _, piece in self.pieces)


class _Connection(asyncio.Protocol):
    """One exchange at a time. ``is_open`` says whether there can be another one."""

    def __init__(self) -> None:
        self.is_open = True
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer = Answer()
        self._done: asyncio.Future[Answer] | None = None
        self._arrived = 0.0
        self._num_bytes = 0
        self._ends_by_closing = False

    @property
    def has_answered(self) -> bool:
        """Whether anything of the latest answer has come."""
        return self._num_bytes > 0

    async def exchange(self, request: bytes) -> Answer:
        """The whole answer to a request; raises `ConnectionError` when it does not come, `ValueError` when it is none."""
        assert self._transport is not None and self._done is None, "connected, and nothing under way"
        self._parser = httptools.HttpResponseParser(self)
        self._answer, self._num_bytes, self._ends_by_closing = Answer(), 0, True
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        is_answered = False
        try:
            answer = await self._done
            is_answered = True
            return answer
        finally:
            self._done = None
            if not is_answered:  # cancelled or broken: what still comes belongs to nobody
                self.close()

    def close(self) -> None:
        """No more exchanges."""
        self.is_open = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._arrived = time.perf_counter()
        self._num_bytes += len(data)
        if self._num_bytes > MAX_ANSWER_BYTES:
            return self._fail(ValueError(f"an answer is longer than {MAX_ANSWER_BYTES} bytes"))
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ValueError(f"the answer is no HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if exc is None and self._answer.status and self._ends_by_closing:
            self._settle()
        else:
            self._fail(ConnectionError(str(exc or "the server closed the connection")))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_by_closing = False

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._answer.pieces.append((self._arrived, body))

    def on_message_complete(self) -> None:
        self.is_open = self.is_open and self._parser.should_keep_alive()
        self._settle()

    def _settle(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._answer)

    def _fail(self, error: Exception) -> None:
        self.is_open = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class HttpSession:
    """All connections to one server. ``root`` is an address such as http://127.0.0.1:8000, and may have a path."""

    def __init__(self, root: str, headers: dict[str, str] | None = None, *, timeout_s: float):
        parts = urlsplit(root)
        self._host, self._port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._is_secure = parts.scheme == "https"
        self._path = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        lines = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", "User-Agent": "headrace", **(headers or {})}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    async def request(self, method: str, path: str, body: bytes = b"") -> Answer:
        """The answer, of whatever status. Raises `TimeoutError`, `OSError` for a server that cannot be reached or hangs up,
        `ValueError` for an answer that is none."""
        kind = "Content-Type: application/json\r\n" if body else ""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}{kind}Content-Length: {len(body)}\r\n\r\n"
        async with asyncio.timeout(self._timeout_s):
            answer = await self._exchange_kept(head.encode("latin-1") + body)
            return answer or await self._exchange(await self._connect(), head.encode("latin-1") + body)

    def close(self) -> None:
        """Close all connections that wait."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange_kept(self, request: bytes) -> Answer | None:
        """The answer over a connection that is there; None when there is none, or none that the server still listens to."""
        while self._idle:
            kept = self._idle.pop()
            if kept.is_open:
                try:
                    return await self._exchange(kept, request)
                except ConnectionError:
                    if kept.has_answered:
                        raise
        return None

    async def _exchange(self, connection: _Connection, request: bytes) -> Answer:
        answer = await connection.exchange(request)
        if connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    async def _connect(self) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_connection(_Connection, self._host, self._port, ssl=self._is_secure or None)
        return connection

"""`HttpClient`: sends HTTP/1.1 requests to one server over kept connections and records when response data arrives.
Also `EventSplitter`, and `loop_factory`, the event loop of processes with many connections.

`HttpClient.send` is made for load generators, which often share the server's cores: response data costs one callback
and wakes no task. `HttpClient.stream` wakes its reader. Refuses: redirects, compression, proxies.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import httptools

from headrace.base.errors import ConfigError


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop for `asyncio.Runner`; None, asyncio's slower own, where there is no uvloop."""
    try:
        import uvloop
    except ImportError:  # not available on this platform
        return None
    return uvloop.new_event_loop


MAX_RESPONSE_BYTES = 256 << 20

IDLE_S = 2.0
"""Seconds that an idle connection is kept: some servers close theirs after five, and a request sent at that moment
fails."""
MAX_KEPT = 512
"""Idle connections that are kept."""


class BrokenExchange(ConnectionError):
    """The server closed its end, or sent what is not HTTP, before the response was complete."""


RawHeaders = list[tuple[bytes, bytes]]


class ResponseSink(Protocol):
    """What takes a response as it arrives; called in the event loop. ``status`` is 0 until the head has arrived.
    ``is_complete`` is set when the body has ended."""

    status: int
    is_complete: bool

    def connected(self, transport: asyncio.Transport) -> None:
        """The request is sent there next; reading may be paused, and aborting it breaks the exchange."""

    def begin(self, status: int, headers: RawHeaders) -> None:
        """The final head; names of headers are lower case."""

    def take(self, now: float, piece: bytes) -> None:
        """A piece of the body, which arrived at ``now`` (`time.perf_counter`). Raises `ValueError` for too much."""


@dataclass
class HttpResponse:
    """A response that is collected. ``pieces``: the body in ``(arrival time, bytes)`` pairs, times in
    `time.perf_counter` seconds; pieces of one socket read share one time. ``on_piece`` is called after each piece."""

    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list, repr=False)
    is_complete: bool = False
    on_piece: Callable[[], object] | None = field(default=None, repr=False)
    _num_bytes: int = field(default=0, repr=False)

    def connected(self, transport: asyncio.Transport) -> None:
        """See `ResponseSink`."""

    def begin(self, status: int, headers: RawHeaders) -> None:
        """See `ResponseSink`."""
        self.status = status

    def take(self, now: float, piece: bytes) -> None:
        """See `ResponseSink`."""
        self.pieces.append((now, piece))
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_RESPONSE_BYTES:
            raise ValueError(f"a response is longer than {MAX_RESPONSE_BYTES} bytes")
        if self.on_piece is not None:
            self.on_piece()

    @property
    def body(self) -> bytes:
        """The body received so far."""
        return b"".join(piece for _, piece in self.pieces)


class EventSplitter:
    """Splits a stream of server-sent events, however the network cuts it."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []  # the parts of a line that is not complete yet

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of each event that ends in this piece; comments and other fields are skipped."""
        *lines, rest = piece.split(b"\n")
        for line in lines:
            self._pending.append(line)
            line = b"".join(self._pending)
            self._pending.clear()
            if line.startswith(b"data:"):
                yield line[5:].strip()
        self._pending.append(rest)


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time; parsing happens inside `data_received`, without a task. httptools
    calls the ``on_`` methods from `feed_data`. ``idle_since`` is in `time.perf_counter` seconds."""

    def __init__(self) -> None:
        self.is_open = True
        self.idle_since = 0.0
        self._transport: Any = None
        self._now = 0.0  # when the data that is being parsed arrived
        self._parser = httptools.HttpResponseParser(self)
        self._response: ResponseSink | None = None
        self._ended: asyncio.Future[None] | None = None
        self._headers: RawHeaders = []
        self._is_measured = False  # has a length or is chunked; otherwise the end of the connection ends the body

    async def exchange(self, request: bytes, response: ResponseSink) -> None:
        """Send a request and fill ``response``; raises `BrokenExchange`, or the `ValueError` of the sink."""
        self._response, self._ended = response, asyncio.get_running_loop().create_future()
        response.connected(self._transport)
        self._transport.write(request)
        try:
            await self._ended
        finally:
            # After a timeout or an error the rest of this response would be read as the next one.
            if not response.is_complete:
                self.close()
            self._response = None

    def close(self) -> None:
        """Drop the connection."""
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        # An orderly close ends a body without declared length (RFC 9112, section 6.3). `_fail` then does nothing.
        if self._response is not None and self._response.status and not self._is_measured and error is None:
            self.on_message_complete()
        self._fail(BrokenExchange(str(error or "the server closed the connection")))

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(BrokenExchange(f"not HTTP: {error}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._headers.append((name, value))
        self._is_measured |= name in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        status, headers = self._parser.get_status_code(), self._headers
        self._headers = []
        if self._response is not None and status >= 200:  # 1xx: the final head follows
            self._response.begin(status, headers)

    def on_body(self, piece: bytes) -> None:
        if self._response is None:
            return
        try:
            self._response.take(self._now, piece)
        except ValueError as error:
            self._fail(error)

    def on_message_complete(self) -> None:
        response, ended = self._response, self._ended
        if response is None or ended is None or response.status == 0:  # the end of an interim response
            return
        response.is_complete = True
        self.is_open = self.is_open and self._parser.should_keep_alive()
        self.idle_since = self._now
        self._is_measured = False
        if not ended.done():
            ended.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)


class HttpClient:
    """Client of one server at ``base_url``, with or without ``/v1``. Used by one event loop. ``timeout_s`` limits a
    whole request. ``address``: connect there, whatever the name in the URL resolves to by then. ``tls`` is made if it
    is needed and not given. Raises `ConfigError` for an invalid address."""

    def __init__(
        self, base_url: str, *, api_key: str | None = None, timeout_s: float | None = None, idle_s: float = IDLE_S,
        address: str | None = None, tls: ssl.SSLContext | None = None,
    ):
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url must begin with http:// or https://, got {base_url!r}", param="base_url")
        try:
            url = urlsplit(base_url)
            self._host, self._port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
        except ValueError as error:
            raise ConfigError(f"base_url: {error}", param="base_url") from error
        if not self._host or any(letter.isspace() for letter in base_url):
            raise ConfigError(f"base_url names no host: {base_url!r}", param="base_url")
        self._address = address or self._host
        self._tls = (tls or ssl.create_default_context()) if url.scheme == "https" else None
        self._path = url.path.rstrip("/").removesuffix("/v1")
        # without ``user:password@``
        self._headers = {"Host": url.netloc.rpartition("@")[2], "Accept": "*/*"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s, self._idle_s = timeout_s, idle_s
        self._kept: list[_Connection] = []

    @property
    def root(self) -> str:
        """The base URL of routes."""
        return f"{'https' if self._tls else 'http'}://{self._headers['Host']}{self._path}"

    def close(self) -> None:
        """Close kept connections."""
        for connection in self._kept:
            connection.close()
        self._kept.clear()

    async def send(
        self, method: str, route: str, body: bytes | None = None, *, response: HttpResponse | None = None,
        headers: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> HttpResponse:
        """Send a request, with a JSON body if given, and receive the whole response; ``response`` is filled as data
        arrives. Raises `OSError` for connection errors (`TimeoutError` after ``timeout_s`` or the client's,
        `BrokenExchange`)."""
        response = HttpResponse() if response is None else response
        lines = {**self._headers, **(headers or {})}
        if body is not None:
            lines |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        head = (
            f"{method} {self._path}{route} HTTP/1.1\r\n"
            + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        )
        async with asyncio.timeout(self._timeout_s if timeout_s is None else timeout_s):
            await self._exchange(head.encode() + b"\r\n" + (body or b""), response)
        return response

    async def forward(
        self, method: str, target: bytes, headers: RawHeaders, body: bytes, response: ResponseSink
    ) -> None:
        """Send a request of somebody else: ``headers`` without those of this connection (``Host``, lengths), and
        ``target`` as it came. Without a time limit; raises as `send` does."""
        lines = [b"%b %b%b HTTP/1.1\r\nhost: %b\r\n" % (
            method.encode(), self._path.encode(), target, self._headers["Host"].encode()
        )]
        lines += [b"%b: %b\r\n" % header for header in headers]
        if body or method == "POST":
            lines.append(b"content-length: %d\r\n" % len(body))
        lines += [b"\r\n", body]
        await self._exchange(b"".join(lines), response)

    async def stream(self, method: str, route: str, body: bytes, response: HttpResponse) -> AsyncGenerator[bytes, None]:
        """As `send`, but yields the pieces of the body as they arrive, with ``response.status`` known. A reader that
        leaves before the end, or is cancelled, closes the connection."""
        arrived = asyncio.Event()
        response.on_piece = arrived.set
        sending = asyncio.ensure_future(self.send(method, route, body, response=response))
        sending.add_done_callback(lambda _: arrived.set())
        num_read = 0
        try:
            while num_read < len(response.pieces) or not sending.done():
                if num_read == len(response.pieces):
                    arrived.clear()
                    await arrived.wait()
                    continue
                num_read += 1
                yield response.pieces[num_read - 1][1]
            await sending
        finally:
            sending.cancel()
            await asyncio.wait([sending])
            await asyncio.sleep(0)  # an aborted connection is closed in the next round of the event loop

    async def _exchange(self, request: bytes, response: ResponseSink) -> None:
        connection = self._kept_connection()
        is_kept = connection is not None
        connection = connection or await self._connect()
        try:
            await connection.exchange(request, response)
        except BrokenExchange:
            # Sent again only on a kept connection, and before the head of a response: the server most likely closed the
            # connection before it read the request.
            if not is_kept or response.status:
                raise
            connection = await self._connect()  # the server was closing it, as llama.cpp's does after streams
            await connection.exchange(request, response)
        if connection.is_open:  # the server may have closed it with its response
            self._kept.append(connection)
            if len(self._kept) > MAX_KEPT:
                self._kept.pop(0).close()

    def _kept_connection(self) -> _Connection | None:
        oldest = time.perf_counter() - self._idle_s
        while self._kept:  # newest first: it is the least likely to have been closed by the server
            connection = self._kept.pop()
            if connection.is_open and connection.idle_since >= oldest:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            _Connection, self._address, self._port, ssl=self._tls, server_hostname=self._host if self._tls else None
        )
        return connection

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
MAX_BARE_BYTES = 128 << 10
"""Most bytes of a response's head, or between two parts of its body; the parser itself has no limit."""


class BrokenExchange(ConnectionError):
    """The server closed its end, or sent what is not HTTP, before the response was complete."""


RawHeaders = list[tuple[bytes, bytes]]


class ResponseSink(Protocol):
    """Takes a response as it arrives; called in the event loop. ``status`` is 0 until the head has arrived.
    ``is_complete`` is set when the body has ended, before its last part is taken."""

    status: int
    is_complete: bool

    def begin(self, status: int, headers: RawHeaders) -> None:
        """The final head; names of headers are lower case."""

    def take(self, now: float, piece: bytes) -> None:
        """The part of the body that one read of the socket gave, at ``now`` (`time.perf_counter`). Raises `ValueError`
        for too much."""


@dataclass
class HttpResponse:
    """A response that is collected. ``pieces``: the body in ``(arrival time, bytes)`` pairs, times in
    `time.perf_counter` seconds, one for each read of the socket. ``on_piece`` is called after each piece."""

    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list, repr=False)
    is_complete: bool = False
    on_piece: Callable[[], object] | None = field(default=None, repr=False)
    _num_bytes: int = field(default=0, repr=False)

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


class Exchange:
    """A request that `HttpClient.start` has sent, or sends when it is connected. ``on_end`` is called once: with None
    when the response is complete, else with what broke it."""

    __slots__ = ("_on_end", "connecting", "connection", "is_aborted", "request", "response")

    def __init__(self, request: bytes, response: ResponseSink, on_end: Callable[[Exception | None], None]):
        self.request, self.response = request, response
        self.is_aborted = False
        self.connecting: asyncio.Task[None] | None = None
        self.connection: _Connection | None = None
        self._on_end: Callable[[Exception | None], None] | None = on_end

    def end(self, error: Exception | None) -> None:
        """Tell the end, unless it was told."""
        on_end, self._on_end = self._on_end, None
        self.connection = self.connecting = None
        if on_end is not None:
            on_end(error)

    def abort(self) -> None:
        """Give it up, as if its connection had broken; nothing once it has ended."""
        if self._on_end is None:
            return
        self.is_aborted = True
        if self.connecting is not None:
            self.connecting.cancel()
        if self.connection is not None:
            self.connection.fail(BrokenExchange("given up"))
        else:
            self.end(BrokenExchange("given up"))

    def pause_reading(self) -> None:
        """Let the server wait: nothing more is taken from its connection."""
        if self.connection is not None:
            self.connection.pause(True)

    def resume_reading(self) -> None:
        """The opposite of `pause_reading`."""
        if self.connection is not None:
            self.connection.pause(False)


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time; parsing happens inside `data_received`, without a task. httptools
    calls the ``on_`` methods from `feed_data`. ``idle_since`` is in `time.perf_counter` seconds; ``is_kept``: it had
    an exchange before this one. ``finish`` is told of each end."""

    def __init__(self, finish: Callable[[Exchange, _Connection, Exception | None], None]) -> None:
        self.is_open, self.is_kept = True, False
        self.idle_since = 0.0
        self.transport: Any = None
        self._finish = finish
        self._exchange: Exchange | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: RawHeaders = []
        self._pieces: list[bytes] = []  # of the body, from the data that is being parsed
        self._num_bare = 0  # bytes since the last of a body
        self._is_in_head = True
        self._is_measured = False  # has a length or is chunked; otherwise the end of the connection ends the body
        self._is_whole = False  # the response is complete; what follows belongs to nothing
        self._is_paused = False

    def start(self, exchange: Exchange) -> None:
        """Send a request, and read its response."""
        self._exchange, exchange.connection = exchange, self
        self._is_whole = self._is_measured = False
        self._num_bare = 0
        self.transport.write(exchange.request)

    def pause(self, is_paused: bool) -> None:
        """Take nothing more from the server, or go on; the end of an exchange ends its pause."""
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            (self.transport.pause_reading if is_paused else self.transport.resume_reading)()

    def close(self) -> None:
        """Drop the connection."""
        self.is_open = False
        self.transport.abort()

    def fail(self, error: Exception) -> None:
        """End the exchange without its response, and the connection: the rest would be read as the next response."""
        self.close()
        self._end(error)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._exchange is None:
            return
        # An orderly close ends a body without declared length (RFC 9112, section 6.3).
        if self._exchange.response.status and not self._is_measured and error is None:
            self._end(None)
        else:
            self._end(BrokenExchange(str(error or "the server closed the connection")))

    def data_received(self, data: bytes) -> None:
        exchange, now = self._exchange, time.perf_counter()
        if exchange is None:  # nobody asked
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._is_whole:
                self.fail(BrokenExchange(f"not HTTP: {error}"))
                return
            self.is_open = False
        self._num_bare += len(data)
        if self._pieces:
            piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            self._num_bare = 0
            exchange.response.is_complete = self._is_whole
            try:
                exchange.response.take(now, piece)
            except ValueError as error:
                self.fail(error)
                return
        if self._is_whole:
            self.idle_since = now
            self._end(None)
        elif self._num_bare > MAX_BARE_BYTES:
            self.fail(BrokenExchange(f"more than {MAX_BARE_BYTES} bytes that are of no body"))

    def on_message_begin(self) -> None:
        self._is_in_head = True
        if self._is_whole:
            self.is_open = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:  # of a trailer
            return
        name = name.lower()
        self._headers.append((name, value))
        self._is_measured |= name in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        status, headers, exchange = self._parser.get_status_code(), self._headers, self._exchange
        self._headers, self._is_in_head = [], False
        if status < 100:
            raise ValueError(f"status {status}")  # the parser's caller gets it as an error of its own
        if exchange is None or self._is_whole or status < 200:  # 1xx: the final head follows
            return
        exchange.response.begin(status, headers)
        if exchange.request.startswith(b"HEAD "):  # its length is that of another response, and the parser waits for it
            self._is_whole, self.is_open = True, False

    def on_body(self, piece: bytes) -> None:
        if not self._is_whole:
            self._pieces.append(piece)

    def on_message_complete(self) -> None:
        # A status of 0: the end of an interim response.
        if self._exchange is not None and self._exchange.response.status and not self._is_whole:
            self._is_whole = True
            self.is_open = self.is_open and self._parser.should_keep_alive()

    def _end(self, error: Exception | None) -> None:
        exchange, self._exchange = self._exchange, None
        if self.is_open:  # the response may have paused it by its last piece, and the next one is to be read
            self.pause(False)
        if exchange is not None:
            exchange.response.is_complete = error is None
            self._finish(exchange, self, error)


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
        self._prefix, self._netloc = self._path.encode(), self._headers["Host"].encode()
        self._timeout_s, self._idle_s = timeout_s, idle_s
        self._kept: list[_Connection] = []

    @property
    def root(self) -> str:
        """The base URL of routes."""
        return f"{'https' if self._tls else 'http'}://{self._headers['Host']}{self._path}"

    def explain(self, error: Exception) -> str:
        """For users: that there was no response, and why."""
        return f"no server responds at {self.root}: {str(error) or type(error).__name__}"

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
            ended = _Ended()
            exchange = Exchange(head.encode() + b"\r\n" + (body or b""), response, ended)
            self._start(exchange)
            await ended.wait(exchange)
        return response

    def start(
        self, method: str, target: bytes, headers: RawHeaders, body: bytes, response: ResponseSink,
        on_end: Callable[[Exception | None], None]
    ) -> Exchange:
        """Send a request of somebody else: ``headers`` without those of this connection (``Host``, lengths), and
        ``target`` as it came. Without a time limit."""
        length = b"content-length: %d\r\n" % len(body) if body or method == "POST" else b""
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        exchange = Exchange(
            b"%b %b%b HTTP/1.1\r\nhost: %b\r\n%b%b\r\n%b"
            % (method.encode(), self._prefix, target, self._netloc, lines, length, body),
            response, on_end
        )
        self._start(exchange)
        return exchange

    async def forward(
        self, method: str, target: bytes, headers: RawHeaders, body: bytes, response: ResponseSink
    ) -> None:
        """As `start`, until the response is complete. Raises as `send` does."""
        ended = _Ended()
        await ended.wait(self.start(method, target, headers, body, response, ended))

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

    def _start(self, exchange: Exchange) -> None:
        connection = self._kept_connection()
        if connection is None:
            exchange.connecting = asyncio.get_running_loop().create_task(self._connect(exchange))
        else:
            connection.is_kept = True
            connection.start(exchange)

    def _finish(self, exchange: Exchange, connection: _Connection, error: Exception | None) -> None:
        if connection.is_open:
            self._kept.append(connection)
            if len(self._kept) > MAX_KEPT:
                self._kept.pop(0).close()
        elif error is None:
            connection.close()  # the server closes it with its response, or has sent more than that
        # Sent again only on a kept connection, and before the head of a response: the server most likely closed the
        # connection before it read the request, as llama.cpp's does after streams.
        is_stale = isinstance(error, BrokenExchange) and connection.is_kept and not exchange.response.status
        if is_stale and not exchange.is_aborted:
            exchange.connection = None
            exchange.connecting = asyncio.get_running_loop().create_task(self._connect(exchange))
        else:
            exchange.end(error)

    def _kept_connection(self) -> _Connection | None:
        oldest = time.perf_counter() - self._idle_s
        while self._kept:  # newest first: it is the least likely to have been closed by the server
            connection = self._kept.pop()
            if connection.is_open and connection.idle_since >= oldest:
                return connection
            connection.close()
        return None

    async def _connect(self, exchange: Exchange) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(self._finish), self._address, self._port, ssl=self._tls,
                server_hostname=self._host if self._tls else None
            )
        except (OSError, ValueError) as error:
            exchange.end(error)
            return
        exchange.connecting = None
        if connection.is_open:
            connection.start(exchange)
        else:  # closed as soon as it was accepted: nothing would tell the end of what is written now
            exchange.end(BrokenExchange("the server closed the connection"))


class _Ended:
    """The ``on_end`` of an exchange that a task waits for."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __call__(self, error: Exception | None) -> None:
        if self._future.done():  # cancelled
            return
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)

    async def wait(self, exchange: Exchange) -> None:
        """Until it has ended; who is cancelled meanwhile gives it up."""
        try:
            await self._future
        finally:
            exchange.abort()

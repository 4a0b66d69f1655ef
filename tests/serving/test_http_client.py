"""The load generator's HTTP client against servers that answer byte by byte, in every form of HTTP/1.1, or not at
all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace.base.errors import ConfigError
from headrace.serving import http_client
from headrace.serving.http_client import BrokenExchange, Exchange, HttpClient, HttpResponse

OK = b"HTTP/1.1 200 OK\r\n"
SIZED = OK + b"Content-Length: 11\r\n\r\nhello world"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
UNTIL_CLOSED = OK + b"\r\nhello world"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED


class Script:
    """Answers each request with the next of ``answers``; None closes without one. ``cut``: bytes sent at a time."""

    def __init__(self, *answers: bytes | None, cut: int = 1 << 20, closes: bool = False, pause_s: float = 0.0):
        self.answers, self.cut, self.closes, self.pause_s = list(answers), cut, closes, pause_s
        self.requests: list[bytes] = []
        self.num_connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (
                        int(line.split(b":")[1])
                        for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
                    ),
                    0
                )
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                for start in range(0, len(answer or b""), self.cut):
                    writer.write(answer[start : start + self.cut])
                    await writer.drain()
                    await asyncio.sleep(self.pause_s)
                if answer is None or self.closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        finally:
            writer.close()


@asynccontextmanager
async def talking_to(script: Script, **options: object) -> AsyncIterator[HttpClient]:
    async with await asyncio.start_server(script.serve, "127.0.0.1", 0) as server:
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/", **options)
        try:
            yield client
        finally:
            client.close()


@pytest.mark.parametrize("cut", [1, 7, 1000])
@pytest.mark.parametrize("form", [SIZED, CHUNKED, CONTINUED])
async def test_every_form_of_a_body_and_the_connection_is_used_again(form: bytes, cut: int):
    script = Script(form, form, cut=cut)
    async with talking_to(script, api_key="k") as client:
        for body in (b'{"a":1}', None):
            answer = await client.send("POST", "/x", body)
            assert (answer.status, answer.body, answer.is_complete) == (200, b"hello world", True)
            assert [at for at, _ in answer.pieces] == sorted(at for at, _ in answer.pieces)
    assert script.num_connections == 1
    assert script.requests[0].startswith(b"POST /x HTTP/1.1\r\n") and script.requests[0].endswith(b'\r\n\r\n{"a":1}')
    assert (
        b"Authorization: Bearer k\r\n" in script.requests[0]
        and b"Content-Type: application/json\r\n" in script.requests[0]
    )


async def test_bodies_that_end_with_their_connection():
    script = Script(
        UNTIL_CLOSED, b"HTTP/1.1 204 No Content\r\n\r\n", SIZED.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n"),
        SIZED, closes=True
    )
    async with talking_to(script) as client:
        bodies = [(await client.send("GET", "/")).body for _ in range(4)]
    assert bodies == [b"hello world", b"", b"hello world", b"hello world"] and script.num_connections == 4


@pytest.mark.parametrize(
    "answer",
    [None, SIZED[:-3], CHUNKED[:-9], b"HTTP/1.1 2", b"what?\r\n\r\n", OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"]
)
async def test_what_breaks_off_is_told_and_what_came_is_kept(answer: bytes | None):
    kept = HttpResponse()
    async with talking_to(Script(answer, closes=True)) as client:
        with pytest.raises(BrokenExchange):
            await client.send("POST", "/", b"{}", response=kept)
    assert not kept.is_complete and b"hello world".startswith(kept.body)


async def test_a_kept_connection_that_was_closed_is_replaced_once():
    script = Script(SIZED, None, SIZED, None)
    async with talking_to(script) as client:
        assert (await client.send("GET", "/")).is_complete
        assert (await client.send("GET", "/")).is_complete
        script.answers.append(None)
        with pytest.raises(BrokenExchange):
            await client.send("GET", "/")
    assert len(script.requests) == 5


async def test_idle_connections_are_not_used_again(monkeypatch: pytest.MonkeyPatch):
    script = Script(SIZED, SIZED, SIZED)
    async with talking_to(script) as client:
        for idle_s in (60.0, 0.0, 60.0):
            monkeypatch.setattr(client, "_idle_s", idle_s)
            await asyncio.sleep(0.01)
            await client.send("GET", "/")
    assert script.num_connections == 2


async def test_one_connection_for_each_request_under_way():
    script = Script(*[SIZED] * 12, cut=6, pause_s=0.01)
    async with talking_to(script) as client:
        for _ in range(2):
            assert all(
                answer.is_complete for answer in await asyncio.gather(*(client.send("GET", "/") for _ in range(6)))
            )
    assert script.num_connections == 6


async def test_limits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_client, "MAX_RESPONSE_BYTES", 10)
    async with talking_to(Script(SIZED)) as client:
        with pytest.raises(ValueError, match="longer than 10"):
            await client.send("GET", "/")
    async with talking_to(Script(SIZED, cut=1, pause_s=0.05), timeout_s=0.1) as client:
        with pytest.raises(TimeoutError):
            await client.send("GET", "/")


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "ftp://x", "http://x:port", "http://[::1"])
def test_addresses_that_are_none(address: str):
    with pytest.raises(ConfigError, match="base_url"):
        HttpClient(address)


@pytest.mark.parametrize(("address", "root"), [
    ("http://a.b:1/v1", "http://a.b:1"), ("https://u:p@a/x/v1/", "https://a/x"), ("http://[::1]:80", "http://[::1]:80"),
])
def test_roots(address: str, root: str):
    assert HttpClient(address).root == root


async def test_what_follows_a_response_belongs_to_no_other():
    trailed = CHUNKED.removesuffix(b"\r\n") + b"X-Trailer: 1\r\n\r\n"
    script = Script(trailed, SIZED + b"HTTP/1.1 500 No\r\nContent-Length: 1\r\n\r\n!", SIZED + b"junk", SIZED)
    async with talking_to(script) as client:
        for num_connections in (1, 1, 2, 3):
            answer, names = HttpResponse(), []
            answer.begin = lambda status, headers, a=answer, n=names: (setattr(a, "status", status), n.extend(headers))
            await client.send("GET", "/", response=answer)
            assert (answer.status, answer.body) == (200, b"hello world")
            assert [name for name, _ in names if name == b"x-trailer"] == [] and len(names) == 1
            assert script.num_connections == num_connections


async def test_a_connection_that_talks_unasked_is_not_used_again():
    script = Script(SIZED, SIZED)
    writers: list[asyncio.StreamWriter] = []
    serve = script.serve
    script.serve = lambda reader, writer: (writers.append(writer), serve(reader, writer))[1]
    async with talking_to(script) as client:
        await client.send("GET", "/")
        writers[0].write(SIZED)
        async with asyncio.timeout(5):
            while any(connection.is_open for connection in client._kept):
                await asyncio.sleep(0.005)
        assert (await client.send("GET", "/")).body == b"hello world"
    assert script.num_connections == 2


async def test_the_head_of_a_body_that_does_not_come():
    async with talking_to(Script(OK + b"Content-Length: 11\r\n\r\n", SIZED), timeout_s=5) as client:
        assert (await client.send("HEAD", "/")).body == b""
        assert (await client.send("GET", "/")).body == b"hello world"


@pytest.mark.parametrize("endless", [
    OK + b"X-Long: " + b"a" * 300_000, OK + b"X: y\r\n" * 60_000,
    OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n" + b"X-Trailer: y\r\n" * 30_000,
    b"HTTP/1.1 101 Go\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\nwhat?",
])
async def test_heads_and_trailers_without_end_and_upgrades_are_refused(endless: bytes):
    async with talking_to(Script(endless), timeout_s=5) as client:
        with pytest.raises(BrokenExchange, match=r"of no body|not HTTP"):
            await client.send("GET", "/")


class Slow(HttpResponse):
    """Pauses its connection when the body comes, and goes on too late: when all of it has come."""

    exchange: Exchange

    def take(self, now: float, piece: bytes) -> None:
        super().take(now, piece)
        self.exchange.pause_reading()


async def test_a_connection_that_was_paused_is_read_again():
    script = Script(SIZED, SIZED)
    async with talking_to(script, timeout_s=5) as client:
        response, ended = Slow(), asyncio.Event()
        response.exchange = client.start("GET", b"/", [], b"", response, lambda error: ended.set())
        async with asyncio.timeout(5):
            await ended.wait()
        response.exchange.resume_reading()
        assert (await client.send("GET", "/")).body == response.body == b"hello world"

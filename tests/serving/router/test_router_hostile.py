"""The router between clients and workers that speak HTTP badly, slowly, or to do harm; raw sockets on both sides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from serving.router.workers import EVENTS_HEAD, Asked, Running, Worker, chunk, events, reply, routing

from headrace.serving.http.transport import endpoint
from headrace.serving.router.options import RouterOptions


@asynccontextmanager
async def connected(running: Running) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    try:
        yield reader, writer
    finally:
        writer.close()


def post(body: bytes, *lines: str, version: str = "1.1", path: str = "/v1/completions") -> bytes:
    head = [f"POST {path} HTTP/{version}", "host: 127.0.0.1", *lines]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in lines):
        head.append(f"content-length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode() + body


async def read_all(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(10):
        return await reader.read()


def echo(asked: Asked) -> bytes:
    return reply(200, {"got": asked.body.decode()})


NO_RESPONSES = {
    "garbage": [b"what?\r\n\r\n"],
    "half a status": [b"HTTP/1.1 2"],
    "an upgrade": [b"HTTP/1.1 101 Go\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"],
    "two lengths": [b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx"],
    "a length and chunks": [b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"],
    "no number": [b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\nxx"],
    "an endless head": [b"HTTP/1.1 200 OK\r\nx: " + b"y" * 300_000],
    "no chunk": [EVENTS_HEAD, b"zz\r\n"],
}


@pytest.mark.parametrize("answer", NO_RESPONSES.values(), ids=NO_RESPONSES)
async def test_what_is_no_response_is_asked_of_another(answer: list[bytes]):
    bad = Worker("bad", answer=lambda asked: answer)
    async with routing(bad, Worker("good", answer=echo)) as running:
        assert [await running.post(n=1) for _ in range(2)] == [(200, {"got": '{"n": 1}'})] * 2
        url = bad.url
        assert running.router.metrics.requests.labels(url, "lost")._value.get() == 1
    assert bad.asked


async def test_a_second_response_is_nobodys():
    worker = Worker(answer=lambda asked: echo(asked) + reply(200, {"got": "of somebody else"}))
    async with routing(worker) as running:
        answers = [await running.post(n=n) for n in range(4)]
    assert answers == [(200, {"got": json.dumps({"n": n})}) for n in range(4)]


async def test_a_stream_that_turns_into_garbage_ends_with_an_error():
    def garble(asked: Asked) -> list[bytes | asyncio.Event]:
        asyncio.get_running_loop().call_later(0.05, gate.set)
        return [EVENTS_HEAD, chunk(b"data: one\n\n"), gate, b"what?\r\n"]

    gate, worker = asyncio.Event(), Worker(answer=garble)
    async with routing(worker) as running:
        response = await running.client.send("POST", "/v1/completions", b'{"stream": true}')
    assert response.body.startswith(b"data: one\n\n") and b"engine_unavailable" in response.body
    assert response.is_complete


@pytest.mark.parametrize("request_bytes", [
    post(b"{}", "content-length: 2", "transfer-encoding: chunked"),
    post(b"{}", "content-length: 2", "content-length: 3"),
    post(b"{}", "content-length: -2"),
    post(b"{}", "transfer-encoding: xchunked"),
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n content-length: 2\r\n\r\n{}",
], ids=["both framings", "two lengths", "a negative length", "an unknown coding", "a folded header"])
async def test_requests_with_two_meanings_are_refused(request_bytes: bytes):
    worker = Worker(answer=echo)
    async with routing(worker) as running, connected(running) as (reader, writer):
        writer.write(request_bytes + post(b"smuggled"))
        answer = await read_all(reader)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"\r\n\r\n") == 1
    assert not worker.asked


async def test_chunks_and_expectations_end_at_the_router():
    worker = Worker(answer=echo)
    async with routing(worker) as running, connected(running) as (reader, writer):
        writer.write(post(b"", "transfer-encoding: chunked", "expect: 100-continue"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(chunk(b"one ") + chunk(b"two") + b"0\r\nx-trailer: 1\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(len(b'{"got": "one two"}')) == b'{"got": "one two"}'
    [asked] = worker.asked
    assert asked.headers["content-length"] == "7"
    assert not {"transfer-encoding", "expect", "x-trailer"} & asked.headers.keys()


async def test_pipelined_requests_are_answered_in_order():
    async with routing(Worker(answer=echo)) as running, connected(running) as (reader, writer):
        writer.write(b"".join(post(b"%d" % n) for n in range(5)) + post(b"last", "connection: close"))
        bodies = [part.partition(b"\r\n\r\n")[2] for part in (await read_all(reader)).split(b"HTTP/1.1 ")[1:]]
    assert [json.loads(body)["got"] for body in bodies] == ["0", "1", "2", "3", "4", "last"]


async def test_a_client_that_leaves_with_requests_in_its_pipe_takes_the_first_along():
    worker = Worker(answer=lambda asked: [EVENTS_HEAD, *[chunk(b"data: one\n\n")] * 100_000])
    async with routing(worker) as running:
        async with connected(running) as (reader, writer):
            writer.write(post(b"first") + post(b"second"))
            await reader.readuntil(b"data: one\n\n")
        await running.until(lambda: worker.num_lost_clients == 1)
        await running.until(lambda: running.router.num_running == 0)
        assert not next(iter(running.fleet)).relays
    assert [asked.body for asked in worker.asked] == [b"first"]


async def test_a_client_that_sends_no_more_is_answered():
    gate = asyncio.Event()
    worker = Worker(answer=lambda asked: [gate, *events("one")])
    async with routing(worker) as running, connected(running) as (reader, writer):
        writer.write(post(b"{}"))
        writer.write_eof()
        await running.until(lambda: bool(worker.asked))
        gate.set()
        answer = await read_all(reader)
    assert b"data: one\n\n" in answer and answer.endswith(b"0\r\n\r\n")


async def test_streams_to_clients_of_old_end_with_the_connection():
    worker = Worker(answer=lambda asked: events("one", "two"))
    async with routing(worker) as running, connected(running) as (reader, writer):
        writer.write(post(b"{}", version="1.0"))
        head, _, body = (await read_all(reader)).partition(b"\r\n\r\n")
    assert b"chunked" not in head and body == b"data: one\n\ndata: two\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "DELETE"])
async def test_other_methods_keep_their_connection(method: str):
    def answer(asked: Asked) -> bytes:
        found = reply(200, {"got": asked.method})
        return found.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if asked.method == "HEAD" else found

    worker = Worker(answer=answer)
    async with routing(worker) as running, connected(running) as (reader, writer):
        for _ in range(2):
            writer.write(f"{method} /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
            async with asyncio.timeout(5):
                head = await reader.readuntil(b"\r\n\r\n")
                body = b"" if method == "HEAD" else await reader.readuntil(b"}")
            assert head.startswith(b"HTTP/1.1 200") and method.encode() in (body or b"HEAD")
    assert [asked.method for asked in worker.asked] == [method] * 2


async def test_a_body_that_stops_coming_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(endpoint, "GAP_TIMEOUT_S", 0.2)
    worker = Worker(answer=echo)
    async with routing(worker) as running:
        for begun in (b"", b"{"):
            async with connected(running) as (reader, writer):
                writer.write(post(b"", "content-length: 9") + begun)
                async with asyncio.timeout(5):
                    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 408 ")
        assert running.router.num_running == 0
    assert not worker.asked


async def test_heads_have_a_limit():
    worker = Worker(answer=echo)
    async with routing(worker) as running, connected(running) as (reader, writer):
        writer.write(post(b"{}", "x-long: " + "y" * 100_000))
        assert (await read_all(reader)).startswith(b"HTTP/1.1 431 ")
    assert not worker.asked


async def test_a_body_over_the_limit_is_refused_while_it_comes():
    worker, options = Worker(answer=echo), RouterOptions(port=0, max_body_bytes=1024)
    async with routing(worker, options=options) as running, connected(running) as (reader, writer):
        writer.write(post(b"", "transfer-encoding: chunked") + chunk(b"x" * 2000))
        async with asyncio.timeout(5):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")
    assert not worker.asked

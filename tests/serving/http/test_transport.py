"""The wire: sloppy and hostile clients below the level of JSON, against the server's own protocol class."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
from fake_client import FakeClient, expected_text

from headrace.base.config import ServerConfig
from headrace.serving.http import body, connection
from headrace.serving.http.app import create_app
from headrace.serving.http.connection import BoundedHttp

ASK = json.dumps({"prompt": "once", "max_tokens": 4}).encode()
TEXT = b'"text":' + json.dumps(expected_text("once", 4)).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
SIZED = POST + b"Content-Length: %d\r\n" % len(ASK)


@pytest.fixture
async def port(client: FakeClient) -> AsyncIterator[int]:
    app = create_app(client, ServerConfig())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, http=BoundedHttp, ws="none", log_config=None, lifespan="off"))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = True
        await task


async def talk(port: int, *pieces: bytes, seconds: float = 0.4) -> tuple[bytes, bool]:
    """What comes back, and whether the server closed the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.02)
        while chunk := await asyncio.wait_for(reader.read(65536), seconds):
            answer += chunk
        return answer, True
    except ConnectionError:
        return answer, True
    except TimeoutError:
        return answer, False
    finally:
        writer.close()


@pytest.mark.parametrize("offer", [
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n",  # Java's client, with every request
    b"connection: upgrade\r\nupgrade: websocket\r\n",
])
async def test_an_offered_upgrade_does_not_cost_the_body(port, offer):
    answer, _ = await talk(port, SIZED + offer + b"\r\n" + ASK)
    assert answer.startswith(b"HTTP/1.1 200") and TEXT in answer


async def test_ways_to_send_a_body(port):
    expecting, _ = await talk(port, SIZED + b"Expect: 100-continue\r\n\r\n", ASK)
    assert expecting.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200") and TEXT in expecting
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in (ASK[:7], ASK[7:])]
    chunked, _ = await talk(port, POST + b"Transfer-Encoding: chunked\r\n\r\n", *chunks, b"0\r\n\r\n")
    assert chunked.startswith(b"HTTP/1.1 200") and TEXT in chunked
    pipelined, is_closed = await talk(port, (SIZED + b"\r\n" + ASK) * 3)
    assert pipelined.count(TEXT) == 3 and not is_closed
    byte_wise, _ = await talk(port, *(bytes([b]) for b in b"GET /health HTTP/1.1\r\n"), b"Host: x\r\n\r", b"\n")
    assert byte_wise.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("nonsense", [
    b"garbage\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", POST + b"Content-Length: -5\r\n\r\n",
    POST + b"Content-Length: 99999999999999999999\r\n\r\n", POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
])
async def test_what_is_not_http_is_told_so_and_closed(port, nonsense):
    answer, is_closed = await talk(port, nonsense)
    assert answer.startswith(b"HTTP/1.1 400") and is_closed


async def test_no_body_is_told_as_such(port):
    answer, _ = await talk(port, POST + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 400") and b"the body is empty" in answer


@pytest.mark.parametrize("head", [
    b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 70_000 + b"\r\n\r\n",
    b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
])
async def test_large_heads_are_refused(port, head):
    answer, is_closed = await talk(port, head)
    assert is_closed and (answer.startswith(b"HTTP/1.1 431") or answer.startswith(b"HTTP/1.1 400") or not answer)


async def test_heads_that_stop_coming_are_given_up(port, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.15)
    for pieces in ((), (b"GET /health HT",), (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /hea")):
        _, is_closed = await talk(port, *pieces, seconds=2)
        assert is_closed
    answer, is_closed = await talk(port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200") and not is_closed, "between requests the connection may rest"


async def test_bodies_that_stop_coming_are_given_up(port, client, monkeypatch):
    monkeypatch.setattr(body, "GAP_TIMEOUT_S", 0.1)
    answer, is_closed = await talk(port, SIZED + b"\r\n" + ASK[:5], seconds=2)
    assert answer.startswith(b"HTTP/1.1 408") and b"body_too_slow" in answer and is_closed
    slow, _ = await talk(port, SIZED + b"\r\n", *(ASK[i : i + 4] for i in range(0, len(ASK), 4)))
    assert slow.startswith(b"HTTP/1.1 200"), "slow is not stopped"
    assert len(client.submitted) == 1

"""The wire: sloppy and hostile clients below the level of JSON, against the server's own protocol class."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
import uvicorn
from fake_client import FakeClient, expected_text

from headrace.base.server_config import ServerConfig
from headrace.serving.http.app import create_app
from headrace.serving.http.transport import connection, endpoint
from headrace.serving.http.transport.asgi import AppConnection

PATIENCE_S = 120.0
ASK = json.dumps({"prompt": "once", "max_tokens": 4}).encode()
TEXT = b'"text":' + json.dumps(expected_text("once", 4)).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
MAX_BODY = 1 << 20
SIZED = POST + b"Content-Length: %d\r\n" % len(ASK)


@pytest.fixture
async def port(client: FakeClient) -> AsyncIterator[int]:
    app = create_app(client, ServerConfig(max_body_bytes=MAX_BODY))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, http=AppConnection, ws="none", log_config=None, lifespan="off"))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = True
        await task


async def talk(
    port: int, *pieces: bytes, until: bytes = b"", count: int = 1, gap_s: float = 0.02, rest_s: float = 0.2
) -> tuple[bytes, bool]:
    """The response, and whether the server closed the connection. Waits for the close, or for ``count`` of ``until`` in
    the response and then for what arrives within ``rest_s``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(gap_s)
        while chunk := await asyncio.wait_for(
            reader.read(65536), PATIENCE_S if not until or answer.count(until) < count else rest_s
        ):
            answer += chunk
        return answer, True
    except ConnectionError:
        return answer, True
    except TimeoutError:
        return answer, False
    finally:
        writer.close()


@pytest.mark.parametrize("offer", [
    # Java's client, with every request
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n",
    b"connection: upgrade\r\nupgrade: websocket\r\n",
])
async def test_an_offered_upgrade_does_not_cost_the_body(port, offer):
    answer, _ = await talk(port, SIZED + offer + b"\r\n" + ASK, until=TEXT)
    assert answer.startswith(b"HTTP/1.1 200") and TEXT in answer


async def test_ways_to_send_a_body(port):
    expecting, _ = await talk(port, SIZED + b"Expect: 100-continue\r\n\r\n", ASK, until=TEXT)
    assert expecting.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200") and TEXT in expecting
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in (ASK[:7], ASK[7:])]
    chunked, _ = await talk(port, POST + b"Transfer-Encoding: chunked\r\n\r\n", *chunks, b"0\r\n\r\n", until=TEXT)
    assert chunked.startswith(b"HTTP/1.1 200") and TEXT in chunked
    pipelined, is_closed = await talk(port, (SIZED + b"\r\n" + ASK) * 3, until=TEXT, count=3)
    assert pipelined.count(TEXT) == 3 and not is_closed
    byte_wise, _ = await talk(
        port, *(bytes([b]) for b in b"GET /health HTTP/1.1\r\n"), b"Host: x\r\n\r", b"\n", until=b"\r\n\r\n"
    )
    assert byte_wise.startswith(b"HTTP/1.1 200")


async def test_who_waits_for_leave_to_send_and_gets_none_is_told_that_the_connection_ends(port):
    """It may leave out the body then: what it sends next must not be taken for that."""
    waiting = SIZED.replace(b"application/json", b"text/plain") + b"Expect: 100-continue\r\n\r\n"
    answer, is_closed = await talk(port, waiting, HEALTH)
    assert answer.startswith(b"HTTP/1.1 415") and b"connection: close" in answer and is_closed
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("nonsense", [
    b"garbage\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    POST + b"Content-Length: -5\r\n\r\n",
    POST + b"Content-Length: 99999999999999999999\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
])
async def test_what_is_not_http_is_told_so_and_closed(port, nonsense):
    answer, is_closed = await talk(port, nonsense)
    assert answer.startswith(b"HTTP/1.1 400") and is_closed
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["type"] == "invalid_request_error" and "HTTP/1.1" in error["message"]


async def test_no_body_is_told_as_such(port):
    answer, _ = await talk(port, POST + b"\r\n", until=b"}")
    assert answer.startswith(b"HTTP/1.1 400") and b"the body is empty" in answer


@pytest.mark.parametrize("head", [
    b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 70_000 + b"\r\n\r\n",
    b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
])
async def test_large_heads_are_refused(port, head):
    answer, is_closed = await talk(port, head)
    assert is_closed and (answer.startswith(b"HTTP/1.1 431") or answer.startswith(b"HTTP/1.1 400"))
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


async def test_heads_that_stop_coming_are_given_up(port, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.15)
    for pieces in ((), (b"GET /health HT",), (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /hea")):
        _, is_closed = await talk(port, *pieces)
        assert is_closed
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 1.0)
    answer, is_closed = await talk(port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", until=b"\r\n\r\n", rest_s=1.5)
    assert answer.startswith(b"HTTP/1.1 200") and not is_closed, "between requests the connection may rest"


async def test_bodies_that_stop_coming_are_given_up(port, client, monkeypatch):
    monkeypatch.setattr(endpoint, "GAP_TIMEOUT_S", 0.1)
    answer, is_closed = await talk(port, SIZED + b"\r\n" + ASK[:5])
    assert answer.startswith(b"HTTP/1.1 408") and b"body_too_slow" in answer and is_closed
    monkeypatch.setattr(endpoint, "GAP_TIMEOUT_S", 1.5)
    slow, _ = await talk(port, SIZED + b"\r\n", *(ASK[i : i + 8] for i in range(0, len(ASK), 8)), until=TEXT, gap_s=0.4)
    assert slow.startswith(b"HTTP/1.1 200"), "slow is not stopped"
    assert len(client.submitted) == 1


def with_http_client(port: int, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def with_httpx(port: int, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    answer = httpx.post(
        f"http://127.0.0.1:{port}{path}", content=body, headers=headers, timeout=PATIENCE_S, trust_env=False
    )
    return answer.status_code, answer.content


def with_httpx_in_pieces(port: int, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    pieces = (body[i : i + 65536] for i in range(0, len(body), 65536))
    answer = httpx.post(
        f"http://127.0.0.1:{port}{path}", content=pieces, headers=headers, timeout=PATIENCE_S, trust_env=False
    )
    return answer.status_code, answer.content


def with_curl(port: int, path: str, headers: dict[str, str], body: bytes, *more: str) -> tuple[int, bytes]:
    command = shutil.which("curl")
    if command is None:
        pytest.skip("curl is not installed")
    told = [part for name, value in headers.items() for part in ("-H", f"{name}: {value}")]
    arguments = ["-sS", "-w", "\n%{http_code}", "-m", str(PATIENCE_S), *more, *told, "--data-binary", "@-"]
    done = subprocess.run(
        [command, *arguments, f"http://127.0.0.1:{port}{path}"], input=body, capture_output=True, check=True
    )
    text, _, status = done.stdout.rpartition(b"\n")
    return int(status), text


def with_curl_unasked(port: int, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    return with_curl(port, path, {**headers, "Expect": ""}, body)


def with_curl_of_old(port: int, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    return with_curl(port, path, {**headers, "Expect": ""}, body, "--http1.0")


Sender = Callable[[int, str, dict[str, str], bytes], tuple[int, bytes]]
SENDERS = [with_http_client, with_httpx, with_httpx_in_pieces, with_curl, with_curl_unasked, with_curl_of_old]
CLOSING, STAYING = {"Connection": "close"}, {}


@pytest.mark.parametrize("headers", [CLOSING, STAYING], ids=["closing", "staying"])
@pytest.mark.parametrize("send", SENDERS)
async def test_who_sends_too_much_is_told_so_whenever_it_looks(port, client, send: Sender, headers):
    """Not by a reset connection. Most clients read the response when all is sent, far beyond what sockets buffer."""
    body = b'{"prompt": "' + b"x" * (24 << 20) + b'"}'
    for path, read in (
        ("/v1/completions", lambda told: told["error"]["code"]),
        ("/v1/messages", lambda told: {"request_too_large": "body_too_large"}[told["error"]["type"]]),
        (
            "/api/chat",
            lambda told: "body_too_large" if "at most 1048576" in told[
                "error"
            ] or "more than 1048576" in told["error"] else ""
        ),
    ):
        status, text = await asyncio.to_thread(send, port, path, {"Content-Type": "application/json", **headers}, body)
        assert status == 413 and read(json.loads(text)) == "body_too_large"
    assert not client.submitted


@pytest.mark.parametrize("send", SENDERS)
async def test_refusals_of_other_kinds_reach_who_still_sends(port, send: Sender):
    for path, kind, status in (("/nope", "application/json", 404), ("/v1/completions", "text/plain", 415)):
        found, text = await asyncio.to_thread(
            send, port, path, {"Content-Type": kind, "Connection": "close"}, b"x" * (24 << 20)
        )
        assert found == status and json.loads(text)["error"]["message"]


async def test_what_comes_after_an_answer_is_dropped_within_bounds(port, monkeypatch):
    large = POST + b"Content-Length: 100000000\r\n\r\n"
    answer, is_closed = await talk(port, large)
    assert answer.startswith(b"HTTP/1.1 413") and is_closed
    monkeypatch.setattr(connection, "MAX_REST_BYTES", 4 << 20)
    for head in (large, large.replace(b"/v1/completions", b"/nope"), b"GET / HTTP/1.1\r\na: " + b"x" * 70_000):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        assert (await reader.readuntil(b"\r\n"))[9:12] in (b"413", b"404", b"431")
        with pytest.raises(ConnectionError):
            for _ in range(400):
                writer.write(b"x" * 65536)
                await writer.drain()
        writer.close()
    monkeypatch.setattr(connection, "REST_TIMEOUT_S", 0.2)
    for head in (large, large.replace(b"/v1/completions", b"/nope")):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        await reader.readuntil(b"\r\n")
        with pytest.raises(ConnectionError):
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()


@pytest.mark.parametrize("filler", [b"0\r\n", b"1;"], ids=["trailers", "an extension"])
async def test_what_is_no_content_of_a_body_is_bounded(port, client, filler: bytes):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(POST + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n" + filler)
    line = b"a: " + b"x" * 1000 + b"\r\n" if filler[:1] == b"0" else b"x" * 1000
    for _ in range(1000):
        writer.write(line)
        await writer.drain()
    answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    assert answer.startswith(b"HTTP/1.1 400") and b"more than 65536 bytes of a body are no data of it" in answer
    writer.close()
    answer, _ = await talk(port, SIZED + b"\r\n" + ASK, until=TEXT)
    assert TEXT in answer and len(client.submitted) == 1


async def test_a_connection_goes_on_behind_a_body_that_was_not_read(port):
    unread = b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n"
    answer, is_closed = await talk(port, unread, b"x" * 200_000, b"x" * 100_000, SIZED + b"\r\n" + ASK, until=TEXT)
    assert answer.startswith(b"HTTP/1.1 404") and TEXT in answer and not is_closed


async def half_close(port: int, *pieces: bytes) -> bytes:
    """The whole response to a client that shuts down its side once it has sent, in the same moment."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces[:-1]:
            writer.write(piece)
            await asyncio.sleep(0.02)
        writer.write(pieces[-1])
        writer.write_eof()
        return await asyncio.wait_for(reader.read(), PATIENCE_S)
    finally:
        writer.close()


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
STREAMED = json.dumps({"prompt": "once", "max_tokens": 40, "stream": True}).encode()


@pytest.mark.parametrize(("pieces", "found"), [
    ((SIZED + b"\r\n" + ASK,), TEXT),
    ((SIZED + b"\r\n", ASK), TEXT),
    ((SIZED + b"Connection: close\r\n\r\n" + ASK + b"\r\n",), TEXT),
    ((SIZED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n" + ASK,), TEXT),
    ((POST + b"Content-Length: %d\r\n\r\n" % len(STREAMED) + STREAMED,), b"[DONE]"),
    ((HEALTH,), b'"ok"'),
    ((b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",), b'"error"'),
])
async def test_who_sends_no_more_is_answered(port, client, pieces, found):
    client.delay_s = 0.01
    for _ in range(10):
        answer = await half_close(port, *pieces)
        assert answer.startswith(b"HTTP/1.1 ") and answer.count(found) == 1


async def test_pipelined_requests_are_all_answered(port):
    answer = await half_close(port, (SIZED + b"\r\n" + ASK) * 3 + HEALTH)
    assert answer.count(TEXT) == 3 and answer.endswith(b"}") and b'"ok"' in answer


@pytest.mark.parametrize("broken_off", [b"", b"GET /hea", SIZED + b"\r\n" + ASK[:5]])
async def test_what_was_broken_off_is_closed(port, client, broken_off):
    assert await half_close(port, broken_off) == b"" and not client.submitted
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEALTH)
    await reader.readuntil(b"}")
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), 5) == b"", "between requests"
    writer.close()


async def test_who_sends_no_more_and_waits_is_told_to_go_on(port, client, monkeypatch):
    monkeypatch.setattr(connection, "FIRST_PROBE_S", 0.3)
    client.delay_s = 0.4
    answer = await half_close(port, SIZED + b"\r\n" + ASK)
    assert answer.startswith(connection.PROBE) and answer.count(connection.PROBE) == 2  # after 0.3 and 0.9 s
    assert answer.replace(connection.PROBE, b"").startswith(b"HTTP/1.1 200") and TEXT in answer
    old = await half_close(port, SIZED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n" + ASK)
    assert old.startswith(b"HTTP/1.1 200") and TEXT in old  # HTTP/1.0 has no interim responses


@pytest.mark.parametrize("stream", [True, False])
async def test_who_is_gone_is_not_served(port, client, stream):
    ask = json.dumps({"prompt": "once", "max_tokens": 3000, "stream": stream}).encode()
    client.delay_s = 0.01
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(ask) + ask)
    async with asyncio.timeout(PATIENCE_S):
        while client.num_tokens < 5:
            await asyncio.sleep(0.01)
        writer.close()
        while client.children:
            await asyncio.sleep(0.01)
    assert client.aborted and client.num_tokens < 1500


async def test_streams_to_clients_of_old_end_with_the_connection(port):
    ask = json.dumps({"prompt": "once", "max_tokens": 4, "stream": True}).encode()
    head = (
        b"POST /v1/completions HTTP/%b\r\nHost: x\r\nContent-Type: application/json\r\nConnection: "
        b"keep-alive\r\nContent-Length: %d\r\n\r\n"
    )
    old, is_closed = await talk(port, head % (b"1.0", len(ask)) + ask)
    top, _, events = old.partition(b"\r\n\r\n")
    assert (
        is_closed and top.startswith(b"HTTP/1.1 200") and b"connection: close" in top.lower()
        and b"transfer-encoding" not in top.lower()
    )
    pieces = events.split(b"\n\n")
    assert pieces[-2:] == [b"data: [DONE]", b""] and all(p.startswith(b"data: ") for p in pieces[:-1])
    assert "".join(json.loads(p[6:])["choices"][0]["text"] for p in pieces[:-2]) == expected_text("once", 4)
    new, is_closed = await talk(port, head % (b"1.1", len(ask)) + ask, until=b"0\r\n\r\n")
    assert not is_closed and b"transfer-encoding: chunked" in new.lower() and new.endswith(b"0\r\n\r\n")
    whole, is_closed = await talk(port, SIZED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n" + ASK)
    assert is_closed and b"content-length: " in whole.lower() and TEXT in whole
    asked_head, is_closed = await talk(port, b"HEAD /nope HTTP/1.0\r\n\r\n")
    assert is_closed and asked_head.endswith(b"\r\n\r\n")

"""Clients that want more of the router than an answer, with sockets in memory."""

from __future__ import annotations

import asyncio

import pytest
from serving.router.in_memory import MemoryRouter, Transport, settle
from serving.router.test_router_in_memory import post, read_responses

from headrace.serving.http.transport import connection
from headrace.serving.router.options import RouterOptions

CHUNKED = b"POST %b HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
COMPLETIONS = b"/v1/completions"


async def test_a_lost_stream_of_declared_length_is_not_ended_by_an_event():
    """The client counts bytes: behind an event that is too short it would take the next response for this body."""
    memory = MemoryRouter(1)
    client = memory.connect()
    client.receive(post(b"{}") * 2)
    await settle()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 1000\r\n\r\n"
    memory.workers[0].receive(head + b"data: one\n\n")
    memory.workers[0].lose()
    await settle()
    [found] = read_responses(bytes(client.sent), 2, is_over=client.is_over)
    assert client.is_over and found.body == b"data: one\n\n" and not found.is_whole
    memory.check_idle()


@pytest.mark.parametrize("begun", [b"0\r\nx: ", b"2;"], ids=["trailer", "chunk extension"])
@pytest.mark.parametrize("path", [COMPLETIONS, b"/nowhere"])
async def test_what_is_no_data_of_a_body_has_a_limit(begun: bytes, path: bytes):
    memory = MemoryRouter(1)
    client = memory.connect()
    client.receive(CHUNKED % path + begun)
    client.receive(b"y" * 65_000)
    assert not client.has_sent_eof
    client.receive(b"y" * 1000)
    assert client.has_sent_eof
    [found] = read_responses(bytes(client.sent), 1, is_over=True)
    assert found.status == (400 if path == COMPLETIONS else 404)
    client.lose()
    await settle()
    memory.check_idle()
    assert not memory.workers


async def test_small_chunks_are_kept_in_few_objects():
    memory, chunks = MemoryRouter(1), b"1\r\nx\r\n" * 5000
    client = memory.connect()
    client.receive(CHUNKED % COMPLETIONS + chunks)
    client.receive(chunks)
    [request] = client.protocol._requests
    assert len(request.parts) == 2 and request.num_bytes == 10_000
    client.receive(b"0\r\n\r\n")
    await settle()
    assert memory.workers[0].sent.endswith(b"content-length: 10000\r\n\r\n" + b"x" * 10_000)


def asking(memory: MemoryRouter, num: int) -> Transport:
    """A client that asks so often in one piece, and reads nothing of what it has got."""
    client = memory.connect()
    client.receive(b"GET /health HTTP/1.1\r\n\r\n")
    client.protocol.pause_writing()
    client.receive(b"GET /metrics HTTP/1.1\r\n\r\n" * num)
    return client


async def test_a_client_that_reads_nothing_gets_no_more_answers():
    client = asking(MemoryRouter(1), 3)
    assert len(read_responses(bytes(client.sent), 4, is_over=False, method="GET")) == 1 and client.is_reading_paused
    client.protocol.resume_writing()
    assert len(read_responses(bytes(client.sent), 4, is_over=False, method="GET")) == 4
    assert client.receive(b"GET /health HTTP/1.1\r\n\r\n"), "it is read again"


async def test_the_body_of_a_request_that_waits_for_its_client_is_not_read():
    memory = MemoryRouter(1)
    client = memory.connect()
    client.protocol.pause_writing()
    client.receive(post(b"{}")[:-1])
    assert not client.receive(b"}") and not client.sent
    client.protocol.resume_writing()
    client.receive(b"}")
    await settle()
    assert memory.workers[0].sent.endswith(b"{}")


async def test_a_client_has_a_time_to_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "REST_TIMEOUT_S", 0.02)
    memory = MemoryRouter(1)
    client = asking(memory, 2)
    async with asyncio.timeout(10):
        while not client.is_over:
            await asyncio.sleep(0.005)
    await settle()
    memory.check_idle()


async def test_garbage_behind_an_early_response_gets_no_second_one():
    memory = MemoryRouter(1)
    client = memory.connect()
    client.receive(CHUNKED % b"/nowhere" + b"2\r\n")
    client.receive(b"garbage\r\n")
    assert [each.status for each in read_responses(bytes(client.sent), 1, is_over=False)] == [404]
    assert client.has_sent_eof and client.sent.count(b"HTTP/1.1 4") == 1
    client.lose()
    memory.check_idle()


@pytest.mark.parametrize("path", [b"/v1/responses/../../flush_cache", b"/v1/models/%2e%2e/%2E%2e/pause",
                                  b"/v1/responses/..%2f..%2fpause", b"/v1/models/.", b"/v1/models/a/./b"])
async def test_paths_that_lead_elsewhere_are_not_passed_on(path: bytes):
    memory = MemoryRouter(1)
    client = memory.connect()
    client.receive(post(b"", path=path) + post(b"", path=b"/v1/models/a/.b..c"))
    await settle()
    assert [each.status for each in read_responses(bytes(client.sent), 1, is_over=False)] == [404]
    assert b"POST /v1/models/a/.b..c HTTP/1.1\r\n" in memory.workers[0].sent


async def test_a_length_with_thousands_of_zeros_is_a_length():
    memory = MemoryRouter(1, RouterOptions(port=0, max_body_bytes=1024))
    for length, expected in ((b"1025", b"HTTP/1.1 413 "), (b"2", b"")):
        client = memory.connect()
        client.receive(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %b%b\r\n\r\n{}" % (b"0" * 5000, length))
        assert client.sent[:13] == expected
    await settle()
    assert memory.workers[0].sent.endswith(b"content-length: 2\r\n\r\n{}")


async def test_names_of_models_are_not_searched():
    """A search for the colon between base model and adapter would take a minute for this one."""
    memory = MemoryRouter(1)
    [worker] = memory.fleet
    worker.models = {"m": {"id": "m"}}
    client = memory.connect()
    async with asyncio.timeout(10):
        client.receive(post(b'{"model": "%b"}' % (b":" * 500_000)))
        await settle()
    assert memory.workers[0].sent


@pytest.mark.parametrize("status", [b"000", b"099"])
async def test_no_status_is_no_response(status: bytes):
    memory = MemoryRouter(1)
    client = memory.connect()
    client.receive(post(b"{}"))
    await settle()
    memory.workers[0].receive(b"HTTP/1.1 %b X\r\ncontent-length: 2\r\n\r\n{}" % status)
    await settle()
    assert [each.status for each in read_responses(bytes(client.sent), 1, is_over=False)] == [503]
    memory.check_idle()


async def test_clients_of_old_are_sent_no_interim_response():
    client = MemoryRouter(1).connect()
    client.receive(b"POST /v1/completions HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
    assert not client.sent

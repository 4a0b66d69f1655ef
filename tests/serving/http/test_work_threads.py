"""Large bodies and texts: refused by their counts or lengths where that suffices, worked on beside the event loop, and
dropped when their client goes."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest
from fake_apps import http_for, live_server
from fake_client import ByteTokenizer, FakeClient
from starlette.requests import Request

from headrace.base.errors import RequestError
from headrace.base.server_config import ServerConfig
from headrace.service.tokenization.bounds import NO_BOUND
from headrace.service.tokenization.pieces import Encoder, encode_pieces
from headrace.serving.http.app import create_app
from headrace.serving.http.transport.errors import BodyTooLarge
from headrace.serving.http.transport.spans import MAX_DEPTH, MAX_VALUES, PIECE_BYTES, check_num_values
from headrace.serving.http.transport.threads import AT_ONCE, while_connected


class SlowTokenizer(ByteTokenizer):
    """Takes 10 ms for each 1,000 characters, in pieces, as long as somebody waits; cannot bound texts by length."""

    bound = NO_BOUND

    def __init__(self) -> None:
        self.num_pieces, self.has_ended = 0, threading.Event()

    def encode_pieces(self, text: str, *, add_special_tokens: bool = True):
        def encode(piece: str) -> list[int]:
            self.num_pieces += 1
            time.sleep(0.01)
            return list(piece.encode())

        try:
            yield from encode_pieces(text, Encoder(encode), size=1000, around=0, most=1000)
        finally:
            self.has_ended.set()


@pytest.fixture
def slow() -> FakeClient:
    return FakeClient(tokenizer=SlowTokenizer())


async def longest_stall(work, *, step_s: float = 0.005) -> float:
    """Seconds for which the event loop stood still while ``work`` ran."""
    longest, task = 0.0, asyncio.create_task(work)
    while not task.done():
        begin = time.perf_counter()
        await asyncio.sleep(step_s)
        longest = max(longest, time.perf_counter() - begin - step_s)
    await task
    return longest


async def test_small_texts_do_not_wait_for_giants(slow: FakeClient):
    async with http_for(slow) as http:
        giants = [asyncio.create_task(http.post("/tokenize", json={"prompt": "a" * 3_000_000})) for _ in range(6)]
        await asyncio.sleep(0.3)
        for size in (10, AT_ONCE + 1, 30_000):
            answer = await http.post("/tokenize", json={"prompt": "a" * size})
            assert answer.status_code == 200 and answer.json()["count"] == size
        assert not any(giant.done() for giant in giants), "they take half a minute"
        for giant in giants:
            giant.cancel()
        await asyncio.gather(*giants, return_exceptions=True)


async def test_work_ends_when_its_client_goes(slow: FakeClient):
    async with live_server(create_app(slow, ServerConfig())) as address:
        host, port = address.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "a" * 3_000_000}).encode()
        head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        while not slow.tokenizer.num_pieces:
            await asyncio.sleep(0.01)
        assert not slow.tokenizer.has_ended.is_set()
        writer.transport.abort()
        assert await asyncio.to_thread(slow.tokenizer.has_ended.wait, 2)
        assert slow.tokenizer.num_pieces < 500


async def test_a_task_cancelled_while_its_watch_ends_is_cancelled():
    """Else whoever awaits it under a timeout waits on."""

    async def receive() -> dict:
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            task.cancel()

    async def go_on() -> None:
        result = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, result.set_result, 1)
        await while_connected(Request({"type": "http"}, receive), result)
        pytest.fail("it went on")

    task = asyncio.create_task(go_on())
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(("path", "body"), [
    ("/tokenize", {"prompt": "a" * 40_000}),
    ("/tokenize", {"messages": [{"role": "user", "content": "a" * 40_000}]}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a" * 40_000}]}),
    ("/v1/responses/input_tokens", {"input": "a" * 40_000}),
])
async def test_texts_that_are_certainly_too_long_are_not_encoded(
    client: FakeClient, path: str, body: dict, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ByteTokenizer, "encode_pieces", lambda *_, **__: pytest.fail("it was encoded"))
    async with http_for(client) as http:
        answer = await http.post(path, json=body)
        assert answer.status_code == 400 and "max_model_len" in answer.text


TURN = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "t", "parameters": {"type": "object", "properties": {"a": {}}}}}


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/messages", {"max_tokens": 1, "messages": [TURN] * 300_000}),
    ("/v1/messages", {"max_tokens": 1, "messages": [{**TURN, "content": [{"type": "text", "text": "a"}] * 200_000}]}),
    ("/v1/chat/completions", {"messages": [TURN] * 300_000}),
    ("/v1/chat/completions", {"messages": [TURN], "tools": [{**TOOL, "x": [{}] * 200}] * 1024}),
    ("/v1/responses", {"input": [TURN] * 200_000}),
])
async def test_bodies_of_too_many_parts_are_refused_unread(client: FakeClient, path: str, body: dict):
    content = json.dumps(body).encode()
    async with http_for(client) as http:
        answers = []

        async def post() -> None:
            answers.append(await http.post(path, content=content, headers={"content-type": "application/json"}))

        stall = await longest_stall(post())
        assert answers[0].status_code == 413 and f"more than {MAX_VALUES} strings" in answers[0].text
        assert stall < 0.25, "much less when nothing else runs on the machine"


@pytest.mark.parametrize("text", ['"{[', '\\"[{', "\\\\", "}", '{"a": "\\"}'])
def test_what_strings_hold_is_not_counted(text: str):
    """At every position of a quote, bracket or escape relative to the ends of the scanned pieces."""
    for shift in range(0, 12):
        strings = ["x" * (PIECE_BYTES - 6 - shift), text * 200_000]
        check_num_values(json.dumps(strings).encode())
        with pytest.raises(BodyTooLarge):
            check_num_values(json.dumps([*strings, [[]] * MAX_VALUES]).encode())


@pytest.mark.parametrize("kind", ["list", "object"])
def test_depth_is_bounded(kind: str):
    opened, closed = ("[", "]") if kind == "list" else ('{"a":', "}")

    def nested(depth: int) -> bytes:
        return (opened * depth + "1" + closed * depth).encode()

    check_num_values(nested(MAX_DEPTH))
    check_num_values(b"[" + b",".join([nested(MAX_DEPTH - 1)] * 50) + b"]")
    with pytest.raises(RequestError, match="nested too deeply"):
        check_num_values(nested(MAX_DEPTH + 1))

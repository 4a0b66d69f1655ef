"""Pieces that are written past ``send``: with those that are sent they make one stream, in order, whoever is slow."""

from __future__ import annotations

import asyncio
import json
import logging
import random

import pytest
from fake_client import FakeClient, expected_text

from headrace.base.server_config import OperationsConfig, ServerConfig
from headrace.serving.http.app import create_app
from headrace.serving.http.transport.asgi import EXTENSION, BodyWriter

NUM_TOKENS = 60


class Wire(BodyWriter):
    """Where both ways end. With a seed, ``send`` takes its time now and then, and the connection is full now and
    then."""

    __slots__ = ("body", "is_started", "num_sent", "num_written", "rng")

    def __init__(self, seed: int | None = None):
        self.body, self.rng = b"", random.Random(seed) if seed is not None else None
        self.num_sent = self.num_written = 0
        self.is_started = False

    @property
    def is_free(self) -> bool:
        return self.is_started and (self.rng is None or self.rng.random() < 0.7)

    def write(self, piece: bytes) -> None:
        assert piece and self.is_started
        self.num_written += 1
        self.body += piece

    async def send(self, message: dict) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200
            self.is_started = True
            return
        for _ in range(self.rng.choice((0, 0, 3)) if self.rng else 0):
            await asyncio.sleep(0)
        self.num_sent += 1
        self.body += message["body"]


async def ask(
    path: str, body: dict, wire: Wire, *, has_writer: bool = True, operations: OperationsConfig | None = None
) -> list[dict]:
    """The events of a streamed answer."""
    app, payload = create_app(FakeClient(), ServerConfig(), operations), json.dumps(body).encode()
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json")], "scheme": "http", "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    if has_writer:
        scope["extensions"] = {EXTENSION: {"writer": wire}}
    messages = [{"type": "http.request", "body": payload, "more_body": False}]

    async def receive() -> dict:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    await asyncio.wait_for(app(scope, receive, wire.send), 120)
    *events, done, rest = wire.body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def texts_of(events: list[dict]) -> dict[int, str]:
    """The text of each choice."""
    texts: dict[int, str] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


@pytest.mark.parametrize("seed", range(6))
async def test_written_and_sent_pieces_make_one_stream(seed: int):
    wire = Wire(seed)
    events = await ask(
        "/v1/completions", {"prompt": "once", "max_tokens": NUM_TOKENS, "n": 2, "seed": 5, "stream": True}, wire
    )
    assert texts_of(events) == {i: expected_text("once", NUM_TOKENS, seed=5 + i) for i in (0, 1)}
    assert wire.num_written > 10 < wire.num_sent
    assert [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]] == ["length"] * 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("options", [
    {}, {"n": 2}, {"logprobs": 1}, {"return_token_ids": True}, {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
], ids=repr)
async def test_events_are_the_same_as_without_a_writer(path: str, options: dict):
    body = {"max_tokens": 12, "stream": True, "seed": 3, **options}
    if path == "/v1/completions":
        body |= {"prompt": "once"}
    else:
        body |= (
            {"messages": [{"role": "user", "content": "once"}]}
            | ({"logprobs": True, "top_logprobs": 1} if "logprobs" in body else {})
        )

    async def tell(*, has_writer: bool) -> list[dict]:
        events = await ask(path, body, Wire(), has_writer=has_writer)
        return [{k: v for k, v in event.items() if k not in ("id", "created")} for event in events]

    sent, written = await tell(has_writer=False), await tell(has_writer=True)
    assert len(sent) >= 12
    for index in range(options.get("n", 1)):
        assert (
            [e for e in sent if e["choices"] and e["choices"][0]["index"] == index]
            == [e for e in written if e["choices"] and e["choices"][0]["index"] == index]
        )
    assert [e for e in sent if not e["choices"]] == [e for e in written if not e["choices"]]


async def test_who_records_answers_sees_all_of_them(caplog: pytest.LogCaptureFixture, tmp_path):
    caplog.set_level(logging.INFO)
    wire = Wire()
    events = await ask(
        "/v1/completions", {"prompt": "once", "max_tokens": 20, "stream": True}, wire,
        operations=OperationsConfig(dump_requests=str(tmp_path), log_requests="fields"),
    )
    assert texts_of(events) == {0: expected_text("once", 20)}
    assert wire.num_written == 0 < wire.num_sent

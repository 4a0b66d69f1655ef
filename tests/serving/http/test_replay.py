"""Recorded requests sent again to a server on a port, and what is said of the answers."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest
from fake_apps import live_server
from fake_client import FakeClient
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ConfigError
from headrace.base.server_config import OperationsConfig, ServerConfig
from headrace.serving.cli.main import main
from headrace.serving.http.app import create_app
from headrace.serving.replay import (
    Record,
    ReplayOptions,
    compare,
    count_tokens,
    is_random,
    output_of,
    read_records,
    replay,
)

ASKS = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 5, "temperature": 0}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 5, "n": 2, "seed": 3, "stream": True}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 6, "temperature": 0, "stream": True}
    ),
    ("/generate", {"text": "g", "sampling_params": {"max_new_tokens": 6, "temperature": 0}, "stream": True}),
    (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": "m"}], "max_tokens": 4, "model": "fake-model", "temperature": 0,
            "stream": True
        }
    ),
    ("/v1/responses", {"input": "r", "max_output_tokens": 4, "temperature": 0, "stream": True}),
    (
        "/api/chat",
        {
            "messages": [{"role": "user", "content": "o"}], "model": "fake-model",
            "options": {"temperature": 0, "num_predict": 4}
        }
    ),
    ("/v1/completions", {"prompt": "random", "max_tokens": 5, "model": "fake-model"}),
    ("/v1/completions", {"prompt": "x", "n": 0}),
]


async def record(folder: Path, client: FakeClient) -> list[Record]:
    app = create_app(client, ServerConfig(), OperationsConfig(dump_requests=str(folder)))
    async with live_server(app) as url:
        given_to = [
            Record(at=float(i), path=path, body=msgspec.Raw(json.dumps(body).encode())) for i,
            (path, body) in enumerate(ASKS)
        ]
        await replay(given_to, ReplayOptions(base_url=url, speed=0, concurrency=1))
    app.state.context.close()
    return read_records(str(folder))


async def test_a_replay_tells_what_is_the_same_and_what_is_not(tmp_path: Path):
    records = await record(tmp_path, FakeClient())
    assert [r.path for r in records] == [path for path, _ in ASKS] and [r.status for r in records] == [200] * 8 + [400]
    assert [is_random(r) for r in records] == [False] * 7 + [True, True]
    client = FakeClient(delay_s=0.002)
    async with live_server(create_app(client, ServerConfig())) as url:
        same = compare(
            list(zip(records, await replay(records, ReplayOptions(base_url=url + "/v1", speed=0)), strict=True))
        )
        assert (
            same.num_sent, same.same_status, same.same_answer, same.not_comparable, same.different_answer
        ) == (9, 9, 8, 1, 0)
        client.script = b"something else"
        other = compare(list(zip(records, await replay(records, ReplayOptions(base_url=url, speed=0)), strict=True)))
        assert (
            other.same_answer, other.different_answer, other.different_random
        ) == (0, 7, 1) and len(other.differing) == 7
        client.state = "restarting"
        refused = compare(list(zip(records, await replay(records, ReplayOptions(base_url=url, speed=0)), strict=True)))
        assert refused.statuses == {"200 -> 503": 8, "400 -> 503": 1} or refused.statuses == {"200 -> 503": 8}
    assert count_tokens(records[0].answer) == 5 and count_tokens(records[4].answer) == 4


async def test_times_between_requests_are_kept(tmp_path: Path):
    body = msgspec.Raw(b'{"prompt": "x", "max_tokens": 1, "model": "mine"}')
    records = [Record(at=100.0 + at, path="/v1/completions", body=body) for at in (0.0, 0.3, 0.6)]
    client = FakeClient()
    async with live_server(create_app(client, ServerConfig())) as url:
        begin = time.time()
        answers = await replay(records, ReplayOptions(base_url=url, speed=2.0, model="fake-model"))
        offsets = [answer.at - begin + 0.001 for answer in answers]  # by two clocks
        assert [a.status for a in answers] == [200] * 3, "the model goes by its name here"
        assert offsets[0] >= 0 and offsets[1] >= 0.15 and offsets[2] >= 0.3
    with pytest.raises(ConfigError, match="no server responds"):
        await replay(records, ReplayOptions(base_url=url, speed=0))
    with pytest.raises(ConfigError, match="http://"):
        await replay(records, ReplayOptions(base_url="ftp://x"))


async def test_the_command(tmp_path: Path, capsys, monkeypatch):
    import asyncio

    await record(tmp_path / "dump", FakeClient())
    client = FakeClient()
    async with live_server(create_app(client, ServerConfig())) as url:
        argv = [
            "replay", str(tmp_path / "dump"), "--base-url", url, "--speed", "0", "--output-file",
            str(tmp_path / "now.jsonl")
        ]
        assert await asyncio.to_thread(main, argv) == 0
        said = capsys.readouterr().out
        assert (
            "9 requests sent, 9 with the recorded status" in said and "responses: 8 the same, 0 different" in said
            and "output tokens" in said
        )
        assert len(read_records(str(tmp_path / "now.jsonl"))) == 9
        client.script = b"other"
        assert await asyncio.to_thread(main, argv) == 1
        assert "7 different, 1 more sampled at random" in " ".join(capsys.readouterr().out.split())
    assert await asyncio.to_thread(main, ["replay"]) == 2 and "headrace replay FOLDER" in capsys.readouterr().err


@given(st.lists(st.text(alphabet="ab \n{}[]\"\\é", max_size=6), min_size=1, max_size=8), st.data())
def test_a_stream_says_the_same_however_it_is_cut(pieces: list[str], data):
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    other = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def stream(parts: list[str]) -> str:
        return "".join(
            f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': part}}]})}\n\n" for part in parts
        ) + "data: [DONE]\n\n"

    assert output_of(stream(pieces)) == output_of(stream(other))
    if text:
        assert output_of(stream(pieces)) == {("0/0", "content"): text} != output_of(stream([*pieces, "!"]))


def test_numbers_are_compared_by_three_digits():
    first, second = (json.dumps({"data": [{"index": 0, "embedding": [0.12345, x]}]}) for x in (0.5, 0.50001))
    assert output_of(first) == output_of(second) != output_of(first.replace("0.5]", "0.6]"))
    assert output_of("not json") is None and output_of("{}") is None

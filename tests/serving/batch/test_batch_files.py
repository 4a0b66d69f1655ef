"""Batch files over a fake engine: every line gets its answer or its error, once, also over several runs."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "http"))

from fake_client import FakeClient, expected_text

from headrace.base.errors import ConfigError, EngineUnavailable
from headrace.base.server_config import ServerConfig
from headrace.serving import batch as batch_lines
from headrace.serving.batch import TRIES, Completed, InsideClient, count_lines, open_output, read_items, run_batch
from headrace.serving.http.app import create_app


def line(custom_id: str, body: dict, url: str = "/v1/completions", **more) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more}).encode() + b"\n"


GOOD = {"prompt": "go", "max_tokens": 3, "temperature": 0, "seed": 0}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
BAD = {
    "not json": b"{nope\n", "array": b"[1]\n", "utf-8": b'{"custom_id": "\xff"}\n',
    "no id": b'{"url": "/v1/completions", "body": {}}\n', "empty id": line("", GOOD),
    "number as id": line(7, GOOD), "other url": line("u", GOOD, "/flush_cache"),
    "traversal": line("t", GOOD, "/v1/../flush_cache"), "method": line("m", GOOD, method="GET"),
    "stream": line("s", {**GOOD, "stream": True}), "body is text": line("b", "x"),
    "deep": b'{"custom_id": "d", "body": ' + b"[" * 100_000 + b"\n",
}


async def run(text: bytes, path: Path, client: FakeClient | None = None, **options) -> list[dict]:
    output, answered = open_output(path)
    with output:
        await run_batch(
            InsideClient(create_app(client or FakeClient(), ServerConfig())), read_items(io.BytesIO(text), answered),
            output, concurrency=4, **options
        )
    return [json.loads(text) for text in path.read_bytes().splitlines()]


async def test_answers_are_those_of_the_server(tmp_path: Path):
    text = (
        line("a", GOOD) + b"\n" + line("b", CHAT, "/v1/chat/completions", extra="ignored")
        + line("c", {**GOOD, "temperature": -1}) + line("d", {"input": "x"}, "/v1/embeddings")
    )
    records = {r["custom_id"]: r for r in await run(text, tmp_path / "out")}
    assert records.keys() == {"a", "b", "c", "d"} and len({r["id"] for r in records.values()}) == 4
    assert records["a"]["response"]["status_code"] == 200 and records["a"]["error"] is None
    assert records["a"]["response"]["body"]["choices"][0]["text"] == expected_text("go", 3)
    assert records["a"]["response"]["request_id"] == records["a"]["response"]["body"]["id"]
    assert records["b"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert (
        records["c"]["response"]["status_code"] == 400
        and records["c"]["response"]["body"]["error"]["param"] == "temperature"
    )
    assert records["d"]["response"]["status_code"] == 400, "this model generates"


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_line_fails_alone(tmp_path: Path, name: str):
    records = await run(line("first", GOOD) + BAD[name] + line("last", GOOD), tmp_path / "out")
    assert {r["custom_id"] for r in records if r["response"]} == {"first", "last"}
    (failed,) = [r for r in records if not r["response"]]
    assert (
        failed["error"]["line"] == 2 and failed["error"]["code"] == "invalid_request_error"
        and failed["error"]["message"]
    )


async def test_ids_are_used_once(tmp_path: Path):
    records = await run(line("a", GOOD) + line("a", CHAT, "/v1/chat/completions"), tmp_path / "out")
    assert [bool(r["response"]) for r in sorted(records, key=lambda r: not r["response"])] == [True, False]
    assert "earlier line" in next(r["error"]["message"] for r in records if r["error"])


async def test_a_second_run_answers_what_is_left(tmp_path: Path):
    text = line("a", GOOD) + b"nope\n" + line("a", GOOD) + line("b", GOOD)
    first = await run(text, tmp_path / "out")
    assert len(first) == 4
    assert await run(text, tmp_path / "out") == first, "nothing is left"
    (tmp_path / "out").write_bytes(
        json.dumps(next(r for r in first if r["custom_id"] == "b")).encode() + b'\n{"id": "batch_req_1", "custom'
    )
    again = await run(text + line("c", GOOD), tmp_path / "out")
    assert sorted(str(r["custom_id"]) for r in again) == ["None", "a", "a", "b", "c"]


@pytest.mark.parametrize(("status", "failures", "failed"), [
    (429, 2, 0), (429, TRIES, 1), (503, 3 * TRIES, 0),
], ids=["a full queue", "one that stays full", "an engine that loads for long"])
async def test_what_passes_is_waited_for(status: int, failures: int, failed: int):
    class Flaky(InsideClient):
        tries = 0

        async def post(self, path, body):
            self.tries += 1
            answer = await super().post(path, body)
            if self.tries <= failures:
                answer.status, answer.headers = status, {"retry-after": "0"}
            return answer

    client = Flaky(create_app(FakeClient(), ServerConfig()))
    output = io.BytesIO()
    items = read_items(io.BytesIO(line("a", GOOD)), Completed(set(), set()))
    tally = await run_batch(client, items, output, concurrency=2)
    assert (client.tries, tally.completed, tally.failed) == (failures + 1 - failed, 1, failed)


async def test_a_dead_engine_ends_the_run(tmp_path: Path):
    fake = FakeClient()
    fake.state = "stopped"
    with pytest.raises(EngineUnavailable):
        await run(line("a", GOOD), tmp_path / "out", fake, is_alive=lambda: False)
    assert (tmp_path / "out").read_bytes() == b""


async def test_a_fault_of_ours_is_the_lines_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = FakeClient()
    submit = fake.submit

    def fail_once(prompt, *args, **options):
        if prompt == "boom":
            raise RuntimeError("boom")
        return submit(prompt, *args, **options)

    fake.submit = fail_once
    records = {
        r["custom_id"]: r
        for r in await run(line("a", {**GOOD, "prompt": "boom"}) + line("b", GOOD), tmp_path / "out", fake)
    }
    assert (records["a"]["response"]["status_code"], records["b"]["response"]["status_code"]) == (500, 200)


def test_files_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="cannot read"):
        count_lines(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot write"):
        open_output(tmp_path / "none" / "out")
    other = tmp_path / "notes.txt"
    other.write_text("my notes\nand more")
    with pytest.raises(ConfigError, match="line 1 is not a batch result"):
        open_output(other)
    assert other.read_text() == "my notes\nand more"
    monkeypatch.setattr(batch_lines, "MAX_LINE_BYTES", 100)
    items = list(
        read_items(
            io.BytesIO(b"x" * 1000 + b"\n" + b'{"custom_id":"a","url":"/v1/completions","body":{}}\n'),
            Completed(set(), set())
        )
    )
    assert [(i.number, i.error is None) for i in items] == [(1, False), (2, True)]

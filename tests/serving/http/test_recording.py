"""Requests logged and written down: what is told, what never is, and how much is kept."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import resource
import stat
import threading
from pathlib import Path

import msgspec
import pytest
from fake_apps import http_for
from fake_client import FakeClient, expected_text
from starlette.datastructures import Headers

from headrace.base.errors import ConfigError
from headrace.base.server_config import OperationsConfig
from headrace.serving.http.transport import recording
from headrace.serving.http.transport.recording import (
    MAX_KEPT_BODY,
    MAX_LOGGED_TEXT,
    NUM_FILES,
    DumpFolder,
    Exchange,
    shorten,
)
from headrace.serving.replay import read_records

KEYS = {
    "Authorization": "Bearer hush-key", "x-api-key": "hush-key", "Cookie": "hush=1", "X-Custom": "hush",
    "User-Agent": "some-agent"
}
CHAT = {
    "messages": [{"role": "user", "content": "secret words"}], "max_tokens": 3, "model": "fake-model",
    "user": "secret name", "metadata": {"secret": "secret"}
}


async def log_of(caplog, level: str, body: object, path: str = "/v1/chat/completions") -> list[str]:
    with caplog.at_level(logging.INFO, "headrace"):
        async with http_for(FakeClient(), operations=OperationsConfig(log_requests=level), api_key="hush-key") as http:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            await http.post(
                path, content=content, headers={**KEYS, "Content-Type": "application/json", "X-Request-Id": "me"}
            )
    return [r.getMessage() for r in caplog.records if r.name.startswith("headrace.serving.http")]


async def test_levels_of_the_log(caplog):
    assert await log_of(caplog, "none", CHAT) == []
    (line,) = await log_of(caplog, "line", CHAT)
    assert "POST /v1/chat/completions -> 200" in line and "id me" in line
    caplog.clear()
    fields, line = await log_of(caplog, "fields", CHAT)
    assert (
        fields.startswith("id me /v1/chat/completions headers {") and '"user-agent":"some-agent"' in fields
        and '"max_tokens":3' in fields
    )
    assert (
        '"messages":"<list, 1 items>"' in fields and '"model":"fake-model"' in fields
        and '"metadata":"<object, 1 fields>"' in fields
    )
    assert "secret" not in fields.replace('"metadata"', "") and '"authorization":"***"' in fields
    caplog.clear()
    texts, line = await log_of(caplog, "prompts", CHAT)
    assert "secret words" in texts and "secret name" in texts
    assert "hush" not in caplog.text


async def test_bodies_that_are_no_json_are_logged_by_size(caplog):
    (fields, _line) = await log_of(caplog, "fields", b'{"prompt": "secret\n forged line')
    assert "secret" not in fields and "<31 bytes, not JSON>" in fields


async def test_a_log_stays_on_its_line(caplog):
    text = "a\r\n2026-01-01 INFO forged \x1b[31m" + "x" * 5000
    fields, _line = await log_of(caplog, "prompts", {"prompt": text, "max_tokens": 1}, "/v1/completions")
    assert (
        "\n" not in fields and "\x1b" not in fields and len(fields) < MAX_LOGGED_TEXT + 1000
        and f"({len(text)} characters)" in fields
    )


@pytest.mark.parametrize("document", [
    {"prompt": "secret"}, {"input": ["secret"]}, {"tools": [{"function": {"name": "secret"}}]},
    {"response_format": {"json_schema": {"schema": {"secret": 1}}}},
    {"stop": "secret"}, {"model": "secret" * 20}, {"system": [{"type": "text", "text": "secret"}]},
    {"logit_bias": {"secret": 1}}, ["secret"], "secret",
])
def test_no_text_is_told_unless_asked_for(document):
    told = json.dumps(shorten(document, has_texts=False))
    assert "secret" not in told, told


async def test_who_is_not_let_in_is_not_recorded(tmp_path, caplog):
    operations = OperationsConfig(dump_requests=str(tmp_path / "dump"), log_requests="prompts")
    with caplog.at_level(logging.INFO, "headrace"):
        async with http_for(FakeClient(), operations=operations, api_key="k") as http:
            assert (await http.post("/v1/completions", json={"prompt": "secret"})).status_code == 401
            assert (
                await http.post("/freeze_gc", json={"prompt": "secret"}, headers={"Authorization": "Bearer k"})
            ).status_code == 200
            http.app.state.context.close()
    assert "secret" not in caplog.text and all(path.stat().st_size == 0 for path in (tmp_path / "dump").iterdir())


async def test_requests_are_written_with_their_answers(tmp_path: Path):
    folder = tmp_path / "new" / "dump"
    async with http_for(FakeClient(), operations=OperationsConfig(dump_requests=str(folder))) as http:
        plain = await http.post(
            "/v1/completions", json={"prompt": "a\nb", "max_tokens": 4, "seed": 1},
            headers={**KEYS, "X-Request-Id": "first"}
        )
        streamed = await http.post("/v1/completions", json={"prompt": "c", "max_tokens": 4, "stream": True})
        wrong = await http.post("/v1/completions", content=b'{"prompt": ', headers={"Content-Type": "application/json"})
        large = await http.post(
            "/generate", json={"text": "x" * MAX_KEPT_BODY, "sampling_params": {"max_new_tokens": 1}}
        )
        await http.get("/v1/models")
        http.app.state.context.close()
    assert "hush" not in "".join(path.read_text() for path in folder.iterdir())
    first, second, third, fourth = read_records(str(folder))
    assert (
        first.request_id, first.path, first.status, msgspec.json.decode(first.body)["prompt"]
    ) == ("first", "/v1/completions", 200, "a\nb")
    assert first.answer == plain.text and expected_text("a\nb", 4, seed=1) in first.answer and first.is_complete
    assert (
        second.answer == streamed.text and second.answer.endswith("data: [DONE]\n\n")
        and 0 < second.first_byte_s <= second.seconds
    )
    assert (third.status, third.has_body, third.answer) == (400, False, wrong.text)
    assert (fourth.status, fourth.has_body) == (large.status_code, False)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and all(
        stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.iterdir()
    )


async def test_an_answer_whose_reader_left(tmp_path: Path, client):
    async with http_for(client, operations=OperationsConfig(dump_requests=str(tmp_path))) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "HOLD"}))
        while not client.children:
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        http.app.state.context.close()
    (record,) = read_records(str(tmp_path))
    assert not record.is_complete and record.answer == ""


def exchange(number: int, size: int = 400) -> Exchange:
    return Exchange(
        "POST", "/generate", Headers({}), float(number), 200, bytearray(json.dumps({"text": "x" * size}).encode()),
        bytearray(b"{}"), is_complete=True
    )


def test_the_oldest_go_when_the_folder_is_full(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    limit = 16_000
    for life in range(3):
        dump = DumpFolder(str(tmp_path), limit)
        for number in range(100):
            dump.take(exchange(life * 100 + number))
        dump.close()
        size = sum(path.stat().st_size for path in tmp_path.glob("*.jsonl"))
        assert limit * (NUM_FILES - 3) // NUM_FILES < size <= limit
    kept = [int(record.at) for record in read_records(str(tmp_path))]
    assert kept == list(range(kept[0], 300)) and (tmp_path / "notes.txt").read_text() == "mine"


def test_what_a_slow_disk_cannot_take_is_left_out(tmp_path: Path, monkeypatch, caplog):
    dump = DumpFolder(str(tmp_path), 10**7)
    monkeypatch.setattr("headrace.serving.http.transport.recording.MAX_PENDING", 1000)
    go_on, write = threading.Event(), dump._write
    monkeypatch.setattr(dump, "_write", lambda exchange: go_on.wait(200) and write(exchange))
    for number in range(20):
        dump.take(exchange(number, 400))
    go_on.set()
    dump.close()
    assert [int(r.at) for r in read_records(str(tmp_path))] == [0, 1, 2] and caplog.text.count("are dropped") == 1


def test_a_full_disk_costs_the_lines_that_do_not_fit(tmp_path: Path, caplog):
    dump = DumpFolder(str(tmp_path), 10**6)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        for number in range(6):
            dump.take(exchange(number, 400))
        dump.take(exchange(6, 1))
        dump.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (
        [int(r.at) for r in read_records(str(tmp_path))] == [0, 1, 6]
        and caplog.text.count("a request cannot be written to the dump: [Errno 28]") == 1
        and caplog.text.count("3 further requests were not written to the dump") == 1
    )
    assert all(path.read_bytes().endswith(b"}\n") for path in tmp_path.glob("*.jsonl"))


def test_a_full_disk_is_logged_once_a_minute(tmp_path: Path, monkeypatch, caplog):
    dump, now = DumpFolder(str(tmp_path), 10**6), 1000.0
    monkeypatch.setattr(recording.time, "monotonic", lambda: now)

    def fail(_: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(dump, "_append", fail)
    for number in range(100):
        now += 2.5
        dump._write(exchange(number, 10))
    told = [r.getMessage() for r in caplog.records if "cannot be written to the dump" in r.getMessage()]
    assert [line.split(" cannot")[0] for line in told] == ["a request", *["24 requests"] * 4]
    dump.close()


def test_a_file_that_cannot_be_opened_is_tried_again(tmp_path: Path, monkeypatch):
    dump = DumpFolder(str(tmp_path), NUM_FILES)  # a file for each exchange
    real, refusals = os.open, [OSError(errno.EMFILE, os.strerror(errno.EMFILE))] * 2

    def open_or_fail(*args):
        if refusals:
            raise refusals.pop()
        return real(*args)

    dump._write(exchange(0, 10))
    monkeypatch.setattr(recording.os, "open", open_or_fail)
    for number in (1, 2, 3):
        dump._write(exchange(number, 10))
    dump.close()
    assert not refusals and [int(r.at) for r in read_records(str(tmp_path))][-1] == 3


def test_what_cannot_be_read_is_left_out(tmp_path: Path):
    dump = DumpFolder(str(tmp_path), 10**6)
    dump.take(exchange(1))
    dump.close()
    (path,) = tmp_path.glob("*.jsonl")
    path.write_bytes(b'{"at": "x"}\nnonsense\n\xff\n' + path.read_bytes() + b'{"at": 2, "path": "/gen')
    assert (
        [record.at for record in read_records(str(tmp_path))] == [1.0]
        == [record.at for record in read_records(str(path))]
    )


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_nothing_to_replay(tmp_path: Path, name: str):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"cannot read|no recorded"):
        read_records(str(tmp_path / name))


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="dump_requests"):
        DumpFolder(str(tmp_path / "file" / "x"), 10**6)

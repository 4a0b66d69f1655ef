"""One engine whose ranks a real cluster of two nodes places: it serves, and outlives a node."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from conftest import OBJECT_STORE_BYTES
from live import LiveServer, running_server, tiny_arguments
from test_live_ranks import complete

pytestmark = pytest.mark.ray


@pytest.fixture
def server(cluster, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    arguments = [
        *tiny_arguments(tiny_model, kv_pages=512), "--tp", "2", "--executor", "ray", "--device", "cpu",
        "--threads", "1",
    ]
    with running_server(tmp_path, *arguments) as server:
        yield server


def agents() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if "ray::RankAgent" in " ".join(p.info["cmdline"] or ())]


def is_ready(server: LiveServer) -> bool:
    return server.get("/ready").status_code == 200


def test_an_engine_over_two_nodes(server: LiveServer, cluster):
    """Its other rank is on the other node. That is killed under load: the request in flight ends with an error that
    says to try again, and the engine is back as soon as there is a node for the rank."""
    before = complete(server, "The wheel")
    assert len(agents()) == 1
    answers, ends = list[httpx.Response](), list[float]()
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}

    def ask() -> None:
        answers.append(server.post("/v1/completions", body))
        ends.append(time.monotonic())

    thread = threading.Thread(target=ask)
    thread.start()
    server.wait_until(lambda: server.get("/server_info").json()["stats"]["num_running"] > 0, "the request runs")
    node = cluster.worker_nodes.copy().pop()
    began = time.monotonic()
    cluster.remove_node(node, allow_graceful=False)
    thread.join(60)
    assert answers[0].status_code == 503 and ends[0] - began < 5, (answers[0].text, ends[0] - began)
    assert "Retry-After" in answers[0].headers
    assert not is_ready(server)
    time.sleep(2)
    assert not is_ready(server), "there is no room"
    cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False)
    server.wait_until(lambda: is_ready(server), "the engine is back")
    assert complete(server, "The wheel") == before
    assert len(agents()) == 1

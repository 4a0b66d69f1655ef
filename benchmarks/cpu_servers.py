"""The servers that ``benchmarks.cpu`` compares: how each is found, started, waited for, weighed and ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import psutil

POLL_S = 0.04
"""Each look takes a server some milliseconds of the cores it starts on."""


@dataclass(frozen=True)
class Server:
    """``command`` makes the command line for a port; ``ready`` is the path that answers 200 once requests are served."""

    name: str
    command: Callable[[int], list[str]]
    ready: str = "/health"
    served_name: str | None = None


@dataclass(frozen=True)
class Running:
    """A server that answers. ``start_s``: seconds from the start of its process until then."""

    base_url: str
    process: psutil.Process
    start_s: float

    def processes(self) -> list[psutil.Process]:
        """The server's process and all it started."""
        return [self.process, *self.process.children(recursive=True)]

    def rss_mb(self) -> float:
        """Resident memory of all its processes, summed, in units of 10^6 bytes."""
        return sum(process.memory_info().rss for process in self.processes()) / 1e6

    def cpu_s(self) -> list[float]:
        """Seconds of processor time of each process so far."""
        times = [process.cpu_times() for process in self.processes()]
        return [spent.user + spent.system for spent in times]


def gguf_of(package: str) -> Path | None:
    """The GGUF file that an installed package brings."""
    try:
        found = [file for file in files(package) or [] if file.suffix == ".gguf"]
    except PackageNotFoundError:
        return None
    return Path(found[0].locate()) if found else None


def headrace(model: str, flags: list[str], name: str = "headrace") -> Server:
    """This repository's server."""
    return Server(name, lambda port: [sys.executable, "-m", "headrace", "serve", "--model", model, "--port", str(port), "--log-level", "warning", *flags], "/ready")


def llama_cpp(name: str, model: Path, threads: int) -> Server | None:
    """llama.cpp's server, where a program of this name is installed."""
    program = shutil.which(name)
    if program is None:
        return None
    command = [program, "-m", str(model), "-t", str(threads), "-np", "16", "-c", str(16 * 4352)]
    return Server(f"{Path(name).name} {model.stem[-20:]}", lambda port: [*command, "--port", str(port)])


def vllm(model: str, flags: list[str]) -> Server | None:
    """vLLM's server, where it is installed."""
    program = shutil.which("vllm")
    if program is None:
        return None
    return Server("vllm", lambda port: [program, "serve", model, "--port", str(port), "--max-model-len", "4352", *flags])


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def run_server(server: Server, *, patience_s: float = 300.0, environment: dict[str, str] | None = None) -> Iterator[Running]:
    """Start a server, wait until it is ready, end it afterwards; raises `RuntimeError` when it does not get ready.

    Python keeps its bytecode, as it does for an installed package, whatever this process was told."""
    port, began = free_port(), time.perf_counter()
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(server.command(port), stdout=subprocess.DEVNULL, stderr=sys.stderr, env={**kept, **(environment or {})})
    try:
        while not _answers(f"http://127.0.0.1:{port}{server.ready}"):
            if process.poll() is not None or time.perf_counter() - began > patience_s:
                raise RuntimeError(f"{server.name} did not get ready (exit status {process.poll()})")
            time.sleep(POLL_S)
        yield Running(f"http://127.0.0.1:{port}", psutil.Process(process.pid), time.perf_counter() - began)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False

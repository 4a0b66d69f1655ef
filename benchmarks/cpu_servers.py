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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import psutil

POLL_S = 0.04
"""Each look takes a server some milliseconds of the cores it starts on."""


@dataclass(frozen=True)
class Server:
    """``command`` makes the command line for a port; ``ready`` is the path that answers 200 once requests are served;
    ``environment`` comes on top of this process's."""

    name: str
    command: Callable[[int], list[str]]
    ready: str = "/health"
    environment: Mapping[str, str] = field(default_factory=dict)


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

    def pss_mb(self) -> float:
        """The same, but a page that several processes hold (libraries, mapped files) is counted once."""
        return sum(process.memory_full_info().pss for process in self.processes()) / 1e6

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
    return Server(
        name,
        lambda port: [
            sys.executable, "-m", "headrace", "serve", "--model", model, "--port", str(port), "--log-level", "warning",
            *flags
        ],
        "/ready"
    )


def llama_cpp(name: str, model: Path, threads: int) -> Server | None:
    """llama.cpp's server, where a program of this name is installed."""
    program = shutil.which(name)
    if program is None:
        return None
    command = [program, "-m", str(model), "-t", str(threads), "-np", "16", "-c", str(16 * 4352)]
    return Server(f"{Path(name).name} {model.stem[-20:]}", lambda port: [*command, "--port", str(port)])


def vllm(model: str, dtype: str, cores: list[int], *, preload: str | None = None, kv_gib: int = 1) -> Server | None:
    """vLLM's server, where it is installed: its threads bound to these cores, prefix caching at its default.

    Its manual wants Intel's OpenMP and tcmalloc preloaded: ``preload`` names them (colon-separated). A gibibyte holds
    the keys and values of 46 thousand tokens of SmolLM2 in 16 bits, ten times what W2 has at once."""
    program = shutil.which("vllm")
    if program is None:
        return None
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"
    }
    if preload:
        environment["LD_PRELOAD"] = preload
    command = ["serve", model, "--max-model-len", "4352", "--dtype", dtype]
    return Server(f"vllm {dtype}", lambda port: [program, *command, "--port", str(port)], environment=environment)


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def run_server(
    server: Server, *, patience_s: float = 600.0, environment: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Start a server, wait until it is ready, end it afterwards; raises `RuntimeError` when it does not get ready.

    Python keeps its bytecode, as it does for an installed package, whatever this process was told."""
    port, began = free_port(), time.perf_counter()
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = psutil.Popen(
        server.command(port), stdout=subprocess.DEVNULL, stderr=sys.stderr,
        env={**kept, **server.environment, **(environment or {})}
    )
    try:
        while not _answers(f"http://127.0.0.1:{port}{server.ready}"):
            if process.poll() is not None or time.perf_counter() - began > patience_s:
                raise RuntimeError(f"{server.name} did not get ready (exit status {process.poll()})")
            time.sleep(POLL_S)
        yield Running(f"http://127.0.0.1:{port}", process, time.perf_counter() - began)
    finally:
        end(process)


def end(process: psutil.Popen) -> None:
    """End a process that was started here, and what it started and left behind."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [process, *process.children(recursive=True)]
        process.terminate()
        psutil.wait_procs([process], timeout=30)
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(family, timeout=5)
    process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False

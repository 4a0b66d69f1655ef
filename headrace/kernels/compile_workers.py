"""Processes that compile Triton kernels into the cache on disk: a third of a compilation holds Python's lock, so
threads of one process gain little beyond three. One process imports torch and Triton; the others are its copies.

`CompileWorkers` starts them when there is work and hands out jobs. A job names a kernel by its module, so those of
modules that a new process cannot import are compiled elsewhere.
"""

from __future__ import annotations

import fcntl
import gc
import inspect
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec

from headrace.base import env
from headrace.base.errors import HeadraceError

logger = logging.getLogger(__name__)

IDLE_SECONDS = 60
"""After so long without a job a worker ends."""
JOB_SECONDS = 300
"""So does one whose job, or whose start, takes longer: whoever waits for it then compiles by itself."""
MOST_WORKERS = 24
LEAST_CORES = 4
"""With fewer, loading torch again costs more than it gains."""

DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
"""There is one of these where there is an NVIDIA GPU; found without torch."""

Scalar = bool | int | float | str | None


class SourceJob(msgspec.Struct, tag=True):
    """Own CUDA C++, as `compile_source` takes it."""

    name: str
    options: tuple[str, ...]


class Job(msgspec.Struct, tag=True):
    """A kernel and what it is compiled for, as Triton's ``ASTSource`` and ``compile`` take them. ``folder``: of the
    cache. Constants and attributes belong to arguments, by index (several for a part of a tuple)."""

    folder: str
    module: str
    name: str
    signature: dict[str, str]
    constants: list[tuple[tuple[int, ...], Scalar]]
    attributes: list[tuple[tuple[int, ...], list[list[str | int]]]]
    target: tuple[str, int, int]
    options: dict[str, Scalar | list[str | list[str]]]


def describe_job(compile_fn: Callable[[], Any], folder: str) -> bytes | None:
    """The job of a function that Triton passes to an ``AsyncCompileMode``; None where it cannot be told in words."""
    # Triton passes a closure; what it closes over is what `run_job` needs
    parts = inspect.getclosurevars(compile_fn).nonlocals
    try:
        source, target, options = parts["src"], parts["target"], parts["options"]
        message = msgspec.json.encode(Job(
            folder, source.fn.fn.__module__, source.fn.fn.__qualname__, source.signature,
            list(source.constants.items()), list(source.attrs.items()),
            (target.backend, target.arch, target.warp_size), dict(options.__dict__),
        ))
        msgspec.json.decode(message, type=Job)
        return message
    except (KeyError, AttributeError, TypeError, ValueError):
        return None


def run_job(message: bytes) -> None:
    """Compile a job's kernel or source, unless the cache has it. Raises what importing and compiling raise."""
    job = msgspec.json.decode(message, type=Job | SourceJob)
    if isinstance(job, SourceJob):
        from headrace.kernels.cuda_source import compile_source

        compile_source(job.name, job.options)
    else:
        _compile_kernel(job)


def _compile_kernel(job: Job) -> None:
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.experimental.gluon._runtime import GluonASTSource

    knobs.cache.dir = job.folder
    kernel: Any = import_module(job.module)
    for name in job.name.split("."):
        kernel = kernel.__dict__[name]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel, job.signature, dict(job.constants), dict(job.attributes)
    )
    # Triton's own types: the cache's key is made of their texts
    options = {
        name: tuple(tuple(part) if isinstance(part, list) else part for part in value) if isinstance(value, list)
        else value for name, value in job.options.items()
    }
    compile(source, target=GPUTarget(*job.target), options=options)


class Worker:
    """A process's end of the line, of which each answer is one of `serve`."""

    def __init__(self, line: socket.socket):
        self._line, self._answers = line, line.makefile("rb")

    def ask(self, message: bytes) -> bytes:
        """Send a job and wait for the answer; nothing from a process that ended. Raises `OSError`."""
        self._line.sendall(message + b"\n")
        return self._answers.readline()


class CompileWorkers:
    """Up to ``count`` processes, while no other engine of this machine has some: ranks and tests that start together
    would else have hundreds. `compile` may be called from as many threads. ``lock``: a file that tells engines apart;
    it stays behind.
    """

    def __init__(self, count: int, lock: Path):
        self.count, self._lock = count, lock
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._first: subprocess.Popen[bytes] | None = None

    def start(self) -> bool:
        """Start them, which takes them some seconds; they end by themselves. False if another engine has some."""
        if self._first is not None and self._first.poll() is None:
            return True
        self._idle = queue.SimpleQueue()
        try:
            self._lock.parent.mkdir(parents=True, exist_ok=True)
            with self._lock.open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # they inherit the open file, and so hold the lock until the last of them has ended
                self._first, lines = _start(self.count, lock.fileno())
        except OSError as error:
            logger.debug("no processes compile kernels for this one: %s", error)
            return False
        for line in lines:
            self._idle.put(Worker(line))
        return True

    def compile(self, message: bytes) -> bool:
        """Compile a job into the cache; False if that failed, in whatever way: the caller then compiles it itself."""
        idle = self._idle
        try:
            worker = idle.get_nowait()
        except queue.Empty:
            return False
        try:
            answer = worker.ask(message)
        except OSError as error:
            logger.debug("a process that compiles kernels ended: %s", error)
            return False
        if not answer:
            return False
        idle.put(worker)
        return answer == b"done\n"

    @property
    def were_started(self) -> bool:
        """Whether any ever were on this machine, as far as its cache tells."""
        return self._lock.exists()


@cache
def find_workers() -> CompileWorkers | None:
    """The processes that compile for this one; None where they would gain nothing."""
    count = count_workers()
    return CompileWorkers(count, env.cache_dir() / "compile_workers.lock") if count else None


def start_early() -> None:
    """Start the processes at the first start on a machine with a GPU. Called before torch is imported, which each of
    them does for seconds: they are ready when the first kernels are found."""
    workers = find_workers()
    if workers is not None and not workers.were_started and any(path.exists() for path in DRIVER_FILES):
        workers.start()


def count_workers() -> int:
    """How many processes pay off on this machine; 0 for none."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, cores - 2) if cores >= LEAST_CORES else 0


def _start(count: int, lock: int) -> tuple[subprocess.Popen[bytes], list[socket.socket]]:
    """The process that starts the others, and a line to each of them."""
    pairs = [socket.socketpair() for _ in range(count)]
    theirs = [line.fileno() for _, line in pairs]
    # it finds modules where this process does, and none in the working folder
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve_all; serve_all({theirs})"
    first = subprocess.Popen(
        [sys.executable, "-P", *_bytecode_options(), "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, pass_fds=(lock, *theirs),
    )
    for _, line in pairs:
        line.close()  # so that the end of a process is the end of its answers
    # it ends by itself, when nobody may be asking: no zombie shall stay
    Thread(target=first.wait, name="compile-workers", daemon=True).start()
    return first, [line for line, _ in pairs]


def _bytecode_options() -> list[str]:
    """Have it read and write bytecode where this process does."""
    where = ["-X", f"pycache_prefix={sys.pycache_prefix}"] if sys.pycache_prefix else []
    return [*where, "-B"] if sys.dont_write_bytecode else where


def serve_all(lines: list[int]) -> None:
    """Import what every job needs, then `serve` each of these open sockets in a process of its own. Returns when all
    of them have ended."""
    signal.alarm(JOB_SECONDS)  # ends the process
    _import_compiler()
    gc.freeze()  # or collections would write to, and so copy, the memory that they share
    if not os.fork():
        try:
            _build_launcher()
        finally:
            os._exit(0)
    for line in lines:
        if not os.fork():
            for other in lines:
                if other != line:
                    with suppress(OSError):
                        os.close(other)
            try:
                serve(line)
            finally:
                os._exit(0)
        # also in those that are started later: the engine sees the end of each
        os.close(line)
    signal.alarm(0)
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _import_compiler() -> None:
    """Takes seconds. Done once for all processes, as their reading the same files at once takes several times as
    long."""
    import torch  # noqa: F401

    with suppress(ImportError):
        import triton.experimental.gluon  # noqa: F401
        from triton.runtime import cache as triton_cache

        find_key = triton_cache.__dict__.get("triton_key")
        if find_key is not None:
            find_key()  # hashes Triton's sources, and is memoised


def _build_launcher() -> None:
    """What Triton compiles by a C compiler for itself, and would where the first kernel is found: 0.6 s."""
    signal.alarm(JOB_SECONDS)
    with suppress(ImportError, OSError, RuntimeError, AssertionError, AttributeError, subprocess.SubprocessError):
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


def serve(line: int) -> None:
    """Answer each line from a socket, a job, by a line: ``done`` or ``failed``."""
    messages, answers = os.fdopen(line, "rb"), os.fdopen(os.dup(line), "wb", buffering=0)
    while True:
        signal.alarm(IDLE_SECONDS)
        message = messages.readline()
        signal.alarm(JOB_SECONDS)
        if not message:
            return
        try:
            run_job(message)
            answers.write(b"done\n")
        # The caller compiles it itself, and reports the error. Any other error ends this process, to the same effect.
        except (
            ImportError, LookupError, AttributeError, TypeError, ValueError, RuntimeError, AssertionError, OSError,
            HeadraceError,
        ):
            answers.write(b"failed\n")

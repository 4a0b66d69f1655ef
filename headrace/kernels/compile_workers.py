"""Processes that compile Triton kernels into the cache on disk: a third of a compilation holds Python's lock, so
threads of one process gain little beyond three. One process imports torch and Triton; the others are its copies.

`CompileWorkers` starts them when there is work and hands out jobs, also to those that another process of this machine
started: the ranks of an engine share them. A job names a kernel by its module, so those of modules that a new process
cannot import are compiled elsewhere.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import inspect
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec

from headrace.base import env
from headrace.base.errors import HeadraceError
from headrace.kernels.sharing import alone

logger = logging.getLogger(__name__)

IDLE_SECONDS = 60
"""After so long without a job a worker ends, and at once when the process that started it has."""
SOCKET = "socket"
SOCKET_SECONDS = 1.0
"""How long the process that starts them may take to open the socket."""
JOB_SECONDS = 300
"""So does one whose job, or whose start, takes longer: whoever waits for it then compiles by itself."""
MOST_WORKERS = 24
LEAST_CORES = 4
"""With fewer, loading torch again costs more than it gains."""

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
    compiled = compile(source, target=GPUTarget(*job.target), options=options)
    with suppress(ImportError, OSError, RuntimeError, AssertionError, AttributeError, subprocess.SubprocessError):
        _build_launcher(source, compiled.metadata)


def _build_launcher(source: Any, metadata: Any) -> None:
    """What Triton before 3.7 generates in C for each signature. Compiled here, it is only loaded where it is used."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(source, metadata)


class CompileWorkers:
    """Up to ``count`` processes on this machine: ranks and tests that start together would else have hundreds. Those
    who ask are connected to whichever is free, through a socket in ``folder``. `compile` may be called from as many
    threads, of any process."""

    def __init__(self, count: int, folder: Path):
        self.count, self._folder = count, folder
        self._first: subprocess.Popen[bytes] | None = None
        self._life: socket.socket | None = None

    @property
    def _lock(self) -> Path:
        return self._folder / "running.lock"

    def start(self) -> bool:
        """Start them, which takes them some seconds, unless another process did; they end by themselves. False if they
        cannot be reached."""
        if self._first is not None and self._first.poll() is None:
            return True
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._lock.open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with _open_socket(self._folder) as listener:
                    # they inherit the open file, and so hold the lock until the last of them has ended
                    self._first, self._life = _start(self.count, lock.fileno(), listener.fileno())
            return True
        except BlockingIOError:
            return self._find_door()
        except OSError as error:
            logger.debug("no processes compile kernels for this one: %s", error)
            return False

    def _find_door(self) -> bool:
        """Whether those that another process started can be reached, soon."""
        until = time.monotonic() + SOCKET_SECONDS
        while not (self._folder / SOCKET).exists():
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def compile(self, message: bytes) -> bool:
        """Compile a job into the cache, or wait for another process that does; False if that failed, in whatever way.
        The caller then looks into the cache, and compiles it itself if it is not there."""
        lock = self._folder / f"{hashlib.sha256(message).hexdigest()[:20]}.lock"
        try:
            # ranks find the same kernels at the same time: one has a kernel compiled, and the others then find it
            with alone(lock, JOB_SECONDS) as was_done:
                return was_done or self.ask(message) == b"done\n"
        except OSError as error:
            logger.debug("a process that compiles kernels ended: %s", error)
            return False

    def ask(self, message: bytes) -> bytes:
        """Send a job and wait for the answer, one of `serve`; nothing from a process that ended. Raises `OSError`."""
        with socket.socket(socket.AF_UNIX) as line, _short_path(self._folder) as folder:
            line.connect(f"{folder}/{SOCKET}")
            line.sendall(message + b"\n")
            with line.makefile("rb") as answers:
                return answers.readline()

    @property
    def were_started(self) -> bool:
        """Whether any ever were on this machine, as far as its cache tells."""
        return self._lock.exists()


@contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """A name of a folder that fits the 107 bytes of a socket's address."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{opened}"
    finally:
        os.close(opened)


def _open_socket(folder: Path) -> socket.socket:
    """The socket for jobs, anew. Only the user may connect."""
    (folder / SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    try:
        with _short_path(folder) as short:
            listener.bind(f"{short}/new-{SOCKET}")
        (folder / f"new-{SOCKET}").chmod(0o600)
        listener.listen(socket.SOMAXCONN)
        listener.setblocking(False)
        (folder / f"new-{SOCKET}").replace(folder / SOCKET)  # from here on it is there for others
    except OSError:
        listener.close()
        raise
    return listener


@cache
def find_workers() -> CompileWorkers | None:
    """The processes that compile for this one; None where they would gain nothing."""
    count = count_workers()
    return CompileWorkers(count, env.cache_dir() / "compile_workers") if count else None


def count_workers() -> int:
    """How many processes pay off on this machine; 0 for none."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, cores - 2) if cores >= LEAST_CORES else 0


def _start(count: int, lock: int, listener: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process that starts the others, and a socket: they end when that is closed."""
    life, theirs = socket.socketpair()
    # it finds modules where this process does, and none in the working folder
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve_all; "
        f"serve_all({count}, {listener}, {theirs.fileno()})"
    )
    with theirs:
        first = subprocess.Popen(
            [sys.executable, "-P", *_bytecode_options(), "-c", code], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(lock, listener, theirs.fileno()),
        )
    # it ends by itself, when nobody may be asking: no zombie shall stay
    Thread(target=first.wait, name="compile-workers", daemon=True).start()
    return first, life


def _bytecode_options() -> list[str]:
    """Have it read and write bytecode where this process does."""
    where = ["-X", f"pycache_prefix={sys.pycache_prefix}"] if sys.pycache_prefix else []
    return [*where, "-B"] if sys.dont_write_bytecode else where


def serve_all(count: int, listener: int, life: int) -> None:
    """Import what every job needs, then `serve` in so many processes. Returns when all of them have ended."""
    signal.alarm(JOB_SECONDS)  # ends the process
    _import_compiler()
    gc.freeze()  # or collections would write to, and so copy, the memory that they share
    for task in (_build_driver, *[lambda: serve(listener, life)] * count):
        if not os.fork():
            try:
                task()
            finally:
                os._exit(0)
    os.close(listener)  # when the last of them has ended, nobody waits for an answer
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


def _build_driver() -> None:
    """What Triton compiles by a C compiler for itself, and would where the first kernel is found: 0.6 s."""
    signal.alarm(JOB_SECONDS)
    with suppress(ImportError, OSError, RuntimeError, AssertionError, AttributeError, subprocess.SubprocessError):
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


def serve(listener: int, life: int) -> None:
    """Answer each line from those who connect to a socket, a job, by a line: ``done`` or ``failed``. Returns when
    ``life`` has come to its end."""
    calls = socket.socket(fileno=listener)
    while True:
        signal.alarm(IDLE_SECONDS)
        ready, _, _ = select.select([listener, life], [], [])
        if life in ready:
            return
        try:
            line = calls.accept()[0]
        except BlockingIOError:  # another one was faster
            continue
        signal.alarm(JOB_SECONDS)
        line.setblocking(True)
        with line, suppress(OSError), line.makefile("rb") as messages:
            if message := messages.readline():
                line.sendall(answer(message))


def answer(message: bytes) -> bytes:
    """Do a job."""
    try:
        run_job(message)
        return b"done\n"
    # The caller compiles it itself, and reports the error. Any other error ends this process, to the same effect.
    except (
        ImportError, LookupError, AttributeError, TypeError, ValueError, RuntimeError, AssertionError, OSError,
        HeadraceError,
    ):
        return b"failed\n"

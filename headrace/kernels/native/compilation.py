"""Compile sources to shared libraries in the cache folder: objects are compiled in parallel, cached by digest, then
linked.

Processes share a file lock. The operating system releases it when its holder and the compilers that the holder started
are gone, so it is never stale. Files appear by atomic rename; partial files of dead processes are removed.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

import psutil

from headrace.base.errors import HeadraceError
from headrace.kernels.native.sources import Library
from headrace.kernels.native.toolchain import Compiler

logger = logging.getLogger(__name__)

KEPT_SECONDS = 30 * 24 * 3600
"""Time an object or library stays in the cache after its last use."""


class CompilationFailed(HeadraceError):
    """A compiler refused a source; the message is its first error."""


class CompilationStopped(CompilationFailed):
    """A compiler was ended by a signal, for example Ctrl-C, which reaches all processes of a terminal."""


Report = Callable[[int, int], None]
"""Told how many of how many files are compiled; called on any thread."""


def compile_libraries(
    libraries: list[Library], compiler: Compiler, folder: Path, report: Report | None = None, *,
    workers: int | None = None,
) -> list[Path]:
    """Compile and link what is missing in ``folder``, with ``workers`` compilers at a time; returns the libraries'
    paths. Waits while another process compiles. Raises `CompilationFailed`."""
    targets = {library.path(compiler, folder): library for library in libraries}
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / "lock") as lock:
        # looked up under the lock: another process may just have made them
        missing = {path: library for path, library in targets.items() if not path.exists()}
        if not missing:
            return list(targets)
        _sweep(folder)
        units = {unit.object_path(compiler, folder): unit for library in missing.values() for unit in library.units}
        wanted = sorted((path for path in units if not path.exists()), key=lambda path: units[path].size, reverse=True)
        logger.info("compiling CPU kernels: %d of %d files, into %s", len(wanted), len(units), folder)
        with _Workers(workers or min(12, len(os.sched_getaffinity(0)))) as pool:  # the longest first
            running = {path: pool.submit(units[path].command(compiler), path, lock) for path in wanted}
            if report is not None and running:
                _report_done(list(running.values()), report)
            for target, library in missing.items():
                objects = [unit.object_path(compiler, folder) for unit in library.units]
                for path in objects:
                    if path in running:
                        running[path].result()
                _run([compiler.path, *map(str, objects), *library.link_options], target, lock)
        for path in units:  # marks them as used, for `_sweep`
            path.touch()
    return list(targets)


def _report_done(running: Sequence[Future[None]], report: Report) -> None:
    num_done = itertools.count(1)
    report(0, len(running))
    for future in running:
        future.add_done_callback(lambda _: report(next(num_done), len(running)))


class _Workers:
    """Daemon threads that run compilers. Unlike those of `concurrent.futures` they are not joined at interpreter exit,
    which is left to `NativeLibrary`. After exit, or once a compiler was ended by a signal, no further job starts."""

    def __init__(self, count: int):
        self._jobs: SimpleQueue[tuple[Future[None], tuple[list[str], Path, int]] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"compiler-{i}", daemon=True) for i in range(count)]
        self._is_stopped = False

    def __enter__(self) -> _Workers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopped = True  # after an error: jobs still queued fail at once instead of running
        for _thread in self._threads:
            self._jobs.put(None)  # ends one thread
        for thread in self._threads:
            thread.join()

    def submit(self, command: list[str], target: Path, lock: int) -> Future[None]:
        """Queue a call of `_run` with these arguments."""
        future: Future[None] = Future()
        self._jobs.put((future, (command, target, lock)))
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, arguments = job
            try:
                if self._is_stopped:
                    raise CompilationStopped("compilers were interrupted")
                _run(*arguments)
                future.set_result(None)
            except (CompilationFailed, OSError, ValueError) as error:  # raised again by `Future.result`
                self._is_stopped = self._is_stopped or isinstance(error, CompilationStopped)
                future.set_exception(error)


def _run(command: list[str], target: Path, lock: int) -> None:
    """Run a compiler at low priority and rename its output. It inherits the lock's descriptor: if this process dies,
    the next one waits until the compiler has finished."""
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    nice = ["nice", "-n", "10"] if shutil.which("nice") else []
    try:
        done = subprocess.run(
            [*nice, *command, "-o", str(partial)], capture_output=True, text=True, errors="replace", pass_fds=(lock,),
            stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise CompilationFailed(f"{command[0]} does not run: {error.strerror or error}") from error
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        if done.returncode in (-signal.SIGINT, -signal.SIGTERM):
            raise CompilationStopped("the compiler was interrupted")
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise CompilationFailed(next((line for line in lines if "error:" in line), lines[0]))
    if not partial.exists():
        raise CompilationFailed(f"{command[0]} wrote nothing")
    partial.replace(target)


@contextmanager
def _lock(path: Path) -> Iterator[int]:
    """Hold an exclusive lock on a file; yields its descriptor, which child processes inherit (see `_run`)."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is compiling CPU kernels into %s; waiting for it", path.parent)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Remove partial files of dead processes, and files not used for `KEPT_SECONDS`."""
    now = time.time()
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process sweeps too
            if path.suffix == ".partial":  # <name>.<process id>.partial
                owner = path.name.split(".")[-2]
                is_stale = not (owner.isdigit() and psutil.pid_exists(int(owner)))
            else:
                is_stale = path.suffix in (".o", ".so") and now - path.stat().st_mtime > KEPT_SECONDS
            if is_stale:
                path.unlink()

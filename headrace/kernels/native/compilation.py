"""From sources to a shared library in the cache folder: objects in parallel, each kept by its digest, then one link.

Processes that want the same share one lock, which dies with its holder and the compilers it started: none can be stale.
Files appear by renaming, whole or not at all; what dead processes left unfinished is swept.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from headrace.base.errors import HeadraceError
from headrace.kernels.native.sources import Unit, link_options
from headrace.kernels.native.toolchain import Compiler

logger = logging.getLogger(__name__)

KEPT_SECONDS = 30 * 24 * 3600
"""How long an object or library stays in the cache after its last use."""


class CompilationFailed(HeadraceError):
    """A compiler refused a source; the message is its first error."""


def library_path(units: list[Unit], compiler: Compiler, folder: Path) -> Path:
    """Where the library of these units is, or will be."""
    summed = hashlib.sha256(repr(([unit.digest(compiler) for unit in units], link_options())).encode())
    return folder / f"headrace_cpu-{summed.hexdigest()[:20]}.so"


def compile_library(units: list[Unit], compiler: Compiler, folder: Path, *, workers: int | None = None) -> Path:
    """Compile and link what is not there yet; waits for another process that is at it. Raises `CompilationFailed`."""
    target = library_path(units, compiler, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / "lock") as lock:
        if target.exists():
            return target
        _sweep(folder)
        objects = [folder / f"{unit.source.stem}-{unit.label}-{unit.digest(compiler)}.o" for unit in units]
        missing = [(unit, path) for unit, path in zip(units, objects, strict=True) if not path.exists()]
        logger.info("compiling CPU kernels: %d of %d files, into %s", len(missing), len(units), folder)
        with ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1)) as pool:
            commands = [([compiler.path, *unit.options, "-c", str(unit.source)], path) for unit, path in missing]
            for done in [pool.submit(_run, command, path, lock) for command, path in commands]:
                done.result()
        _run([compiler.path, *map(str, objects), *link_options()], target, lock)
        for path in objects:
            path.touch()
    return target


def _run(command: list[str], target: Path, lock: int) -> None:
    """Run a compiler at low priority and rename its output. It inherits the lock: if this process dies, the next one
    waits until the compiler is through."""
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    nice = ["nice", "-n", "10"] if shutil.which("nice") else []
    done = subprocess.run([*nice, *command, "-o", str(partial)], capture_output=True, text=True, errors="replace", pass_fds=(lock,), stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise CompilationFailed(next((line for line in lines if "error:" in line), lines[0]))
    partial.replace(target)


@contextmanager
def _lock(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Remove what dead processes left unfinished, and what has not been used for long."""
    now = time.time()
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process sweeps too
            if path.suffix == ".partial":
                owner = path.name.split(".")[-2]
                is_stale = not (owner.isdigit() and psutil.pid_exists(int(owner)))
            else:
                is_stale = path.suffix in (".o", ".so") and now - path.stat().st_mtime > KEPT_SECONDS
            if is_stale:
                path.unlink()

"""`spawn_engine`: starts an engine process, which imports what it needs and waits for its configuration.
`spawn_process`, `start_process`: the same for any module of Headrace.

Imports only the standard library and base/env: a command calls this first, and both processes then import in parallel.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.base import env

ENGINE_MODULE = "headrace.service.process"
ENGINE_BUILDER = "headrace.service.ranks.starting:build_ranked_engine"
ENGINE_IMPORTS = "headrace.service.ranks.build"
"""What `ENGINE_BUILDER` imports when it is called, with torch."""
END_SIGNAL = signal.SIGUSR1
"""The signal that ends an engine process. Not SIGTERM: service managers send that to all processes of a server at once,
and only the parent knows how long running requests may still take."""
NUM_SPARE = 8
BUFFER_BYTES = 4 << 20
"""Socket buffer for each direction; the system may grant less."""


@dataclass(frozen=True)
class SpawnedEngine:
    """A new engine process, and our end of the socket pair whose other end is its standard input. ``board``: see
    `headrace.base.config.EngineConfig`."""

    process: subprocess.Popen[bytes]
    line: socket.socket
    board: tuple[int, ...] = ()

    def end(self) -> None:
        """Kill it, if it still runs."""
        self.line.close()
        self.process.kill()
        self.process.wait()


class SpareDescriptors:
    """File descriptors kept open for the next `spawn_engine`, so that connections that have taken all others do not
    keep a dead engine from being replaced."""

    def __init__(self, count: int = NUM_SPARE):
        self._count = count
        self._held: list[int] = []

    def acquire(self) -> None:
        """Hold as many as there are, up to ``count``."""
        with contextlib.suppress(OSError):  # none are left: `spawn_engine` will say so
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY))

    def release(self) -> None:
        """Close them; what is opened next, without a pause, gets them."""
        while self._held:
            os.close(self._held.pop())


def spawn_engine(builder: str = ENGINE_BUILDER, board: tuple[int, ...] = ()) -> SpawnedEngine:
    """Start an engine process, which inherits the descriptors of ``board``; it ends by itself when our end of the
    socket is closed. Raises `OSError` as `spawn_process` does."""
    arguments = ["--imports", ENGINE_IMPORTS] if builder == ENGINE_BUILDER else []
    return SpawnedEngine(*spawn_process(ENGINE_MODULE, ["--builder", builder, *arguments], board), board)


def spawn_process(
    module: str, arguments: Sequence[str], descriptors: Sequence[int] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """`start_process` with a new socket pair; returns the process and our end. Raises `OSError` too when the system has
    no file descriptor for it."""
    with contextlib.ExitStack() as undo:
        ours, its = socket.socketpair()
        undo.enter_context(ours)
        with its:  # our copy of its end must be closed, or the end of the process would not be seen
            for end in (ours, its):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            process = start_process(module, arguments, its, descriptors)
        undo.pop_all()  # open from here on
        return process, ours


def start_process(
    module: str, arguments: Sequence[str], line: socket.socket, descriptors: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Run a module of Headrace in a process whose standard input is ``line``, which the caller closes. It gets this
    process's ``sys.path``, with ``-P`` so that the working directory is not added, and inherits ``descriptors``. Raises
    `OSError` when the system has no process or memory for it."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    return subprocess.Popen(command, stdin=line.fileno(), env=module_environment(), pass_fds=tuple(descriptors))


def module_environment() -> dict[str, str]:
    """The environment of a process of Headrace that will import torch: it finds modules where this process does."""
    return env.worker_environment() | {
        "PYTHONPATH": os.pathsep.join(str(Path(p or ".").absolute()) for p in sys.path)
    }

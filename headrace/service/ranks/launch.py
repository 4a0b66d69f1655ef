"""`Launcher`: starts the processes of workers. `LocalLauncher`: as children of this process.

Refuses: watching them, see `headrace.service.ranks.workers`.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Sequence
from typing import Protocol

from headrace.service.ranks.worker import RANK_BUILDER, WORKER_MODULE
from headrace.service.spawn import spawn_process


class WorkerHandle(Protocol):
    """A started worker. ``line`` is our end of its socket."""

    @property
    def pid(self) -> int:
        """The id of its process, for messages."""

    @property
    def line(self) -> socket.socket:
        """Carries its `Assignment`, and its replies."""

    def is_alive(self) -> bool:
        """Whether the process still runs; a stopped one does."""

    def kill(self) -> None:
        """End it at once, if it still runs."""

    def wait(self, wait_s: float) -> int | None:
        """Its exit code, negative for a signal, or None if it still runs after ``wait_s`` seconds."""


class Launcher(Protocol):
    """A way to start workers."""

    def start(self, rank: int, descriptors: Sequence[int]) -> WorkerHandle:
        """Start the worker of a rank, which inherits ``descriptors``. Raises `OSError`."""


class LocalWorker:
    """A child process."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket):
        self._process, self._line = process, line

    @property
    def pid(self) -> int:
        """See `WorkerHandle`."""
        return self._process.pid

    @property
    def line(self) -> socket.socket:
        """See `WorkerHandle`."""
        return self._line

    def is_alive(self) -> bool:
        """See `WorkerHandle`."""
        return self._process.poll() is None

    def kill(self) -> None:
        """See `WorkerHandle`."""
        self._process.kill()

    def wait(self, wait_s: float) -> int | None:
        """See `WorkerHandle`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(wait_s)
        return None


class LocalLauncher:
    """Starts child processes of this one, on this machine."""

    def __init__(self, builder: str = RANK_BUILDER):
        self._builder = builder

    def start(self, rank: int, descriptors: Sequence[int]) -> LocalWorker:
        """See `Launcher`."""
        return LocalWorker(*spawn_process(WORKER_MODULE, ["--builder", self._builder], descriptors))

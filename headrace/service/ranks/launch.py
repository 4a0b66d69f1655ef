"""`Launcher`: starts the workers of an engine. `Host`: those of one machine. `LocalLauncher`: all on this one, as
children of this process.

Refuses: watching them, see `headrace.service.ranks.workers`.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from headrace.base.config import EngineConfig
from headrace.base.messages import Place
from headrace.base.spawn import spawn_process
from headrace.service.ranks.commands import Shared
from headrace.service.ranks.heartbeats import Heartbeats
from headrace.service.ranks.ring import WRITE_TIMEOUT_S, RingWriter
from headrace.service.ranks.worker import RANK_BUILDER, WORKER_MODULE

LOOPBACK = "127.0.0.1"
CLOSE_S = 5.0
T = TypeVar("T")
Start = Callable[[Sequence[str], Sequence[int]], tuple[subprocess.Popen[bytes], T]]
"""Starts a process with the arguments of its module and the descriptors that it inherits."""


class WorkerHandle(Protocol):
    """A started worker."""

    @property
    def rank(self) -> int:
        """Which rank it is."""

    @property
    def place(self) -> Place:
        """Its place among the ranks of its machine."""

    @property
    def name(self) -> str:
        """For messages: ``rank 1 (pid 123)``."""

    @property
    def line(self) -> socket.socket:
        """Our end of its socket: carries its `Assignment`, and its replies."""

    @property
    def beats(self) -> int:
        """Its heartbeats so far, as far as they are known here."""

    def is_alive(self) -> bool:
        """Whether the process still runs; a stopped one does."""

    def kill(self) -> None:
        """End it at once, if it still runs."""

    def wait(self, wait_s: float) -> int | None:
        """Its exit code, negative for a signal, or None if it still runs after ``wait_s`` seconds."""


class Host(Protocol):
    """The workers of one machine."""

    @property
    def config(self) -> EngineConfig:
        """The configuration of the engine, with what is this machine's own."""

    @property
    def address(self) -> str | None:
        """Where this machine reaches that of rank 0; None for the same machine."""

    @property
    def workers(self) -> Sequence[WorkerHandle]:
        """In the order of ranks."""

    def send(self, message: bytes, check: Callable[[], None], timeout_s: float = WRITE_TIMEOUT_S) -> None:
        """Give all its workers an encoded command. While they are far behind, waits and calls ``check``, which may
        raise; `EngineUnavailable` after ``timeout_s`` seconds."""

    def close(self) -> None:
        """Free what is left once the workers have ended."""


class Launcher(Protocol):
    """A way to start workers."""

    @property
    def place(self) -> Place:
        """That of rank 0."""

    def launch(self, config: EngineConfig, size: int) -> list[Host]:
        """Start ranks 1 to ``size`` - 1. Raises `OSError` and `ConfigError`; then none is left."""


class Children:
    """Workers that are children of this process: its command ring and heartbeats, which they share. They are numbered
    from 0. ``restarts``: this process is started again when it dies."""

    def __init__(self, count: int, *, restarts: bool):
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ring = RingWriter(count)
        self._heartbeats = Heartbeats(1 + count)
        self._heartbeats.start(0)
        self._count, self._restarts = count, restarts

    def start(self, start: Start[T], builder: str) -> T:
        """Start the next one by ``start``; returns what that has made beside the process."""
        index = len(self.processes)
        place, memory = self.ring.place(index), self._heartbeats.memory
        shared = Shared(place, memory, 1 + index, 1 + self._count, self._restarts)
        arguments = ["--builder", builder, "--shared", msgspec.json.encode(shared).decode()]
        process, made = start(arguments, (place.memory, place.waker, memory))
        self.processes.append(process)
        return made

    def beats(self, index: int) -> int:
        """Heartbeats of a child so far."""
        return self._heartbeats.count(1 + index)

    def close(self) -> None:
        """Kill them, if they still run, and free the memory."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
                process.wait(CLOSE_S)
        self.ring.close()
        self._heartbeats.close()


class LocalWorker:
    """A `WorkerHandle` of the latest of ``children``."""

    def __init__(self, rank: int, place: Place, children: Children, line: socket.socket):
        self.rank, self.place, self.line = rank, place, line
        self._index, self._children = len(children.processes) - 1, children
        self._process = children.processes[-1]

    @property
    def name(self) -> str:
        """See `WorkerHandle`."""
        return f"rank {self.rank} (pid {self._process.pid})"

    @property
    def beats(self) -> int:
        """See `WorkerHandle`."""
        return self._children.beats(self._index)

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


class LocalHost:
    """Starts the workers of ``places`` (by rank) as children of this process, see `Host`."""

    address = None

    def __init__(self, config: EngineConfig, places: dict[int, Place], builder: str = RANK_BUILDER):
        self.config = config
        self.workers: list[LocalWorker] = []
        self._children = Children(len(places), restarts=True)
        with ExitStack() as undo:
            undo.callback(self.close)
            for rank, place in places.items():
                line = self._children.start(partial(spawn_process, WORKER_MODULE), builder)
                self.workers.append(LocalWorker(rank, place, self._children, line))
            undo.pop_all()

    def send(self, message: bytes, check: Callable[[], None], timeout_s: float = WRITE_TIMEOUT_S) -> None:
        """See `Host`."""
        self._children.ring.write(message, check, timeout_s)

    def close(self) -> None:
        """See `Host`."""
        self._children.close()
        for worker in self.workers:
            worker.line.close()


class LocalLauncher:
    """All ranks are on this machine, and those of replica d come after those of replica d - 1."""

    def __init__(self, config: EngineConfig, size: int, builder: str = RANK_BUILDER):
        self._first, self._count = config.replica * size, config.parallel.data_parallel_size * size
        self._builder = builder
        self.place = Place(self._first, self._count)

    def launch(self, config: EngineConfig, size: int) -> list[Host]:
        """See `Launcher`."""
        places = {rank: Place(self._first + rank, self._count) for rank in range(1, size)}
        return [LocalHost(config, places, self._builder)]

"""`spawn_engine`: starts an engine process, which imports what it needs and reads its configuration.

Imports only the standard library and base: a command calls this first, and both processes then import in parallel.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, replace

from headrace.base.config import EngineConfig
from headrace.base.spawn import spawn_process

ENGINE_MODULE = "headrace.service.process"
ENGINE_BUILDER = "headrace.service.ranks.starting:build_ranked_engine"
ENGINE_IMPORTS = "headrace.service.ranks.build"
"""What `ENGINE_BUILDER` imports when it is called, with torch."""
END_SIGNAL = signal.SIGUSR1
"""The signal that ends an engine process. Not SIGTERM: service managers send that to all processes of a server at once,
and only the parent knows how long running requests may still take."""
NUM_SPARE = 8


@dataclass(frozen=True)
class SpawnedEngine:
    """A new engine process, and our end of the socket pair whose other end is its standard input."""

    process: subprocess.Popen[bytes]
    line: socket.socket

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


def spawn_engine(
    config: EngineConfig, builder: str = ENGINE_BUILDER, board: tuple[int, ...] = ()
) -> SpawnedEngine:
    """Start an engine process for ``config``, which inherits the descriptors of ``board``; it ends by itself when our
    end of the socket is closed. Raises `OSError` as `spawn_process` does."""
    arguments = ["--began", str(time.monotonic())]
    if builder == ENGINE_BUILDER:
        arguments += ["--imports", ENGINE_IMPORTS]
    spawned = SpawnedEngine(*spawn_process(ENGINE_MODULE, ["--builder", builder, *arguments], board))
    from headrace.service.framing import frame  # takes a moment, in which the process starts

    # At once: it starts its workers when it knows of them, while this process still imports.
    with contextlib.suppress(OSError):  # it has ended already, as its exit code will tell
        spawned.line.sendall(frame(replace(config, board=board)))
    return spawned

"""`spawn_engine`: starts an engine process, which imports what it needs and waits for its configuration.

Imports only the standard library and base/env: a command calls this first, and both processes then import in parallel.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from headrace.base import env

ENGINE_MODULE = "headrace.service.process"
ENGINE_BUILDER = "headrace.service.build:build_engine"
END_SIGNAL = signal.SIGUSR1
"""The signal that ends an engine process. Not SIGTERM: service managers send that to all processes of a server at once,
and only the parent knows how long running requests may still take."""
BUFFER_BYTES = 4 << 20
"""Socket buffer for each direction; the system may grant less."""


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


def spawn_engine(builder: str = ENGINE_BUILDER) -> SpawnedEngine:
    """Start an engine process; it ends by itself when our end of the socket is closed. It gets this process's
    ``sys.path``, with ``-P`` so that the working directory is not added."""
    environment = env.worker_environment() | {
        "PYTHONPATH": os.pathsep.join(str(Path(p or ".").absolute()) for p in sys.path)
    }
    ours, its = socket.socketpair()
    for end in (ours, its):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    with its:  # our copy of its end must be closed, or the end of the engine process would not be seen
        return SpawnedEngine(
            subprocess.Popen(
                [sys.executable, "-P", "-m", ENGINE_MODULE, "--builder", builder], stdin=its.fileno(), env=environment
            ),
            ours
        )

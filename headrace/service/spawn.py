"""`spawn_engine`: starts an engine process, which imports what it needs and waits for its configuration.

Standard library alone: a command calls this first and imports the rest of its own modules meanwhile.
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
"""What tells an engine process to end. Not SIGTERM: service managers send that to all processes of a server at once,
and how long running requests may take is the parent's to say."""
BUFFER_BYTES = 4 << 20
"""Of messages on their way, each way, if the system lets us have so much."""


@dataclass(frozen=True)
class SpawnedEngine:
    """A new engine process, and our end of the line whose other end is its standard input."""

    process: subprocess.Popen[bytes]
    line: socket.socket

    def end(self) -> None:
        """Kill it, if it still runs."""
        self.line.close()
        self.process.kill()
        self.process.wait()


def spawn_engine(builder: str = ENGINE_BUILDER) -> SpawnedEngine:
    """A new engine process. It ends by itself when its line is closed."""
    environment = env.worker_environment() | {
        "PYTHONPATH": os.pathsep.join(str(Path(p or ".").absolute()) for p in sys.path)
    }
    ours, its = socket.socketpair()
    for end in (ours, its):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    with its:
        return SpawnedEngine(
            subprocess.Popen(
                [sys.executable, "-P", "-m", ENGINE_MODULE, "--builder", builder], stdin=its, env=environment
            ),
            ours
        )

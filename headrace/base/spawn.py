"""`spawn_process`, `start_process`: run a module of Headrace in a process of its own; `describe_exit`: how that ended.

Imports only the standard library and `env`: a command may call this before anything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from headrace.base import env

BUFFER_BYTES = 4 << 20
"""Socket buffer for each direction; the system may grant less."""
PR_SET_PDEATHSIG = 1
"""The option of prctl(2) that sets the signal which a process gets when its parent dies."""


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


def describe_exit(code: int) -> str:
    """How a process ended, by `subprocess.Popen.returncode`: ``died with signal 9 (SIGKILL)``."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"died with signal {-code} ({signal.Signals(-code).name})"
    except ValueError:  # most real-time signals have no name
        return f"died with signal {-code}"


def continue_when_orphaned() -> None:
    """On Linux, have the system continue this process when its parent dies: one that was stopped (SIGSTOP) would
    otherwise hold its memory and device for ever, as it cannot see the end of its line. SIGCONT and not SIGKILL,
    because the system sends it as well when only the thread that started this process has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)

"""How the engine process and its workers end: with their parent, or at once after they told the client why; and how
long one has shown no sign of life.

Refuses: deciding that the process has to end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import psutil

logger = logging.getLogger(__name__)

PARENT_POLL_S = 1.0


@dataclass
class ExitCalls:
    """What this process calls when it ends. ``on_error`` tells the client why, and must be safe to call from any
    thread; ``on_stop`` is called before an end that was asked for."""

    on_error: Callable[[Exception], None] = lambda _: None
    on_stop: Callable[[], None] = lambda: None


EXIT = ExitCalls()
"""One for the process, as threads without a way to the client may end it."""


def end_with(error: Exception) -> NoReturn:
    """Log why, tell the client, and end the process at once, from any thread and whatever the others do."""
    logger.error("the engine ends: %s", error)
    EXIT.on_error(error)
    leave(1)


def die_with_parent(await_end: Callable[[float], bool], parent: int) -> None:
    """Watch the line to the parent from a thread; when the parent is gone, end the process at once. ``await_end`` waits
    so many seconds at most for the line's other end to close, and returns whether it has."""

    def watch() -> None:
        # Two signs: a hang-up of the socket, which a copy of the descriptor in another child of the parent would hide,
        # and the parent id, which changes when the process is reparented.
        while os.getppid() == parent and not await_end(PARENT_POLL_S):
            pass
        logger.warning("the parent process is gone; this process ends")
        leave(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class ProcessWatch:
    """How long a process has shown no sign of life: it was not heard, and has used no processor time."""

    def __init__(self, pid: int):
        self._process = psutil.Process(pid)
        self._used_s, self._seen_at = 0.0, time.monotonic()

    def note(self) -> None:
        """Note a sign of life."""
        self._seen_at = time.monotonic()

    def silent_s(self) -> float:
        """Seconds since the last sign of life; call it every second or so."""
        with contextlib.suppress(psutil.Error):
            times = self._process.cpu_times()
            if times.user + times.system > self._used_s:
                self._used_s = times.user + times.system
                self.note()
        return time.monotonic() - self._seen_at


def leave(code: int) -> NoReturn:
    """Kill all child processes (workers, kernel compilers) and exit without finalizers: a normal exit would wait for
    them and for threads."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    logging.shutdown()
    os._exit(code)

"""How the engine process and its workers end: with their parent, at once, and with a last word to the client.

Refuses: deciding that the process has to end.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import psutil

logger = logging.getLogger(__name__)

PARENT_POLL_S = 1.0
PR_SET_PDEATHSIG = 1
"""The option of prctl(2) that sets the signal which a process gets when its parent dies."""


class LastWord:
    """Who is told why this process ends. One for the process, as threads without a way to the client may end it."""

    def __init__(self) -> None:
        self._tell: Callable[[Exception], None] | None = None
        self._part: Callable[[], None] = lambda: None

    def goes_to(self, tell: Callable[[Exception], None]) -> None:
        """Call ``tell`` before the end; it must be safe to call from any thread."""
        self._tell = tell

    def say(self, error: Exception) -> None:
        """Tell it, if somebody listens."""
        if self._tell is not None:
            self._tell(error)

    def before_end(self, part: Callable[[], None]) -> None:
        """Call ``part`` when this process ends as it was told to, and not because of an error."""
        self._part = part

    def part(self) -> None:
        """Take leave of whom `before_end` named."""
        self._part()


LAST_WORD = LastWord()


def end_with(error: Exception) -> NoReturn:
    """Log why, tell the client, and end the process at once, from any thread and whatever the others do."""
    logger.error("the engine ends: %s", error)
    LAST_WORD.say(error)
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


def continue_when_orphaned() -> None:
    """On Linux, have the system continue this process when its parent dies: one that was stopped (SIGSTOP) would
    otherwise hold its memory and device for ever, as `die_with_parent` cannot run. SIGCONT and not SIGKILL, because
    the system sends it as well when only the thread that started this process has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


def leave(code: int) -> NoReturn:
    """Kill all child processes (workers, kernel compilers) and exit without finalizers: a normal exit would wait for
    them and for threads."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    logging.shutdown()
    os._exit(code)

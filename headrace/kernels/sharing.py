"""`alone`: work that the processes of a machine must not do at the same time, as one of them leaves its result for all.

Refuses: waiting without end for a process that was stopped.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WAIT_SECONDS = 120.0
"""After so long the body runs all the same: it takes seconds, so who has the lock was stopped, or its machine is gone.
"""
POLL_SECONDS = 0.05
"""The longest time between two tries. `flock` itself would wait without end."""


@contextmanager
def alone(lock: Path, seconds: float = WAIT_SECONDS) -> Iterator[bool]:
    """In the body no other process or thread is in one of the same ``lock``, a file that is made and removed here; one
    that dies lets it go. Yields whether another one, which was waited for, came to the end of its body, in whatever
    way. Where the file cannot be made or locked, nobody waits for anybody."""
    try:
        opened = lock.open("w")
    except OSError:
        yield False
        return
    with opened:
        has_lock = _take(opened, seconds)
        # whoever reaches the end removes the file, and then lets go of it
        was_done = has_lock and os.fstat(opened.fileno()).st_nlink == 0
        try:
            yield was_done
        finally:
            if has_lock and not was_done:  # or the file of that name is another one's
                lock.unlink(missing_ok=True)


def _take(opened: Any, seconds: float) -> bool:
    """Lock an open file; False where that cannot be done, or not within so many seconds."""
    until, pause = time.monotonic() + seconds, POLL_SECONDS / 16
    while True:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
        except OSError:  # a file system without locks
            return False
        time.sleep(pause)
        pause = min(2 * pause, POLL_SECONDS)

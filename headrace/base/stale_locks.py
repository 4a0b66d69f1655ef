"""Locks that dead compilers left behind: torch waits for ever on one while it builds an extension, as installed
plug-ins may. Own native code needs no sweeping, its locks die with their holders.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK_NAMES = frozenset({"lock", ".ninja_lock"})
MAX_AGE_S = 30 * 60.0
"""Older than any compilation that is still running."""


def sweep_stale_locks(folder: Path, *, max_age_s: float = MAX_AGE_S) -> int:
    """Remove locks below ``folder`` that were last touched longer ago; returns how many. 0 or less removes none. What
    cannot be read or removed stays."""
    if max_age_s <= 0:
        return 0
    oldest, num_removed = time.time() - max_age_s, 0
    for place, _, names in os.walk(folder):
        for name in LOCK_NAMES.intersection(names):
            path = Path(place, name)
            with contextlib.suppress(OSError):  # another process may be sweeping, or it is not ours
                if path.stat().st_mtime < oldest:
                    path.unlink()
                    num_removed += 1
    if num_removed:
        logger.warning("removed %d stale locks of compilers below %s", num_removed, folder)
    return num_removed

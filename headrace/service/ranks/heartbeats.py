"""Heartbeats of the ranks on a machine: a counter each in shared memory, by which others notice a stopped process."""

from __future__ import annotations

import mmap
import os
import threading

LINE_WORDS, WORD_BYTES = 8, 8
BEAT_S = 0.2
SILENCE_S = 10.0
"""A rank whose counter stands still for so long is stopped: no call of a library holds the interpreter as long."""
START_SILENCE_S = 120.0
"""The same of a rank that starts: importing a library from a slow disk may hold the interpreter for long."""


class Heartbeats:
    """``size`` counters: 0 is that of the process that creates them, which starts the others; these open the inherited
    descriptor ``memory``."""

    def __init__(self, size: int, memory: int | None = None):
        self.memory = os.memfd_create("headrace-heartbeats", os.MFD_CLOEXEC) if memory is None else memory
        num_bytes = LINE_WORDS * WORD_BYTES * size
        if memory is None:
            os.ftruncate(self.memory, num_bytes)
        self._map = mmap.mmap(self.memory, num_bytes)
        self._words = memoryview(self._map).cast("Q")
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, index: int, beat_s: float = BEAT_S) -> None:
        """Count up counter ``index`` from a thread, until `close`."""

        def beat() -> None:
            while not self._is_closed.wait(beat_s):
                self._words[LINE_WORDS * index] += 1

        self._thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        self._thread.start()

    def count(self, index: int) -> int:
        """Beats so far."""
        return self._words[LINE_WORDS * index]

    def close(self) -> None:
        """Stop counting and free the memory."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join()
        self._words.release()
        self._map.close()
        os.close(self.memory)


class Silence:
    """For how long a counter has stood still. Counts looks and not the clock: when this process or the whole machine
    was stopped, nobody is to blame for the time between two looks."""

    def __init__(self, period_s: float, limit_s: float = SILENCE_S):
        self.limit_s, self._period_s = limit_s, period_s
        self._count, self._num_looks = -1, 0

    def note(self, count: int) -> bool:
        """The counter as seen now, every ``period_s``; returns whether it has stood still for ``limit_s`` seconds."""
        self._num_looks = self._num_looks + 1 if count == self._count else 0
        self._count = count
        return self._num_looks * self._period_s >= self.limit_s

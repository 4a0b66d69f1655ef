"""`Stages`: how long each stage of a start took, for one line in the log at its end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from headrace.service.executor import Progress

LEAST_S = 0.05
"""Shorter stages are left out of the line."""
LIFE_S = 5.0
"""Between two signs of life."""


class Stages:
    """A `Progress` that passes on what it is told and notes when each stage begins. ``began``: when the start did, by
    ``clock`` in seconds; ``first``: the stage until it is told of another. Of a stage's name, what follows a colon is
    left out: ``compiling CPU kernels: 3 of 9 files``."""

    def __init__(
        self, progress: Progress, began: float, first: str = "importing", *,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._progress, self._clock = progress, clock
        self._began = self._since = began
        self._stage, self._told = first, (first, 0.0)
        self._took: dict[str, float] = {}

    def __call__(self, stage: str, fraction: float) -> None:
        """See `Progress`."""
        self.enter(stage.partition(":")[0])
        self._told = stage, fraction
        self._progress(stage, fraction)

    @contextlib.contextmanager
    def repeated(self, period_s: float = LIFE_S) -> Iterator[None]:
        """While the body runs, pass on the latest report again and again, from a thread: it is a sign of life."""
        has_ended = threading.Event()

        def repeat() -> None:
            while not has_ended.wait(period_s):
                self._progress(*self._told)

        thread = threading.Thread(target=repeat, name="start-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()

    def enter(self, stage: str) -> None:
        """The stage until now ends, and ``stage`` begins; one that was left before goes on."""
        if stage != self._stage:
            now = self._clock()
            self._took[self._stage] = self._took.get(self._stage, 0.0) + now - self._since
            self._stage, self._since = stage, now

    def describe(self) -> str:
        """End the current stage: ``started in 9.8 s: importing 2.1, loading weights 4.0``, in the order in which stages
        first began."""
        self.enter("")
        parts = ", ".join(f"{stage} {took:.1f}" for stage, took in self._took.items() if took >= LEAST_S)
        total = self._since - self._began
        return f"started in {total:.1f} s" + (f": {parts}" if parts else "")

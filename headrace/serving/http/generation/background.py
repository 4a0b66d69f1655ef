"""`BackgroundRuns`: responses that are generated whether or not a client is connected, and their events, which clients
may follow from any point while they are kept. Refuses: response formats (the events' writer) and final responses
(`ResponseStore`)."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator
from typing import Protocol

from headrace.base.errors import HeadraceError, QueueFull
from headrace.service.client.outputs import ChoiceDelta
from headrace.serving.http.transport.errors import INTERNAL_ERROR, conceal

logger = logging.getLogger(__name__)

MOST_RUNNING = 256
MOST_EVENT_BYTES = 32 * 2**20
"""Bytes of events kept of all runs together; those of the oldest runs are dropped first."""
OVERHEAD_BYTES = 64
Key = tuple[bytes, str]
"""Owner and response id."""


class Source(Protocol):
    """What a run needs of `headrace.serving.http.generation.run.Generation`."""

    def deltas(self) -> AsyncGenerator[tuple[int, ChoiceDelta], None]:
        """``(prompt index, delta)`` to the end."""

    def close(self) -> None:
        """Abort what still runs."""


class Writer(Protocol):
    """What a run needs of `headrace.serving.http.generation.stream.Events`."""

    def render(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        """The frames of one delta."""

    def end(self) -> bytes:
        """The last frames."""

    def fail(self, error: HeadraceError) -> bytes:
        """The last frames of a response that failed."""


class BackgroundRun:
    """One response in the making. ``frames`` are its events so far, one each, if they are ``recorded``."""

    def __init__(self, generation: Source, events: Writer, *, is_recorded: bool):
        self._generation, self._events, self._is_recorded = generation, events, is_recorded
        self.frames: list[bytes] = []
        self.num_bytes = 0
        self.is_finished = self.is_dropped = False
        self._changed = asyncio.Event()

    async def run(self, opening: bytes) -> None:
        """Generate to the end. Whatever happens, the response then says how it ended."""
        ending = None
        try:
            self._record(opening)
            ending = await self._generate()
        finally:
            self._record(self._events.fail(HeadraceError(INTERNAL_ERROR)) if ending is None else ending)
            self._generation.close()
            self.is_finished = True
            self._notify()

    async def _generate(self) -> bytes:
        """The events that end the response."""
        async for index, delta in self._generation.deltas():
            if delta.error is not None:
                return self._events.fail(conceal(delta.error.to_error()))
            self._record(self._events.render(index, delta))
        return self._events.end()

    async def follow(self, begin: int) -> AsyncGenerator[bytes, None]:
        """The events from number ``begin`` on, until the last. Ends early if they are dropped meanwhile."""
        while not self.is_dropped:
            changed = self._changed
            if begin < len(self.frames):
                fresh = self.frames[begin:]
                begin += len(fresh)
                yield b"".join(fresh)
            elif self.is_finished:
                return
            else:
                await changed.wait()

    def drop(self) -> None:
        """Forget the events; followers end."""
        self.is_dropped, self.frames, self.num_bytes = True, [], 0
        self._notify()

    def _record(self, frames: bytes) -> None:
        if self._is_recorded and not self.is_dropped:
            # JSON has no line breaks of its own, so that an empty line ends an event.
            added = [frame + b"\n\n" for frame in frames.split(b"\n\n") if frame]
            self.frames += added
            self.num_bytes += sum(len(frame) + OVERHEAD_BYTES for frame in added)
        self._notify()

    def _notify(self) -> None:
        # A new event each time: whoever waits for the old one wakes up once.
        self._changed.set()
        self._changed = asyncio.Event()


class BackgroundRuns:
    """All runs of the server. A run whose events are kept can be followed after its end, too."""

    def __init__(self) -> None:
        self._runs: OrderedDict[Key, BackgroundRun] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def check_room(self) -> None:
        """Raise `QueueFull` if no more responses may be started."""
        if len(self._tasks) >= MOST_RUNNING:
            raise QueueFull(f"{MOST_RUNNING} background responses are running; try again", retry_after=1.0)

    def start(self, key: Key, run: BackgroundRun, opening: bytes) -> None:
        """Run in a task of its own. ``opening``: events before the first delta."""
        self._runs[key] = run
        task = asyncio.create_task(run.run(opening))
        self._tasks.add(task)
        task.add_done_callback(self._finish)
        self._make_room()

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a background response failed", exc_info=task.exception())
        self._make_room()

    def find(self, key: Key) -> BackgroundRun | None:
        """A run whose events are kept."""
        return self._runs.get(key)

    def _make_room(self) -> None:
        for key in [key for key, run in self._runs.items() if run.is_finished and not run.frames]:
            del self._runs[key]
        total = sum(run.num_bytes for run in self._runs.values())
        while total > MOST_EVENT_BYTES and self._runs:
            _, oldest = self._runs.popitem(last=False)
            total -= oldest.num_bytes
            oldest.drop()

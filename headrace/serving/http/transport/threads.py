"""`WorkThreads`: work on a request's texts off the event loop, in lanes by size, so that somebody's giant text delays
giants only. Work stops soon after its client has gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from headrace.service.tokenization.pieces import Interrupted, interruptible

T = TypeVar("T")

AT_ONCE = 20_000
"""Bytes or characters below which work is done on the event loop: it takes a few milliseconds."""
LANES = ((1 << 18, 2), (1 << 21, 1), (1 << 62, 1))
"""``(most bytes or characters, number of threads)`` of each lane."""


class WorkThreads:
    """The threads of one application. They start when first needed."""

    def __init__(self) -> None:
        self._lanes = [(most, ThreadPoolExecutor(count, f"work-{i}")) for i, (most, count) in enumerate(LANES)]
        self._running: set[threading.Event] = set()

    async def run(self, request: Request, size: int, work: Callable[[], T]) -> T:
        """The result of ``work``, whose cost is in proportion to ``size`` (bytes or characters). Small work is done at
        once, other work on a thread of its lane. When the client disconnects, encoding stops between two pieces, and
        `ClientDisconnect` is raised. The request's body must have been read."""
        if size <= AT_ONCE:
            return work()
        stop = threading.Event()

        def run() -> T:
            with interruptible(stop):
                if stop.is_set():
                    raise Interrupted
                return work()

        lane = next(lane for most, lane in self._lanes if size <= most)
        self._running.add(stop)
        try:
            return await while_connected(request, asyncio.wrap_future(lane.submit(run)))
        finally:
            # Also if this task is cancelled. What has not begun never does; its thread skips it.
            stop.set()
            self._running.discard(stop)

    def close(self) -> None:
        """Stop what runs; nothing more can be run."""
        for stop in self._running:
            stop.set()
        for _, lane in self._lanes:
            lane.shutdown(wait=False, cancel_futures=True)


async def while_connected(request: Request, result: asyncio.Future[T]) -> T:
    """The result of a future or task, which is cancelled, and `ClientDisconnect` raised, when the client disconnects.
    The request's body must have been read."""
    watch = asyncio.create_task(_wait_for_disconnect(request))
    try:
        futures: set[asyncio.Future[Any]] = {result, watch}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise ClientDisconnect
        return result.result()
    finally:
        result.cancel()
        watch.cancel()  # else it would hold the connection's receive channel
        await asyncio.wait([watch])


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

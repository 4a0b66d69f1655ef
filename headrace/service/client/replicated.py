"""`ReplicatedClient`: several engine processes for a batch in the caller's thread, with the interface of `LocalClient`.
Torch-free.

Refuses: streaming; it runs a batch of jobs to their end. An event loop on a thread of its own serves the engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, TypeVar

from headrace.base.adapters import AdapterCall
from headrace.base.config import EngineConfig
from headrace.base.errors import EngineUnavailable
from headrace.base.messages import EngineStats, MemoryLine, ModelFacts
from headrace.service.client.adapters import LOADING_TIMEOUT_S
from headrace.service.client.client import EngineClient
from headrace.service.client.jobs import Job, JobMaker, defer_interrupt
from headrace.service.client.outputs import ChoiceDelta, GenerationOutput
from headrace.service.client.replica import Supervision

POLL_S = 0.1
"""How late an interrupt may be noticed."""
T = TypeVar("T")


class _Batch:
    """The jobs of one run, read by tasks of the event loop. At most ``window`` choices are with the engines, so that
    the queue limit of none refuses any. ``add`` and `finish` belong to the caller's thread."""

    def __init__(
        self, client: EngineClient, loop: asyncio.AbstractEventLoop, window: int, on_finish: Callable[[], None]
    ):
        self.jobs: list[Job] = []
        self._client, self._loop, self._window, self._on_finish = client, loop, window, on_finish
        self._changed = threading.Condition()  # guards the three below
        self._num_open = 0
        self._error: BaseException | None = None
        self._added: list[Job] = []  # waking the loop for each would cost more than sending it
        self._tasks: set[asyncio.Task[None]] = set()  # the loop's

    def add(self, job: Job, interrupt: threading.Event) -> None:
        """Send a job; waits while the window is full."""
        size = len(job.requests)
        self._wait(lambda: not self._num_open or self._num_open + size <= self._window, interrupt)
        self.jobs.append(job)
        with self._changed:
            self._num_open += size
            self._added.append(job)
            is_first = len(self._added) == 1
        if is_first:
            self._loop.call_soon_threadsafe(self._begin)

    def finish(self, interrupt: threading.Event) -> None:
        """Wait for the end of all jobs; raises `EngineUnavailable` when no engine is left to run them."""
        self._wait(lambda: not self._num_open, interrupt)
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """End what still runs, and wait for that."""
        if self._num_open:
            self._loop.call_soon_threadsafe(self._cancel)
            with self._changed:
                self._changed.wait_for(lambda: not self._num_open)

    def _wait(self, condition: Callable[[], bool], interrupt: threading.Event) -> None:
        with self._changed:
            while not condition():
                if interrupt.is_set():
                    raise KeyboardInterrupt
                if self._error is not None:
                    raise self._error
                self._changed.wait(POLL_S)

    def _begin(self) -> None:
        with self._changed:
            jobs, self._added = self._added, []
        for job in jobs:
            task = self._loop.create_task(self._read(job))
            self._tasks.add(task)
            task.add_done_callback(partial(self._end, job))

    def _end(self, job: Job, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        with self._changed:
            self._num_open -= len(job.requests)
            self._error = self._error or error
            self._changed.notify_all()
        self._on_finish()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _read(self, job: Job) -> None:
        if self._client.state == "restarting":  # all of them: what is not sent yet can wait
            await self._client.wait_ready()

        def take(delta: ChoiceDelta) -> bool:
            job.collector.add(delta)
            return True

        stream = self._client.send(job.collector.output.request_id, job.requests, job.assembler)
        stream.divert(take)
        async for delta in stream:
            job.collector.add(delta)


class ReplicatedClient:
    """Runs jobs on the replicas, each where the balancing policy puts it; ``jobs`` makes them. Threads take turns. A
    request on a replica that dies ends with a typed error; others go on, and later ones go to those that live."""

    def __init__(self, config: EngineConfig, *, supervision: Supervision = Supervision()):  # noqa: B008 (frozen)
        self.config = config
        self.jobs = JobMaker(config)
        self._turn = threading.RLock()
        self._is_closed = False
        self._client = EngineClient(config, supervision=supervision)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="replicas", daemon=True)
        self._thread.start()
        with contextlib.ExitStack() as undo:  # an error must leave neither thread nor processes behind
            undo.callback(self.close)
            self._await(self._start())
            undo.pop_all()

    @property
    def facts(self) -> ModelFacts:
        """Facts of the loaded model."""
        assert self._client.facts is not None, "known once started"
        return self._client.facts

    @property
    def memory(self) -> list[MemoryLine]:
        """The memory plans of all replicas, added up."""
        return self._client.memory

    def run(self, jobs: Iterable[Job], on_finish: Callable[[], None] = lambda: None) -> list[GenerationOutput]:
        """As `LocalClient.run`; ``on_finish`` is called on another thread."""
        with self._turn, defer_interrupt() as interrupt:
            self._require_open()
            batch = _Batch(self._client, self._loop, self.config.scheduler.max_queued, on_finish)
            try:
                for job in jobs:
                    batch.add(job, interrupt)
                batch.finish(interrupt)
            finally:
                batch.abort()
            self._require_open()  # else it was closed meanwhile, which ended what ran
        return [job.collector.output for job in batch.jobs]

    def stats(self) -> EngineStats:
        """Counters and gauges of all replicas."""
        return self._await(self._client.stats())

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False when some are in use and stayed."""
        return self._await(self._client.reset_prefix_cache())

    def administer(self, call: AdapterCall) -> Any:
        """Make a call that concerns adapters on all replicas; returns the result of the first, as builtins."""
        return self._await(self._client.control(call, timeout_s=LOADING_TIMEOUT_S))

    def check(self) -> None:
        """Raise `AssertionError` when a page or row is not accounted for."""
        self._await(self._client.check())

    def close(self) -> None:
        """End the engine processes; what runs in another thread fails. May be called twice."""
        if self._is_closed:
            return
        if threading.current_thread() is self._thread:  # the garbage collector ran there: it must not wait for itself
            self._is_closed = True
            self._client.end_soon()
            self._loop.stop()
            return
        self._await(self._client.close())
        self._is_closed = True
        with self._turn:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _start(self) -> None:
        await self._client.start(has_tokenizer=False)
        await self._client.wait_ready()

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        if self._is_closed:
            work.close()
        self._require_open()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineUnavailable("this engine is closed; create a new one")

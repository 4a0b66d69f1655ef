"""`LocalClient`: an engine in this process, stepped by the caller's own thread. Importing this costs no torch.

Refuses: streaming; it runs a batch of jobs to their end.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.base.adapters import AdapterCall, ListAdapters, LoadAdapter, PinAdapter, UnloadAdapter
from headrace.base.config import EngineConfig
from headrace.base.errors import EngineUnavailable
from headrace.base.messages import EngineRequest, EngineStats, MemoryLine, ModelFacts, RequestOutput
from headrace.base.registry import load_target
from headrace.service.bytecode import keep_bytecode
from headrace.service.client.jobs import Job, JobMaker, defer_interrupt
from headrace.service.client.outputs import GenerationOutput
from headrace.service.joining import join_outputs
from headrace.service.spawn import ENGINE_BUILDER
from headrace.service.stages import Stages

if TYPE_CHECKING:
    from headrace.service.engine import Engine

logger = logging.getLogger(__name__)

TOKENS_QUEUED = 32768
"""Prompt tokens prepared, and submitted, before one step: more than a step usually takes."""
LEAST_QUEUED = 64
"""So many requests at least, but before the first step: where prompts are cached but for their ends, those of fewer
make steps so small that the host, not the device, bounds them."""
OUTPUTS_JOINED = 64
"""Outputs of a request that are detokenized at once: without streaming, fewer and larger calls are cheaper."""


class _Intake:
    """Jobs on their way into the engine. ``jobs``: all taken from ``source`` so far, in order; ``running``: jobs by the
    ids of submitted requests that have not ended; ``held``: outputs per request id that are not yet detokenized.
    ``window``: the most requests that the engine may hold at once."""

    def __init__(self, source: Iterator[Job], window: int):
        self.jobs: list[Job] = []
        self.running: dict[str, Job] = {}
        self.held: dict[str, list[RequestOutput]] = {}
        self._source: Iterator[Job] | None = source
        self._waiting: deque[tuple[EngineRequest, Job]] = deque()
        self._num_tokens = 0  # of prompts that wait
        self._window, self._least = window, 1

    @property
    def has_work(self) -> bool:
        return bool(self._source or self._waiting or self.running)

    def take(self) -> Iterator[EngineRequest]:
        """The requests to submit before the next step. At most ``window`` are in the engine, so that its queue limit
        refuses none of them."""
        least, self._least = self._least, LEAST_QUEUED
        self._take_jobs(least)
        num_taken = num_tokens = 0
        while (
            self._waiting and len(self.running) < self._window and (num_tokens < TOKENS_QUEUED or num_taken < least)
        ):
            request, job = self._waiting.popleft()
            length = len(request.prompt_token_ids)
            num_taken, num_tokens, self._num_tokens = num_taken + 1, num_tokens + length, self._num_tokens - length
            self.running[request.request_id] = job
            yield request

    def _take_jobs(self, least: int) -> None:
        while self._source is not None and (self._num_tokens < TOKENS_QUEUED or len(self._waiting) < least):
            job = next(self._source, None)
            if job is None:
                self._source = None
                return
            self.jobs.append(job)
            for request in job.requests:
                self._num_tokens += len(request.prompt_token_ids)
                self._waiting.append((request, job))


@contextmanager
def _without_collections() -> Iterator[None]:
    """While starting, which makes many objects and hardly any garbage."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class LocalClient:
    """Runs jobs that its ``jobs`` made, which checks everything before anything is scheduled. Threads take turns."""

    def __init__(self, config: EngineConfig, *, builder: str = ENGINE_BUILDER):
        self.config = config
        stages = Stages(lambda stage, fraction: None, time.monotonic())
        with keep_bytecode(), _without_collections():
            self._engine: Engine = load_target(builder)(config, stages)
        logger.info(stages.describe())
        gc.collect()
        gc.freeze()  # torch and the model are here to stay: no collection need look at their objects again
        # Reentrant: a signal handler that interrupts the owner may take them again. Order: `_turn` before `_touch`.
        self._turn = threading.RLock()  # for a whole run
        self._touch = threading.RLock()  # for one call of the engine, which is not thread-safe
        self.jobs = JobMaker(config)
        self._is_sound = True
        self._is_closed = False  # no step begins any more
        self._is_freed = False

    @property
    def facts(self) -> ModelFacts:
        """Facts of the loaded model."""
        return self._engine.executor.facts

    @property
    def memory(self) -> list[MemoryLine]:
        """The memory plan: each part and its bytes on the device."""
        return self._engine.executor.memory

    def run(self, jobs: Iterable[Job], on_finish: Callable[[], None] = lambda: None) -> list[GenerationOutput]:
        """Run jobs to their end and return their outputs in the same order; calls ``on_finish`` as each one ends.

        ``jobs`` is consumed lazily, some before each step, so that the device does not wait until all are tokenized. An
        exception from ``jobs`` ends the run and aborts what was started. Ctrl-C and `close` in another thread take
        effect between two steps; Ctrl-C aborts all jobs and leaves the engine usable.
        """
        with self._turn, defer_interrupt() as interrupt:
            self._require_sound()
            intake = _Intake(iter(jobs), self.config.scheduler.max_queued)
            try:
                self._drive(intake, interrupt, on_finish)
            finally:
                if self._is_sound and not self._is_freed:
                    self._abort(intake.running)
        return [job.collector.output for job in intake.jobs]

    def stats(self) -> EngineStats:
        """Counters and gauges of the engine."""
        with self._touch:
            return self._engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False when some are in use and stayed."""
        with self._touch:
            return self._engine.reset_prefix_cache()

    def administer(self, call: AdapterCall) -> Any:
        """Make a call that concerns adapters, and wait for it; returns its result as builtins."""
        with self._touch:
            adapters = self._engine.adapters
            match call:
                case LoadAdapter():
                    result: object = adapters.load(call)
                case UnloadAdapter():
                    result = adapters.unload(call)
                case PinAdapter():
                    result = adapters.pin(call)
                case ListAdapters():
                    result = adapters.describe_all()
            return msgspec.to_builtins(result)

    def check(self) -> None:
        """Raise `AssertionError` when a page or row is not accounted for."""
        with self._touch:
            self._engine.check()

    def close(self) -> None:
        """Free the model and the device memory. Waits for a run in another thread to stop; may be called twice."""
        self._is_closed = True  # without a lock: the thread that holds `_turn` must see it to let go
        with self._turn, self._touch:
            if not self._is_freed:
                self._is_freed = True
                self._engine.close()

    def _drive(self, intake: _Intake, interrupt: threading.Event, on_finish: Callable[[], None]) -> None:
        while intake.has_work:
            self._require_sound()
            self._submit(intake)
            # Thousands of prompts take longer to prepare than a step: the device computes those that are there.
            while self._waits_for_device() and self._submit(intake):
                pass
            for output in self._step():
                self._deliver(output, intake, on_finish)
            if interrupt.is_set():
                raise KeyboardInterrupt

    def _submit(self, intake: _Intake) -> bool:
        """Submit some requests; returns whether there were any."""
        has_submitted = False
        for request in intake.take():
            has_submitted = True
            with self._touch:
                self._engine.submit(request)
        return has_submitted

    def _waits_for_device(self) -> bool:
        """Launch what is possible; returns whether there is nothing left to do but wait for the device."""
        with self._touch:
            self._is_sound = False  # as in `_step`
            self._engine.launch()
            self._is_sound = True
            return self._engine.waits_for_device

    def _deliver(self, output: RequestOutput, intake: _Intake, on_finish: Callable[[], None]) -> None:
        request_id = output.request_id
        job = intake.running[request_id] if output.finish is None else intake.running.pop(request_id)
        if not job.assembler.can_end_early:  # no stop strings: nothing in the text can end the request early
            held = intake.held.setdefault(request_id, [])
            held.append(output)
            if output.finish is None and len(held) < OUTPUTS_JOINED:
                return
            output = join_outputs(intake.held.pop(request_id))
        was_finished = job.assembler.is_finished
        delta = job.assembler.feed(output)
        if delta is not None:
            job.collector.add(delta)
        for abort in job.assembler.to_abort():
            with self._touch:
                self._engine.abort(abort.request_id, abort.reason)
        if job.assembler.is_finished and not was_finished:
            on_finish()

    def _step(self) -> list[RequestOutput]:
        with self._touch:
            self._is_sound = False  # stays so if the step raises: an engine that raises cannot be trusted
            outputs = self._engine.step()
            self._is_sound = True
        return outputs

    def _abort(self, running: dict[str, Job]) -> None:
        """End what still runs, and read the steps in flight, of which other ranks may wait for an end."""
        with self._touch:
            for request_id in running:
                self._engine.abort(request_id)
        while self._engine.has_work:
            self._step()

    def _require_sound(self) -> None:
        if self._is_closed or not self._is_sound:
            raise EngineUnavailable(f"this engine {'is closed' if self._is_closed else 'has failed'}; create a new one")

"""`StorageLane`: pages between host memory and stores, on threads. A store that hangs delays nobody: what is late has
failed, and what it still does then happens in memory of its own."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from headrace.base.step import Arrival, PageMove
from headrace.memory.host import HostPages
from headrace.memory.moving import failed
from headrace.memory.storage import PageStore

logger = logging.getLogger(__name__)

NUM_READERS, NUM_WRITERS = 4, 2
"""Threads that look for pages and read them, and others that write: requests wait for the former alone."""
MOST_STUCK = 16
"""Calls that were given up and have not ended, of either kind: another thread takes the place of each that is stuck in
one, as a store that hangs must not keep others from answering. Beyond these, moves are refused."""
MOST_JOBS = 256
"""Unfinished jobs beyond which moves are refused: the stores are too slow, or hang."""
BATCH_BYTES = 32 * 2**20
"""Pages of one call of a store, at least one."""
PUT_TIMEOUT_S, GET_TIMEOUT_S, EXISTS_TIMEOUT_S = 30.0, 4.0, 1.0
PAUSE_S = 10.0
"""A store that was too slow is not asked for so long: each request would wait for it."""
LOG_PERIOD_S = 60.0


@dataclass
class _Job:
    """One move. ``mutex`` guards host memory against a job that ends after it was given up."""

    move: PageMove
    names: list[str]
    deadline: float
    mutex: threading.Lock = field(default_factory=threading.Lock)
    is_void: bool = False
    is_begun: bool = False  # by a thread
    is_replaced: bool = False  # that thread is
    is_done: bool = False
    error: Exception | None = None  # of a store
    store: int = -1  # the one that is asked
    lacking: set[int] = field(default_factory=set)  # indices of pages that no store had, or took

    @property
    def writes(self) -> bool:
        """Whether pages go to the stores."""
        return self.move.target == "storage"


class StorageLane:
    """``stores``: fastest first. A page is put into each and got from the first that has it. ``label`` begins the names
    of pages: it tells apart models, layouts and ranks."""

    def __init__(self, host: HostPages, stores: list[PageStore], label: str, wake: Callable[[], None]):
        self._host, self._stores, self._label, self._wake = host, stores, label, wake
        self._waiting = {writes: queue.SimpleQueue[_Job | None]() for writes in (False, True)}
        self._jobs: list[_Job] = []
        self._stuck: list[_Job] = []  # given up, but some thread is still at it
        self._ended: list[Arrival] = []
        self._logged_at = -LOG_PERIOD_S
        self._paused_until = [0.0] * len(stores)
        for writes, count in ((False, NUM_READERS), (True, NUM_WRITERS)):
            for _ in range(count):
                self._add_thread(writes)

    def _add_thread(self, writes: bool) -> None:
        name = f"page-store-{'put' if writes else 'get'}"
        # A daemon: a store that hangs must not keep the process from ending.
        threading.Thread(target=self._work, args=(self._waiting[writes],), name=name, daemon=True).start()

    def rename(self, label: str) -> None:
        """Name pages otherwise from now on: the weights were replaced."""
        self._label = label

    def start(self, move: PageMove) -> None:
        """See `headrace.memory.moving.Lane`."""
        self._stuck = [job for job in self._stuck if not job.is_done]
        # Rows that are not usable yet are still to be cleared: what was read into them would become zeros.
        is_early = move.target == "host" and not self._host.is_usable(move.group, move.target_pages)
        writes = move.target == "storage"
        is_stuck = sum(job.writes == writes for job in self._stuck) >= MOST_STUCK
        if is_early or is_stuck or len(self._jobs) + len(self._stuck) >= MOST_JOBS:
            self._ended.append(failed(move))
            return
        limit = EXISTS_TIMEOUT_S if not move.target else GET_TIMEOUT_S if move.target == "host" else PUT_TIMEOUT_S
        names = [f"{self._label}-{move.group}-{key.hex()}" for key in move.keys]
        job = _Job(move, names, time.monotonic() + limit)
        self._jobs.append(job)
        self._waiting[writes].put(job)

    def poll(self) -> list[Arrival]:
        """See `headrace.memory.moving.Lane`."""
        ended, self._ended = self._ended, []
        now, jobs = time.monotonic(), []
        for job in self._jobs:
            if job.is_done or now >= job.deadline:
                ended.append(self._finish(job))
            else:
                jobs.append(job)
        self._jobs = jobs
        return ended

    def _finish(self, job: _Job) -> Arrival:
        if not job.is_done:
            self._give_up(job)
            if job.store >= 0:
                self._paused_until[job.store] = time.monotonic() + PAUSE_S
            self._complain("a page store is too slow: what it has not done in time is computed")
            return failed(job.move)
        if job.error is not None:
            self._complain(f"a page store failed: {type(job.error).__name__}: {job.error}")
        return Arrival(job.move.ticket, sorted(job.lacking))

    def _give_up(self, job: _Job) -> None:
        self._stuck.append(job)
        with job.mutex:  # waits at most for the copy of a batch
            job.is_void = True
            if job.is_begun and not job.is_done:
                with contextlib.suppress(RuntimeError):  # there is no thread now
                    self._add_thread(job.writes)
                    job.is_replaced = True

    def reset(self) -> None:
        """See `headrace.memory.moving.Lane`."""
        for job in self._jobs:
            self._give_up(job)
        self._jobs.clear()
        self._ended.clear()

    def close(self) -> None:
        """See `headrace.memory.moving.Lane`. Waits a while for writes, so that a restart finds them."""
        deadline = time.monotonic() + GET_TIMEOUT_S
        while self._jobs and time.monotonic() < deadline:
            self.poll()
            time.sleep(0.01)
        self.reset()
        for writes, count in ((False, NUM_READERS), (True, NUM_WRITERS)):
            for _ in range(count):
                self._waiting[writes].put(None)
        for store in self._stores:
            store.close()

    # -- on threads ---------------------------------------------------------------------------------------------

    def _work(self, waiting: queue.SimpleQueue[_Job | None]) -> None:
        while (job := waiting.get()) is not None:
            kinds = {"": self._probe, "host": self._get, "storage": self._put}
            job.is_begun = True
            try:
                if not job.is_void:
                    kinds[job.move.target](job)
            except MemoryError as error:  # for the pages of a batch
                job.error, job.lacking = error, set(range(len(job.names)))
            finally:
                with job.mutex:
                    job.is_done = True
                self._wake()
            if job.is_replaced:
                return

    def _find_stores(self, job: _Job) -> Iterator[PageStore]:
        """Those that are not paused, each noted as the one that a job is waiting for."""
        for index, store in enumerate(self._stores):
            if time.monotonic() >= self._paused_until[index]:
                job.store = index
                yield store

    @staticmethod
    def _ask(job: _Job, call: Callable[..., list[bool]], indices: list[int], *buffers: list[memoryview]) -> set[int]:
        """Which of these pages of a job a store has, or took. None of them where it fails, in whatever way: other
        stores may do better."""
        try:
            has = call([job.names[index] for index in indices], *buffers)
            return {index for index, is_there in zip(indices, has, strict=True) if is_there}
        except Exception as error:  # whatever a plug-in raises
            job.error = error
            return set()

    def _probe(self, job: _Job) -> None:
        missing = list(range(len(job.names)))
        for store in self._find_stores(job):
            if missing:
                found = self._ask(job, store.exists, missing)
                missing = [index for index in missing if index not in found]
        job.lacking = set(missing)

    def _get(self, job: _Job) -> None:
        rows, pages = self._host.rows[job.move.group], job.move.target_pages
        job.lacking = set(range(len(pages)))
        for indices in self._batches(len(pages), rows.shape[1]):
            missing = indices
            for store in self._find_stores(job):
                if not missing or job.is_void:
                    break
                buffers = [np.empty(rows.shape[1], dtype=np.uint8) for _ in missing]
                got = self._ask(job, store.get, missing, [buffer.data for buffer in buffers])
                with job.mutex:
                    if job.is_void:
                        return
                    for index, buffer in zip(missing, buffers, strict=True):
                        if index in got:
                            rows[pages[index]].numpy()[:] = buffer
                            job.lacking.discard(index)
                missing = [index for index in missing if index in job.lacking]
            if missing:
                return  # later pages of a prefix are of no use without these

    def _put(self, job: _Job) -> None:
        rows, pages = self._host.rows[job.move.group], job.move.source_pages
        job.lacking = set(range(len(pages)))
        for indices in self._batches(len(pages), rows.shape[1]):
            with job.mutex:
                if job.is_void:
                    return
                buffers = [rows[pages[index]].numpy().copy() for index in indices]
            for store in self._find_stores(job):
                job.lacking -= self._ask(job, store.put, indices, [buffer.data for buffer in buffers])

    @staticmethod
    def _batches(count: int, width: int) -> list[list[int]]:
        size = max(1, BATCH_BYTES // max(1, width))
        return [list(range(begin, min(count, begin + size))) for begin in range(0, count, size)]

    def _complain(self, text: str) -> None:
        now = time.monotonic()
        if now - self._logged_at >= LOG_PERIOD_S:
            self._logged_at = now
            logger.warning("%s", text)

"""`MediaWorkers`: processes that decode and prepare media, a bounded queue before them, and a cache of what they made.
Torch-free; used by one event loop.

Refuses: fetching, and anything that is done to prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from headrace.base.errors import HeadraceError, MediaError, QueueFull
from headrace.base.spawn import spawn_process
from headrace.service.ending import ProcessWatch
from headrace.service.framing import LENGTH, frame, read_all
from headrace.service.media.wire import (
    Failed,
    FromWorker,
    Job,
    PreparedItem,
    Setup,
    decode_from_worker,
    pack_job,
)

T = TypeVar("T")
R = TypeVar("R")

logger = logging.getLogger(__name__)

MODULE = "headrace.service.media.worker"
MOST_WAITING = 512
MOST_WAITING_BYTES = 1 << 30
"""Data of all items that wait or are being prepared."""
START_S = 120.0
"""Seconds that a worker has for its first item beyond those of the item: it loads the model's processor."""


END_S = 1.0
"""Between the end of a process's line and its own."""
SILENCE_S, WATCH_S = 4.0, 0.5
"""A process that has an item and uses no processor time for so long hangs; how often that is looked at."""


class WorkerDied(MediaError):
    """The process ended while it prepared an item, which is probably why."""


class WorkerKilled(HeadraceError):
    """Somebody else ended it, or it was ended as it stood still. Another one may prepare the item."""

    status = 503
    kind = "media_unavailable"


class PreparedCache:
    """Prepared items by the content and options they were made of, least recently used first, within a byte budget."""

    def __init__(self, most_bytes: int):
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._items: OrderedDict[bytes, PreparedItem] = OrderedDict()

    def find(self, key: bytes) -> PreparedItem | None:
        """The item of a key, now the most recently used one."""
        item = self._items.get(key)
        if item is not None:
            self._items.move_to_end(key)
        return item

    def put(self, key: bytes, item: PreparedItem) -> None:
        """Keep an item, unless it alone exceeds the budget."""
        size = item.num_bytes
        if key in self._items or size > self._most_bytes:
            return
        self._items[key] = item
        self._num_bytes += size
        while self._num_bytes > self._most_bytes:
            _, oldest = self._items.popitem(last=False)
            self._num_bytes -= oldest.num_bytes


class _Worker:
    """One process. ``is_used``: it has prepared an item, so its processor is loaded."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket):
        self.process, self._line = process, line
        self._watch = ProcessWatch(process.pid)
        self._lock = threading.Lock()  # while the line is used
        self.is_used = False

    @classmethod
    def start(cls, setup: Setup) -> _Worker:
        """Blocks while the process is started."""
        process, line = spawn_process(MODULE, [])
        line.sendall(frame(setup))
        return cls(process, line)

    def run(self, job: Job) -> PreparedItem | Failed:
        """Blocks, without the GIL; raises `OSError` when the process ends, or after `end`."""
        with self._lock:
            for part in pack_job(job):
                self._line.sendall(part)
            (length,) = LENGTH.unpack(*read_all(self._line, [LENGTH.size]))
            answer: FromWorker = decode_from_worker(*read_all(self._line, [length]))
            item = answer if isinstance(answer, Failed) else answer.join(read_all(self._line, answer.sizes))
        self.is_used = True
        return item

    @property
    def is_alive(self) -> bool:
        """Of a worker that is idle, from which nothing comes but its end."""
        try:
            return self.process.poll() is None and bool(self._line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def start_watch(self) -> None:
        """Before `run`: it has used nothing while it was idle."""
        self._watch.note()

    @property
    def stands_still(self) -> bool:
        """Whether it has done nothing for too long since."""
        return self._watch.silent_s() > SILENCE_S

    def was_killed(self) -> bool:
        """Of one whose line has ended. Blocks until the process has, for a moment."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(END_S) in (-signal.SIGKILL, -signal.SIGTERM)
        return False

    def end(self) -> None:
        """End the process, and `run` with it; `clear_up` comes behind."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self.process.kill()

    def clear_up(self) -> None:
        """Leave no descriptor and no zombie; blocks for a moment."""
        with self._lock:
            self._line.close()
        self.process.wait()


@dataclass
class _Running:
    """A job that waits for a process or has one, and how many requests wait for its item."""

    task: asyncio.Task[PreparedItem] | None = None
    num_waiting: int = 0
    has_begun: bool = False


class MediaWorkers:
    """Processes start when they are first needed, or all at `start`. One that dies or hangs fails its item alone and
    is replaced."""

    def __init__(self, setup: Setup, count: int):
        self._setup, self._count = setup, count
        self._timeout_s = setup.media.media_timeout_s
        self._slots = asyncio.Semaphore(count)
        # Each waits for one process: the event loop neither sends nor receives what is large.
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="media")
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._num_waiting = self._num_bytes = 0
        self._running: dict[bytes, _Running] = {}
        self._cache = PreparedCache(setup.media.media_cache_mib << 20)
        self._is_closed = False

    async def start(self) -> None:
        """Start all processes now; they load the processor while others work."""
        missing = self._count - len(self._idle) - len(self._busy)
        self._idle += await asyncio.gather(*(self._call(_Worker.start, self._setup) for _ in range(missing)))

    async def prepare(self, job: Job) -> PreparedItem:
        """The item of a job; the same item that others wait for, or that is cached. A job that waits is dropped when
        nobody waits for it any more; one that has begun is finished. Raises `MediaError`, and `QueueFull` while too
        many wait."""
        key = job_key(job)
        found = self._cache.find(key)
        if found is not None:
            return found
        running = self._running.get(key)
        if running is None:
            self._check_room(job)
            running = self._running[key] = _Running()
            running.task = asyncio.create_task(self._prepare(job, key, running))
            running.task.add_done_callback(lambda task: self._forget(key, task))
        assert running.task is not None
        running.num_waiting += 1
        try:
            # Shielded: others may wait for the same item, and a worker's answer must be read to its end.
            return await asyncio.shield(running.task)
        except (MediaError, WorkerKilled) as error:  # it may name another request's part
            raise _renamed(error, job.param) from None
        finally:
            running.num_waiting -= 1
            if not running.num_waiting and not running.has_begun:
                running.task.cancel()
                self._running.pop(key, None)

    def close(self) -> None:
        """End all processes."""
        self._is_closed = True
        for running in self._running.values():
            if running.task is not None:
                running.task.cancel()
        for worker in [*self._idle, *self._busy]:
            self._end(worker)
        self._idle.clear()
        self._busy.clear()
        self._threads.shutdown(wait=False)

    async def _call(self, function: Callable[[T], R], argument: T) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, argument)

    def _end(self, worker: _Worker) -> None:
        worker.end()
        threading.Thread(target=worker.clear_up, name="media-end").start()

    def _check_room(self, job: Job) -> None:
        if self._num_waiting >= MOST_WAITING or self._num_bytes + len(job.data) > MOST_WAITING_BYTES:
            raise QueueFull("too many media are being prepared; try again", param=job.param, retry_after=1.0)

    def _forget(self, key: bytes, task: asyncio.Task[PreparedItem]) -> None:
        running = self._running.get(key)
        if running is not None and running.task is task:
            del self._running[key]
        if not task.cancelled():
            task.exception()  # taken: nobody may be left who does, and the event loop would log it as lost

    async def _prepare(self, job: Job, key: bytes, running: _Running) -> PreparedItem:
        self._num_waiting += 1
        self._num_bytes += len(job.data)
        try:
            async with self._slots:
                running.has_begun = True
                try:
                    item = await self._run(job)
                except (WorkerDied, WorkerKilled):  # what crashes a process, crashes the next
                    item = await self._run(job)
        finally:
            self._num_waiting -= 1
            self._num_bytes -= len(job.data)
        self._cache.put(key, item)
        return item

    async def _run(self, job: Job) -> PreparedItem:
        worker, is_sound = await self._take(), False
        try:
            async with asyncio.timeout(self._timeout_s + (0.0 if worker.is_used else START_S)):
                answer = await self._watched(worker, job)
            is_sound = True
        except TimeoutError:
            raise MediaError(
                f"{job.param}: preparing it took more than {self._timeout_s:g} seconds", param=job.param
            ) from None
        except OSError:
            logger.warning("a media worker has died")
            if await self._call(_Worker.was_killed, worker):
                raise WorkerKilled(
                    f"{job.param} could not be read: the process that decoded it was killed; try again",
                    param=job.param, retry_after=1.0
                ) from None
            raise WorkerDied(
                f"{job.param} could not be read: the process that decoded it ended", param=job.param
            ) from None
        finally:
            self._busy.discard(worker)
            if is_sound and not self._is_closed:
                self._idle.append(worker)
            else:  # what it would answer belongs to nobody
                self._end(worker)
        if isinstance(answer, Failed):
            raise answer.error.to_error()
        return answer

    async def _watched(self, worker: _Worker, job: Job) -> PreparedItem | Failed:
        """What it answers; ends a process that stands still. Raises `OSError`."""
        worker.start_watch()
        call = asyncio.ensure_future(self._call(worker.run, job))
        try:
            while not (await asyncio.wait([call], timeout=WATCH_S))[0]:
                if worker.stands_still:
                    logger.warning("a media worker has stood still for %g s, and is ended", SILENCE_S)
                    worker.end()
            return call.result()
        finally:
            call.cancel()

    async def _take(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive:
                break
            self._end(worker)
        else:
            worker = await self._call(_Worker.start, self._setup)
        self._busy.add(worker)
        return worker


def job_key(job: Job) -> bytes:
    """What a prepared item depends on, for one model and one salt."""
    options = ",".join(f"{name}={job.options[name]}" for name in sorted(job.options))
    form = "base64" if job.is_base64 else "file"
    return b"|".join((job.kind.encode(), form.encode(), job.sha256, options.encode(), job.salt.encode()))


def _renamed(error: MediaError | WorkerKilled, param: str) -> HeadraceError:
    """The error with the name of this request's part in place of the one that was read first."""
    message = error.message
    if error.param is not None and message.startswith(error.param):
        message = param + message[len(error.param) :]
    return error.with_message(message, param=param)

"""`Workers`: the workers of one engine, as rank 0 sees them: their start, commands to all of them, and their death.

A thread watches their sockets, processes and heartbeats. A worker that dies, fails or stops ends the engine process at
once and from that thread, because the engine's own thread may wait in a collective for a rank that will never come.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.base.config import EngineConfig
from headrace.base.errors import EngineBroken, HeadraceError, ModelError
from headrace.base.messages import ErrorInfo, Starting, encode
from headrace.base.spawn import describe_exit
from headrace.base.step import Arrival
from headrace.service.ending import end_with
from headrace.service.executor import Progress
from headrace.service.framing import READ_BYTES, Frames, frame
from headrace.service.ranks.commands import (
    Assignment,
    Close,
    Command,
    Done,
    Failed,
    FromWorker,
    Moved,
    RankReady,
    decode_reply,
)
from headrace.service.ranks.heartbeats import BEAT_S, SILENCE_S, START_SILENCE_S, Silence
from headrace.service.ranks.launch import CLOSE_S, LOOPBACK, Host, Launcher, WorkerHandle

logger = logging.getLogger(__name__)

REPORT_S = 10.0
"""How often the log says which ranks a start waits for."""
LAST_WORDS_S = 1.0
"""How long a dying worker has to disappear, and a failed start waits for a worker's own reason."""


@dataclass
class _Worker:
    host: Host
    handle: WorkerHandle
    stage: str = "starting its process"
    since: float = field(default_factory=time.monotonic)
    is_ready: bool = False
    failure: HeadraceError | None = None
    silence: Silence = field(default_factory=lambda: Silence(BEAT_S, START_SILENCE_S))
    answers: queue.SimpleQueue[ErrorInfo | None] = field(default_factory=queue.SimpleQueue)
    frames: Frames[FromWorker] = field(default_factory=lambda: Frames(decode_reply))

    def enter(self, stage: str) -> None:
        if stage != self.stage:
            self.stage, self.since = stage, time.monotonic()


class Workers:
    """Ranks 1 to ``size`` - 1. ``on_failure`` is called once, from the watching thread, with the typed error of the
    first one that failed; by default it ends this process. Close it from the engine's thread."""

    def __init__(
        self, config: EngineConfig, size: int, launcher: Launcher, *,
        on_failure: Callable[[HeadraceError], Any] = end_with
    ):
        self.failure: HeadraceError | None = None
        self.size, self._on_failure = size, on_failure
        self._stage, self._since = "importing", time.monotonic()  # of rank 0
        self._is_serving, self._doing = False, "idle"
        self._is_closing = threading.Event()
        self._arrived: queue.SimpleQueue[list[Arrival]] = queue.SimpleQueue()
        self._changed = threading.Event()  # something changed that `await_ready` waits for
        self._watcher = threading.Thread(target=self._watch, name="worker-watch", daemon=True)
        self._hosts = launcher.launch(config, size)
        self._workers = [_Worker(host, handle) for host in self._hosts for handle in host.workers]
        self._watcher.start()

    @property
    def address(self) -> str:
        """Of this machine, as others know it."""
        return next((host.address for host in self._hosts if host.address is not None), LOOPBACK)

    @property
    def num_hosts(self) -> int:
        """Machines that have ranks, with this one."""
        return 1 + sum(host.address is not None for host in self._hosts)

    def assign(self, port: int) -> None:
        """Send each worker its assignment; ``port`` is that of the store where ranks meet."""
        for worker in self._workers:
            handle, host = worker.handle, worker.host
            address = host.address or self.address
            assignment = Assignment(
                host.config, handle.rank, self.size, handle.place, address, port, self.num_hosts
            )
            with contextlib.suppress(OSError):  # it is dead; the watcher says so
                handle.line.sendall(frame(assignment))

    def note_progress(self, progress: Progress) -> Progress:
        """A `Progress` that also tells the log what rank 0 does."""

        def report(stage: str, fraction: float) -> None:
            if stage != self._stage:
                self._stage, self._since = stage, time.monotonic()
            progress(stage, fraction)

        return report

    def await_ready(self) -> None:
        """Wait until all workers have built their executors; raises the typed error of one that could not."""
        self._stage, self._since = "ready", time.monotonic()
        while not all(worker.is_ready for worker in self._workers):
            self._check()
            self._changed.wait(BEAT_S)
            self._changed.clear()
        self._check()
        self._is_serving = True

    def explain(self) -> None:
        """Called when rank 0 failed to start or to compute: raises the error of a worker that failed before, if there
        is one. A broken connection to a dead rank is only a consequence."""
        deadline = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < deadline:
            self._check()
            time.sleep(BEAT_S / 4)

    def send(self, command: Command) -> None:
        """Have all workers carry out a command; returns at once. Raises `EngineBroken` when one is dead."""
        self._check()
        self._doing = f"carrying out {type(command).__name__}"
        message = encode(command)
        for host in self._hosts:
            host.send(message, self._check)

    def await_answers(self) -> list[ErrorInfo | None]:
        """The answers of all workers to the last call, None for success; raises `EngineBroken` when one dies."""
        answers: list[ErrorInfo | None] = []
        for worker in self._workers:
            while len(answers) < worker.handle.rank:
                self._check()
                with contextlib.suppress(queue.Empty):
                    answers.append(worker.answers.get(timeout=BEAT_S))
        return answers

    def take_arrived(self) -> list[Arrival]:
        """Page moves that ended on some worker since; each is reported by every one of them."""
        arrived: list[Arrival] = []
        while not self._arrived.empty():
            arrived += self._arrived.get()
        return arrived

    def close(self) -> None:
        """End all workers, by force if they take long; idempotent."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        if self._is_serving and self.failure is None:
            for host in self._hosts:
                with contextlib.suppress(HeadraceError):  # of a worker that does not read: it is killed
                    host.send(encode(Close()), lambda: None, CLOSE_S)
            deadline = time.monotonic() + CLOSE_S
            for worker in self._workers:
                worker.handle.wait(max(0.0, deadline - time.monotonic()))
        for worker in self._workers:
            worker.handle.kill()
            worker.handle.wait(CLOSE_S)
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join()
        for host in self._hosts:
            host.close()

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _watch(self) -> None:
        poll = select.poll()
        by_line = {worker.handle.line.fileno(): worker for worker in self._workers}
        for line in by_line:
            poll.register(line, select.POLLIN)
        looked_at = reported_at = time.monotonic()
        while not self._is_closing.is_set():
            ended = [by_line[line] for line, _ in poll.poll(BEAT_S * 1e3) if not self._read(by_line[line])]
            now = time.monotonic()
            if now - looked_at >= BEAT_S:
                looked_at = now
                ended += [worker for worker in self._workers if not worker.handle.is_alive()]
                ended += [worker for worker in self._workers if self._is_silent(worker)]
            if ended and not self._is_closing.is_set():
                self._fail(ended[0])
                return
            if not self._is_serving and now - reported_at >= REPORT_S:
                reported_at = now
                self._report(now)

    def _read(self, worker: _Worker) -> bool:
        """Take what a worker sent; False when its end is closed, or it has failed."""
        try:
            data = worker.handle.line.recv(READ_BYTES)
        except OSError:  # it was reset, or over a network timed out
            data = b""
        for reply in worker.frames.feed(data):
            match reply:
                case Starting(stage, _):
                    worker.enter(stage)
                case RankReady():
                    worker.is_ready, worker.silence.limit_s = True, SILENCE_S
                    worker.enter("ready")
                    self._changed.set()
                case Done(error):
                    worker.answers.put(error)
                case Moved(arrived):
                    self._arrived.put(arrived)
                case Failed(error):
                    worker.failure = error.to_error()
        return bool(data) and worker.failure is None

    def _is_silent(self, worker: _Worker) -> bool:
        if not worker.silence.note(worker.handle.beats):
            return False
        worker.failure = self._describe_loss(worker, "gives no sign of life")
        worker.handle.kill()
        return True

    def _fail(self, worker: _Worker) -> None:
        if worker.failure is None and not worker.handle.is_alive():
            self._read_rest(worker)
        error = worker.failure or self._describe_death(worker)
        if not isinstance(error, EngineBroken) and self._is_serving:
            error = self._broken(f"{worker.handle.name} failed: {error}")
        self.failure = error
        self._changed.set()
        self._on_failure(error)

    def _read_rest(self, worker: _Worker) -> None:
        poll = select.poll()
        poll.register(worker.handle.line, select.POLLIN)
        while poll.poll(0) and self._read(worker):
            pass

    def _describe_death(self, worker: _Worker) -> HeadraceError:
        code = worker.handle.wait(LAST_WORDS_S)
        if code is None:
            how = "closed its line" if worker.handle.is_alive() else "was lost with its host"
        else:
            how = describe_exit(code)
        hint = " (out of memory?)" if code == -signal.SIGKILL and not self._is_serving else ""
        return self._describe_loss(worker, f"{how}{hint}")

    def _describe_loss(self, worker: _Worker, how: str) -> HeadraceError:
        if self._is_serving:
            return self._broken(f"{worker.handle.name} {how} while {self._doing}")
        return ModelError(f"{worker.handle.name} {how} while {worker.stage}; the engine cannot start without it")

    def _broken(self, what: str) -> EngineBroken:
        return EngineBroken(f"{what}; the engine restarts", retry_after=1.0)

    def _report(self, now: float) -> None:
        states = [("rank 0", self._stage, self._since)]
        states += [(worker.handle.name, worker.stage, worker.since) for worker in self._workers]
        texts = [f"{name}: {stage} for {now - since:.0f} s" for name, stage, since in states]
        logger.info("starting: %s", ", ".join(texts))

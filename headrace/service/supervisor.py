"""`Supervisor`: keeps one engine process alive. Spawns it, carries its messages, notices its death, starts it again.

Refuses: knowing requests; the client decides what a death means for them. Torch-free; belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from headrace.base.admin import ADMIN_CALLS
from headrace.base.config import EngineConfig
from headrace.base.errors import EngineUnavailable, HeadraceError
from headrace.base.messages import Call, Fatal, FromEngine, Ready, Reply, ToEngine
from headrace.base.spawn import describe_exit
from headrace.service.spawn import END_SIGNAL, SpareDescriptors, SpawnedEngine, spawn_engine
from headrace.service.transport import ClientChannel

logger = logging.getLogger(__name__)

RESTART_WINDOW_S = 600.0
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 10.0
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS})
"""Errors of starting a process that pass by themselves."""
TERMINATE_S = 5.0
"""Grace period before a process is killed, and time that a killed one gets to disappear."""

PING = Call(-1, "ping")
LAST_WORDS_S = 1.0
"""How long the last messages of a process that has ended are waited for."""

STALL_TIMEOUT_S = 300.0
STALL_TICKS = 4
"""Pings within the shortest time that an engine may be silent."""
STALL_FACTOR = 10.0
"""The silence limit in units of the engine's own bound for one step (the answer to a ping): a margin for contexts that
grow and for other programs on the same cores."""
LEAST_STALL_S = 20.0
LEAST_COMPILING_STALL_S = 60.0
"""Lower bounds of the silence limit, on a CPU and on other devices, where kernels may be compiled within a step."""
LEAST_LOADING_STALL_S = 120.0
"""The same while it loads: importing a library from a slow disk may hold the interpreter for long."""


class SilenceWatch:
    """Decides when an engine has hung. The limit is `STALL_FACTOR` times its step bound, between ``_least_s`` and
    ``most_s``; it is ``most_s`` before a step was measured and during an admin call. An engine that loads reports all
    the time, however long it takes. Counts the ticks of its owner instead of reading a clock: if this process is
    suspended, the time does not count against the engine."""

    def __init__(self, most_s: float):
        self._most_s = most_s
        self._least_s = LEAST_COMPILING_STALL_S
        self._step_s = math.inf
        self._calls: set[int] = set()
        self._is_loaded = self._is_heard = False
        self._silent_s = 0.0

    @property
    def is_loaded(self) -> bool:
        """Whether the engine has said that it is ready."""
        return self._is_loaded

    @property
    def is_silent(self) -> bool:
        """Whether nothing was heard of a loaded engine in the last interval between two ticks or longer."""
        return self._is_loaded and self._silent_s > 0

    @property
    def limit_s(self) -> float:
        """Seconds that the engine may be silent now."""
        if not self._is_loaded:
            return max(self._most_s, LEAST_LOADING_STALL_S)
        limit = math.inf if self._calls else max(self._least_s, STALL_FACTOR * self._step_s)
        return min(self._most_s, limit)

    def note_sent(self, message: ToEngine) -> None:
        """Note a message to the engine. Admin calls move memory or read weights, which takes longer than a step."""
        if isinstance(message, Call) and message.method in ADMIN_CALLS:
            self._calls.add(message.call_id)

    def note_heard(self, message: FromEngine) -> None:
        """Note a message of the engine; any message is a sign of life."""
        self._is_heard, self._silent_s = True, 0.0
        if isinstance(message, Ready):
            self._is_loaded = True
            self._least_s = LEAST_STALL_S if message.facts.device == "cpu" else LEAST_COMPILING_STALL_S
        elif isinstance(message, Reply):
            self._calls.discard(message.call_id)
            if message.call_id == PING.call_id and isinstance(message.result, float):
                self._step_s = message.result

    def tick(self, seconds: float) -> bool:
        """Advance by ``seconds``; returns whether the engine has been silent for too long."""
        # An interval in which anything was heard counts as nothing, so the limit may be exceeded by one tick.
        if not self._is_heard:
            self._silent_s += seconds
        self._is_heard = False
        return self._silent_s >= self.limit_s


class Listener(Protocol):
    """Receives what a supervisor reports. Both are called in the event loop and must not raise."""

    def on_message(self, message: FromEngine) -> None:
        """A message of the living engine."""

    def on_exit(self, error: HeadraceError, *, is_final: bool) -> None:
        """The engine process has ended without being asked to. ``is_final``: it will not be started again."""


class EngineProcess:
    """One run of the engine process and the channel to it. A thread waits for the exit code (`Popen.wait` blocks) and
    passes it to the event loop. Raises `OSError` where no thread can be started."""

    def __init__(self, spawned: SpawnedEngine, channel: ClientChannel):
        self.channel = channel
        # Set in the event loop alone, through `_tell`: futures of asyncio are not thread-safe.
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._process = spawned.process
        watch = threading.Thread(
            target=self._watch, args=(asyncio.get_running_loop(),), name="engine-watch", daemon=True
        )
        try:
            watch.start()
        except RuntimeError as error:  # Python's word for what the system calls EAGAIN
            raise OSError(errno.EAGAIN, str(error)) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop is closed: there is no listener any more
            loop.call_soon_threadsafe(self._tell, code)

    def _tell(self, code: int) -> None:
        if not self.exit_code.done():
            self.exit_code.set_result(code)

    async def kill(self) -> int:
        """Send SIGKILL and wait at most `TERMINATE_S`; returns the exit code. A process stuck in the kernel (a driver
        call) may not end even then: it is left behind, and -SIGKILL is returned."""
        self._process.kill()
        await asyncio.wait([self.exit_code], timeout=TERMINATE_S)
        return self.exit_code.result() if self.exit_code.done() else -signal.SIGKILL

    def kill_soon(self) -> None:
        """Send SIGKILL without waiting for its effect."""
        self._process.kill()

    def end_soon(self) -> None:
        """Terminate without waiting for it; from any thread."""
        self._process.send_signal(END_SIGNAL)

    async def end(self, grace_s: float = TERMINATE_S) -> None:
        """Terminate, and kill after ``grace_s``; returns when the process is gone and the channel is closed."""
        with contextlib.suppress(EngineUnavailable):  # not connected yet, or gone; the signal reaches it too
            self.channel.send(Call(0, "shutdown"))
        self.end_soon()  # besides the message: before `Ready` nobody reads messages
        try:
            # Shielded: a timeout or a cancellation must not cancel the future that `_tell` sets.
            await asyncio.wait_for(asyncio.shield(self.exit_code), grace_s)
        except TimeoutError:
            logger.warning("the engine process did not end within %.0f s and is killed", grace_s)
            await self.kill()
        finally:
            self.channel.close()


class Supervisor:
    """Starts an engine process and restarts it when it dies: at once the first time, then with exponential backoff, at
    most ``max_restarts`` times in ten minutes. If the first process dies before it is ready there is no restart: the
    configuration is wrong, and would be wrong again. A process that sends nothing for as long as `SilenceWatch` allows
    (once it is ready at most ``stall_timeout_s`` seconds; 0: no limit) is killed. ``engine``: a process that was
    spawned ahead of time for the same configuration, used for the first run."""

    def __init__(
        self, config: EngineConfig, listener: Listener, *, max_restarts: int, stall_timeout_s: float = STALL_TIMEOUT_S,
        spawn: Callable[[EngineConfig], SpawnedEngine] = spawn_engine, engine: SpawnedEngine | None = None,
    ):
        self.config = config
        """The configuration for the next start. May be replaced while the engine runs, as after new weights."""
        self._listener = listener
        self._spawn = spawn
        self.max_restarts = max_restarts
        self._stall_timeout_s = stall_timeout_s
        self._spawned = engine
        self._process: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._restarts: deque[float] = deque()
        self._was_ready = self._is_ending = False
        self._silence = SilenceWatch(stall_timeout_s)
        self._last_words: HeadraceError | None = None
        self._spare = SpareDescriptors()

    @property
    def pid(self) -> int | None:
        """Process id of the engine, None when there is none."""
        return self._process.pid if self._process else None

    @property
    def num_restarts(self) -> int:
        """Restarts within the last ten minutes."""
        return len(self._restarts)

    @property
    def is_silent(self) -> bool:
        """Whether a loaded engine has sent nothing for a while, although it was asked to: it may have hung."""
        return self._silence.is_silent

    def start(self) -> None:
        """Spawn the engine in a task of the running event loop; the listener is told of success and failure."""
        assert self._task is None, "a supervisor starts once"
        self._task = asyncio.create_task(self._run(), name="engine-supervisor")
        self._task.add_done_callback(self._report_own_failure)

    def send(self, message: ToEngine) -> None:
        """Pass a message on; raises `EngineUnavailable` when there is no engine to take it."""
        if self._process is None:
            raise EngineUnavailable("the engine is not running", retry_after=1.0)
        self._silence.note_sent(message)
        self._process.channel.send(message)

    def replace_process(self, reason: HeadraceError) -> None:
        """Kill the engine process, with ``reason`` for the listener; it is started again, as after a crash."""
        if self._process is not None:
            self._last_words = reason
            self._process.kill_soon()

    def end_soon(self) -> None:
        """Have the engine process end, without waiting for it or starting another; from any thread, also when the event
        loop runs no more."""
        self._is_ending = True
        if self._process is not None:
            self._process.end_soon()

    async def close(self) -> None:
        """End the engine process. The listener is not called any more."""
        if self._task is not None:  # first, or the end of the process would be taken for a crash and restarted
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._process is not None:
            await self._process.end()
            self._process = None
        self._spare.release()

    async def _run(self) -> None:
        while True:
            code = await self._live()
            if self._is_ending:
                return
            pause = self._plan_restart()
            error = (
                self._last_words
                or EngineUnavailable(f"the engine process {describe_exit(code)}", retry_after=5.0)
            )
            if self._was_ready:  # else the caller of `wait_ready` hears it
                logger.error(
                    "the process of %s ended (exit code %s): %s; %s", self.config.replica_name, code, error,
                    "no restart" if pause is None else f"restart in {pause:.1f} s"
                )
            self._listener.on_exit(error, is_final=pause is None)
            if pause is None:
                return
            await asyncio.sleep(pause)

    def _report_own_failure(self, task: asyncio.Task[None]) -> None:
        """The supervisor itself failed, for example because no process can be spawned; the listener must know."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not isinstance(error, HeadraceError):  # our own errors are complete messages, which the listener reports
            logger.error("the engine cannot be supervised", exc_info=error)
            error = EngineUnavailable(f"the engine cannot be started: {error}")
        self._listener.on_exit(error, is_final=True)

    async def _live(self) -> int:
        """Run one engine process, from spawning to its last message; returns the exit code."""
        self._last_words, self._silence = None, SilenceWatch(self._stall_timeout_s)
        self._process = process = await self._open_process()
        channel = process.channel
        silence = asyncio.create_task(self._await_silence(channel), name="engine-silence")
        try:
            ends: list[asyncio.Future[Any]] = [process.exit_code, channel.failure, silence]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if channel.failure.done():  # this life cannot be served any further
                logger.error(
                    "messages of %s cannot be taken; it is killed", self.config.replica_name,
                    exc_info=channel.failure.result()
                )
            elif silence.done():
                stage = "" if self._silence.is_loaded else " while loading"
                words = f"the engine gave no sign of life{stage} for {self._silence.limit_s:g} s and was killed"
                self._last_words = EngineUnavailable(words, retry_after=5.0)
            code = process.exit_code.result() if process.exit_code.done() else await process.kill()
        finally:
            silence.cancel()
            await asyncio.wait([silence])
        # The exit code comes through a thread and may be known before the last bytes were read, such as a `Fatal`.
        await asyncio.wait([channel.ended], timeout=LAST_WORDS_S)
        self._process = None
        channel.close()
        return code

    async def _open_process(self) -> EngineProcess:
        """Start a process. Once there was one that worked, a shortage of descriptors, memory or processes is waited
        for: it passes, and is no crash. Raises `OSError` for other failures."""
        pause_s = FIRST_BACKOFF_S
        while True:
            self._spare.release()
            try:
                spawned, self._spawned = self._spawned or self._spawn(self.config), None
                with contextlib.ExitStack() as undo:
                    undo.callback(spawned.end)
                    channel = await ClientChannel.open(spawned.line, self._take)
                    undo.callback(channel.close)
                    process = EngineProcess(spawned, channel)
                    undo.pop_all()
                    return process
            except OSError as error:
                if not self._was_ready or error.errno not in SHORTAGES:
                    raise
                logger.warning("no engine process can be started: %s; next try in %.1f s", error, pause_s)
            finally:
                self._spare.acquire()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_BACKOFF_S)

    async def _await_silence(self, channel: ClientChannel) -> None:
        """Return when the engine has been silent for too long."""
        if not self._stall_timeout_s:
            await asyncio.Event().wait()  # for ever
        tick_s = min(self._stall_timeout_s, LEAST_STALL_S) / STALL_TICKS
        while True:
            await asyncio.sleep(tick_s)
            if self._silence.tick(tick_s):
                return
            if self._silence.is_loaded:
                self._ping(channel)

    def _ping(self, channel: ClientChannel) -> None:
        with contextlib.suppress(EngineUnavailable):  # it is just ending; its exit is noticed elsewhere
            channel.send(PING)

    def _take(self, message: FromEngine) -> None:
        self._silence.note_heard(message)
        if isinstance(message, Reply) and message.call_id == PING.call_id:
            return
        if isinstance(message, Fatal):  # a better reason for `on_exit` than the exit code that follows
            self._last_words = message.error.to_error()
        elif isinstance(message, Ready):
            self._was_ready = True
            if self._process is not None:
                self._ping(self._process.channel)  # before any request, so that a limit is known for the first one
        self._listener.on_message(message)

    def _plan_restart(self) -> float | None:
        """Seconds until the next start, None for no restart. Pauses: 0, 0.5, 1, 2 … up to `LONGEST_BACKOFF_S`."""
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        if not self._was_ready or len(self._restarts) >= self.max_restarts:
            return None
        self._restarts.append(now)
        num_before = len(self._restarts) - 1
        return min(FIRST_BACKOFF_S * 2 ** (num_before - 1), LONGEST_BACKOFF_S) if num_before else 0.0

"""The engine process: ``python -m headrace.service.process``, started by the supervisor with a socket as its standard
input.

Owns an `Engine` and the loop between it and its socket. It ends on `END_SIGNAL`, on a ``shutdown`` call, when a step
raises, and when its parent dies. One thread owns the engine and reads the socket; the others are the parent watch and,
when the client is slow, the writer of the channel.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any

from headrace.base import env
from headrace.base.config import EngineConfig
from headrace.base.errors import ConfigError, HeadraceError, ModelError, PluginError
from headrace.base.media import MediaItem
from headrace.base.media_facts import make_silence
from headrace.base.messages import (
    Abort,
    Decline,
    EngineRequest,
    ErrorInfo,
    Fatal,
    Outputs,
    Ready,
    Starting,
    ToEngine,
)
from headrace.base.pooling import PoolingSpec
from headrace.base.registry import load_target
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.base.spawn import continue_when_orphaned
from headrace.base.token_ids import pack_ids
from headrace.kernels.early import start_early
from headrace.service.bytecode import keep_bytecode
from headrace.service.control import Control
from headrace.service.ending import EXIT, die_with_parent, leave
from headrace.service.engine import Engine
from headrace.service.executor import Progress
from headrace.service.gathering import Gathering
from headrace.service.spawn import END_SIGNAL, ENGINE_BUILDER
from headrace.service.stages import Stages
from headrace.service.transport import EngineChannel, engine_line

logger = logging.getLogger(__name__)

IDLE_WAIT_MS = 250
IDLE_PAUSE_MS = 5
"""Wait between two calls of `Executor.use_idle_moment`, so that a request that arrives meanwhile goes first."""
PAUSED_WAIT_MS = 20
"""Wait per round while paused with requests: bounds how late a deadline is noticed, without a busy loop."""
STATS_PERIOD_S = 0.25
START_UP_TOKENS = 16
"""Prompt length of the warm-up request. The time of a one-token step would be a poor bound for a full step, see
`headrace.service.engine.StepTimes`."""

GC_THRESHOLDS = (20_000, 20, 50)
"""Arguments of `gc.set_threshold` in the engine process. Hardly any of its garbage is in cycles, and a collection walks
the prompts of all requests: some 30 ms for 500 prompts of 2,000 tokens, often, with the interpreter's thresholds."""

Builder = Callable[[EngineConfig, Progress], Engine]


class EngineLoop:
    """Takes messages in, steps the engine, sends each step's outputs as one message. Blocks on the socket when idle."""

    def __init__(self, engine: Engine, channel: EngineChannel):
        self._engine = engine
        self._channel = channel
        self._control = Control(engine, self.stop)
        self._is_stopping = False
        self._stats_sent_at = 0.0
        self._has_idle_work = True
        self._gathering = Gathering()
        if engine.pace.waker is not None:
            channel.wake_on(engine.pace.waker)

    def stop(self) -> None:
        """Leave `run` after the current step; safe to call from a signal handler."""
        self._is_stopping = True

    def run(self) -> None:
        """Serve until stopped. An exception from here means that the engine cannot be trusted any more."""
        while not self._is_stopping and self._channel.is_open:
            # Read before messages come in: a step that follows an idle moment starts a new batch.
            is_first = not self._engine.has_work
            has_messages = self._take_messages(self._patience_ms())
            if self._gathering.is_due and self._engine.has_work:
                is_first = self._gather()
            if self._engine.has_work:
                self._step(is_first=is_first)
            elif not has_messages:
                self._engine.poll_coordinators()
                self._has_idle_work = self._engine.executor.use_idle_moment()
            for reply in self._control.poll():
                self._channel.send(reply)
            self._engine.pace.keep_pace()

    def _patience_ms(self) -> int:
        if not self._engine.has_work:
            return IDLE_PAUSE_MS if self._has_idle_work or self._control.is_waiting else IDLE_WAIT_MS
        return PAUSED_WAIT_MS if self._engine.is_held else 0

    def _gather(self) -> bool:
        """Wait for further requests before the step, if nothing runs; returns whether nothing runs."""
        stats, gathering = self._engine.stats(), self._gathering
        if not stats.num_running:
            gathering.begin()
            while (wait_ms := gathering.patience_ms(self._engine.stats().num_queued)) and self._take_messages(wait_ms):
                pass
        gathering.end()
        return not stats.num_running

    def _step(self, *, is_first: bool) -> None:
        began = time.monotonic()
        self._engine.launch()
        if self._engine.waits_for_device:  # what is read now costs the device no time; `step` launches what it allows
            self._take_messages(0)
        outputs = self._engine.step()
        now = time.monotonic()
        if is_first:
            self._gathering.note_first_step(now - began)
        if num_ended := sum(output.finish is not None for output in outputs):
            # Before the outputs are sent: what is queued now cannot be a reaction to these ends, so `Gathering` counts
            # only later arrivals as followers.
            self._take_messages(0)
            self._gathering.note_end(num_ended, self._engine.stats().num_queued)
        is_idle = not self._engine.has_work
        stats = self._engine.stats() if is_idle or now - self._stats_sent_at >= STATS_PERIOD_S else None
        if stats is not None:
            self._stats_sent_at = now
        if outputs or stats is not None:
            self._channel.send(Outputs(outputs, stats))

    def _take_messages(self, wait_ms: int) -> bool:
        """Receive and apply messages, waiting ``wait_ms`` for the first: some, or all that have arrived while the
        device is busy. Returns whether there were any."""
        received = self._channel.receive(wait_ms)
        has_messages = bool(received)
        while received:
            for message in received:
                self._take(message)
            received = self._channel.receive(0) if self._engine.waits_for_device else []
        return has_messages

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, EngineRequest):
            self._engine.submit(message)
        elif isinstance(message, Abort):
            self._engine.abort(message.request_id, message.reason)
        elif isinstance(message, Decline):
            self._engine.decline(message.rooms, message.reason)
        elif (reply := self._control.answer(message)) is not None:
            self._channel.send(reply)


def produce_token(engine: Engine) -> None:
    """Warm-up: run one request of `START_UP_TOKENS` tokens for one output token (a pooling model: one result). Shows
    that the engine works and gives the first measurement of a step. Raises `ModelError` when no token comes."""
    facts = engine.executor.facts
    prompt, media = [0] * max(1, min(START_UP_TOKENS, facts.max_model_len - 1)), list[MediaItem]()
    if facts.media is not None and facts.media.speech is not None:
        media = [make_silence(facts.media)]
        prompt = [facts.media.token_ids["audio"]] * media[0].place.num_tokens + [0]
    pooling = PoolingSpec() if facts.pooling is not None else None
    engine.submit(EngineRequest(
        "start-up", pack_ids(prompt), SamplingSpec(), StopSpec(max_tokens=1), pooling=pooling, media=media
    ))
    finish = None
    while engine.has_work:
        for output in engine.step():
            finish = output.finish or finish
    if finish is None:
        raise ModelError("the engine could not produce a first token: no output")
    if finish.error is not None:
        raise ModelError(f"the engine could not produce a first token: {finish.error.message}")
    engine.reset_prefix_cache()  # the warm-up prompt must not stay there


def _leave_before_serving(_: int, __: FrameType | None) -> None:
    EXIT.on_stop()
    leave(0)  # nothing has been served yet, and a half-done import or load cannot be waited for


def _give_memory_back() -> None:
    """Return heap memory that loading freed to the system (glibc only): about 45 MB after a small model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _start(config: EngineConfig, builder: Future[Builder], channel: EngineChannel, began: float) -> EngineLoop:
    stages = Stages(lambda stage, fraction: channel.send(Starting(stage, fraction)), began)
    stages("importing", 0.0)
    with stages.repeated():
        engine = builder.result()(config, stages)
        stages("producing a first token", 1.0)
        produce_token(engine)
    _give_memory_back()
    gc.freeze()  # without a collection before: it would take longer than what it frees is worth
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()
    loop = EngineLoop(engine, channel)
    signal.signal(END_SIGNAL, lambda *_: loop.stop())
    logger.info(stages.describe())
    if engine.executor.fallen_back:
        logger.warning("slower than this GPU is; fallen back: %s", "; ".join(engine.executor.fallen_back))
    channel.send(Ready(engine.executor.facts, engine.executor.memory))
    return loop


def _open_channel() -> tuple[EngineChannel, EngineConfig]:
    try:
        channel = EngineChannel(engine_line())
        config = channel.read_config()
        if config is not None:
            return channel, config
    except ConfigError as error:  # started by hand
        logger.error("%s", error)
    leave(1)  # a normal exit would wait for the import thread, for seconds


def _tell(channel: EngineChannel, error: Exception) -> None:
    channel.send(Fatal(ErrorInfo.of(error)))
    channel.flush()


def _log_options(name: str) -> dict[str, Any]:
    return {"level": env.log_level().upper(), "format": f"%(asctime)s %(levelname)s {name}: %(message)s"}


def main(argv: list[str] | None = None) -> int:
    """Run the engine until the end; returns the exit code."""
    parser = argparse.ArgumentParser(prog="headrace.service.process", description=__doc__)
    parser.add_argument("--builder", default=ENGINE_BUILDER, help="module:function that builds the engine")
    parser.add_argument("--imports", help="module to import meanwhile; what fails is raised when the builder needs it")
    parser.add_argument("--began", type=float, default=time.monotonic(), help="when the start did, for its log")
    arguments = parser.parse_args(argv)
    logging.basicConfig(**_log_options("engine"))
    for number in (signal.SIGINT, signal.SIGTERM):
        # Ctrl-C and service managers reach the whole group; the parent decides when we end
        signal.signal(number, signal.SIG_IGN)
    signal.signal(END_SIGNAL, _leave_before_serving)
    continue_when_orphaned()
    parent = os.getppid()
    gc.disable()  # while starting, which makes many objects and hardly any garbage
    # until the first token: whatever thread imports, and packages that a kernel or a family needs later
    kept = ExitStack()
    kept.enter_context(keep_bytecode())
    # takes seconds; the configuration comes meanwhile
    importing = ThreadPoolExecutor(1, "engine-import")
    builder: Future[Builder] = importing.submit(load_target, arguments.builder)
    if arguments.imports:
        start_early()
        importing.submit(importlib.import_module, arguments.imports)
    channel, config = _open_channel()
    die_with_parent(channel.await_end, parent)
    EXIT.on_error = partial(_tell, channel)
    if config.parallel.data_parallel_size > 1:
        logging.basicConfig(force=True, **_log_options(f"engine {config.replica}"))
    try:
        with kept:
            loop = _start(config, builder, channel, arguments.began)
        loop.run()
        EXIT.on_stop()
    except Exception as error:  # process main: tell the client why, then end
        if isinstance(error, HeadraceError) and not isinstance(error, PluginError):  # the client reports it to the user
            logger.debug("the engine ends: %s", error, exc_info=error)
        else:
            logger.error("the engine ends: %s", error, exc_info=error)
        _tell(channel, error)
        return 1
    finally:
        channel.flush()
    return 0


if __name__ == "__main__":
    leave(main())

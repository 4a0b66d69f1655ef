"""A worker: ``python -m headrace.service.ranks.worker``, the process of one rank other than 0, started by the engine
process with a socket as its standard input.

Builds the same executor as rank 0 and carries out the same commands, in the same order. It reads no results: rank 0
samples. Whatever raises ends it with exit code 1, after a `Failed`; rank 0 then ends the engine. It ends with its
parent too, and kills an engine process that was stopped, as nothing would answer or restart while workers wait for it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from headrace.base import env
from headrace.base.config import EngineConfig
from headrace.base.errors import ConfigError, HeadraceError
from headrace.base.messages import ErrorInfo, Starting
from headrace.base.registry import load_target
from headrace.base.spawn import continue_when_orphaned
from headrace.kernels.early import open_driver
from headrace.service.bytecode import keep_bytecode
from headrace.service.ending import die_with_parent, leave
from headrace.service.executor import Executor, Progress
from headrace.service.framing import LENGTH, frame
from headrace.service.ranks.commands import (
    Acquire,
    Assignment,
    Close,
    Command,
    Done,
    Execute,
    Failed,
    ForgetAdapter,
    FromWorker,
    Moved,
    OpenRegion,
    PrepareAdapter,
    RankReady,
    ReadAdapter,
    RecordNext,
    Release,
    Replace,
    Reset,
    Shared,
    decode_assignment,
    decode_command,
    decode_shared,
)
from headrace.service.ranks.heartbeats import BEAT_S, SILENCE_S, START_SILENCE_S, Heartbeats, Silence
from headrace.service.ranks.ring import SPIN_CPU_S, SPIN_GPU_S, RingReader
from headrace.service.transport import engine_line

logger = logging.getLogger(__name__)

RECEIVE_S = 0.5
"""How often a rank without commands looks whether its last step came through."""
WORKER_MODULE = "headrace.service.ranks.worker"
RANK_BUILDER = "headrace.service.ranks.build:build_rank"

RankBuilder = Callable[[Assignment, Progress], Executor]
"""Joins the other ranks and builds the executor of one."""


class RankLine:
    """The worker's end of the socket: one assignment comes in, replies go out, from any thread."""

    def __init__(self, line: socket.socket):
        self._line, self._lock = line, threading.Lock()

    def read_assignment(self) -> Assignment | None:
        """Wait for it; None when the other end closes before."""
        header = self._line.recv(LENGTH.size, socket.MSG_WAITALL)
        if len(header) < LENGTH.size:
            return None
        length = LENGTH.unpack(header)[0]
        payload = self._line.recv(length, socket.MSG_WAITALL)
        return decode_assignment(payload) if len(payload) == length else None

    def send(self, reply: FromWorker) -> None:
        """Send it; what a dead parent does not take is lost."""
        with self._lock, contextlib.suppress(OSError):
            self._line.sendall(frame(reply))

    def await_end(self, wait_s: float) -> bool:
        """Wait at most so long for the other end to close; returns whether it has."""
        ended = select.poll()
        # POLLHUP is reported whatever the mask; over TCP the end of one direction alone is POLLRDHUP
        ended.register(self._line, select.POLLRDHUP)
        return bool(ended.poll(wait_s * 1e3))


class CommandLoop:
    """Carries out commands on this rank's executor."""

    def __init__(self, executor: Executor, line: RankLine, ring: RingReader):
        self._executor, self._line, self._ring = executor, line, ring

    def run(self) -> None:
        """Until `Close`; raises what a command raises that cannot be undone."""
        while True:
            message = self._ring.receive(RECEIVE_S)
            self._executor.check()
            if message is None:
                continue
            command = decode_command(message)
            if isinstance(command, Close):
                self._executor.close()
                return
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        executor = self._executor
        match command:
            case Execute(plan):
                arrived = executor.execute(plan).take_arrived()
                if arrived:
                    self._line.send(Moved(arrived))
            case RecordNext():
                executor.use_idle_moment()
            case Reset():
                executor.reset()
            case ReadAdapter(adapter_id, call):
                executor.adapters.read(adapter_id, call)  # what fails, fails on rank 0, or when a plan loads it
            case PrepareAdapter(adapter_id, digest):
                executor.adapters.prepare(adapter_id, digest)
            case ForgetAdapter(adapter_id):
                executor.adapters.forget(adapter_id)
            case OpenRegion(handle, epoch):
                assert executor.regions is not None
                executor.regions.open_region(handle, epoch)
            case Release(release):
                discards = release.discards_weights
                self._answer(lambda: executor.release_memory(release.parts, discards_weights=discards))
            case Acquire(acquire):
                self._answer(lambda: executor.acquire_memory(acquire.parts))
            case Replace(replace):
                self._answer(lambda: executor.replace_weights(replace.model, replace.load_format))

    def _answer(self, change: Callable[[], None]) -> None:
        try:
            change()
        except (HeadraceError, OSError) as error:  # those that leave the executor as it was
            self._line.send(Done(ErrorInfo.of(error)))
        else:
            self._line.send(Done())


def watch_parent(heartbeats: Heartbeats, parent: int, *, kills: bool) -> Silence:
    """From a thread, end this process when the heartbeat of its parent stands still, and the parent too if told.
    Returns what says for how long it may, at first that of a start."""
    silence = Silence(BEAT_S, START_SILENCE_S)

    def watch() -> None:
        while not silence.note(heartbeats.count(0)):
            time.sleep(BEAT_S)
        who = "rank 0" if kills else "the agent of this host"
        logger.error("%s (pid %d) gives no sign of life%s", who, parent, "; it is killed" if kills else "")
        if kills and os.getppid() == parent:
            os.kill(parent, signal.SIGKILL)
        leave(1)

    threading.Thread(target=watch, name="parent-silence", daemon=True).start()
    return silence


def start(assignment: Assignment, shared: Shared, line: RankLine, build: Callable[[], RankBuilder]) -> CommandLoop:
    """Build the executor, for commands to be carried out."""
    line.send(Starting("importing", 0.0))
    executor = build()(assignment, lambda stage, fraction: line.send(Starting(stage, fraction)))
    gc.freeze()
    gc.enable()
    is_cpu = executor.facts.device == "cpu"
    ring = RingReader(shared.ring, SPIN_CPU_S if is_cpu else SPIN_GPU_S)
    line.send(RankReady())
    return CommandLoop(executor, line, ring)


def _start_logging(config: EngineConfig, rank: int) -> None:
    replica = f"engine {config.replica} " if config.parallel.data_parallel_size > 1 else ""
    logging.basicConfig(
        force=True, level=env.log_level().upper(),
        format=f"%(asctime)s %(levelname)s {replica}rank {rank}: %(message)s"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the worker until the end; returns the exit code."""
    parser = argparse.ArgumentParser(prog=WORKER_MODULE, description=__doc__)
    parser.add_argument("--builder", default=RANK_BUILDER, help="module:function that builds the executor")
    parser.add_argument("--shared", required=True, help="JSON of what is shared with the parent, see commands.Shared")
    arguments = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        # Ctrl-C and service managers reach the whole group; the parent decides when we end
        signal.signal(number, signal.SIG_IGN)
    continue_when_orphaned()
    parent = os.getppid()
    try:
        line = RankLine(engine_line())
    except ConfigError as error:  # started by hand
        sys.stderr.write(f"{error}\n")
        return 1
    die_with_parent(line.await_end, parent)
    shared = decode_shared(arguments.shared)
    heartbeats = Heartbeats(shared.num_heartbeats, shared.heartbeats)
    heartbeats.start(shared.heartbeat)
    silence = watch_parent(heartbeats, parent, kills=shared.parent_is_replaced)
    gc.disable()  # while starting, as in the engine process: a collection would also make all ranks wait
    open_driver()
    try:
        with keep_bytecode():
            # takes seconds; the assignment comes when rank 0 has imported as much
            builder = ThreadPoolExecutor(1, "rank-import").submit(load_target, arguments.builder)
            assignment = line.read_assignment()
            if assignment is None:
                return 1
            _start_logging(assignment.config, assignment.rank)
            loop = start(assignment, shared, line, builder.result)
        silence.limit_s = SILENCE_S
        loop.run()
    except Exception as error:  # process main: tell rank 0 why, then end
        level = logging.DEBUG if isinstance(error, HeadraceError) else logging.ERROR
        logger.log(level, "the worker ends: %s", error, exc_info=error)
        line.send(Failed(ErrorInfo.of(error)))
        return 1
    return 0


if __name__ == "__main__":
    leave(main())

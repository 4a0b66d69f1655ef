"""Ranks as processes that carry out the commands of an engine in the test's own process, which is rank 0."""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import torch

from headrace.base.config import EngineConfig, engine_config
from headrace.base.messages import ErrorInfo, encode
from headrace.base.step import Arrival
from headrace.execution.building import build_executor
from headrace.parallel.group import Rendezvous, find_store, serve_rendezvous
from headrace.parallel.layout import Layout
from headrace.parallel.ranks import join_ranks
from headrace.service.ranks.commands import Command, Done, Execute, decode_command
from headrace.service.ranks.executor import RankedExecutor
from headrace.service.ranks.worker import CommandLoop

CPU = torch.device("cpu")


class Followers:
    """The other ranks, as `headrace.service.ranks.workers.Workers` are for a `RankedExecutor`."""

    def __init__(self, lines: list[Connection]):
        self._lines = lines
        self.size = 1 + len(lines)
        self.begun: list[list[int]] = [[] for _ in lines]  # by rank: the steps that it has begun, as far as read
        self._answers: list[list[ErrorInfo | None]] = [[] for _ in lines]

    def send(self, command: Command) -> None:
        self.read(0)
        for line in self._lines:
            line.send(encode(command))

    def read(self, wait_s: float) -> None:
        """Take what has arrived; waits for the first message of each rank."""
        for line, begun, answers in zip(self._lines, self.begun, self._answers, strict=True):
            while line.poll(wait_s):
                kind, what = line.recv()
                (begun if kind == "begun" else answers).append(what)
                wait_s = 0

    def await_answers(self) -> list[ErrorInfo | None]:
        while not all(self._answers):
            self.read(0.1)
        return [answers.pop(0) for answers in self._answers]

    def take_arrived(self) -> list[Arrival]:
        """Nothing is moved between tiers."""
        return []

    def explain(self) -> None:
        """None of them dies."""

    def close(self) -> None:
        """They are closed with `RankProcesses`."""


class Ranked(RankedExecutor):
    """As `build_executor` returns it."""

    def serve_grammars(self, read_vocabulary: Callable[[], Any]) -> None:
        self._executor.serve_grammars(read_vocabulary)  # type: ignore[attr-defined]


class RankProcesses:
    """``tensor`` ranks for each of ``pipeline`` stages, of which all but this process's are processes of their own.
    They end when this is closed."""

    def __init__(self, tensor: int, pipeline: int = 1):
        self.size = size = tensor * pipeline
        self._store, rendezvous = serve_rendezvous("127.0.0.1", size)
        context = multiprocessing.get_context("forkserver")  # which imports once, for all ranks of all tests
        context.set_forkserver_preload([build_executor.__module__, CommandLoop.__module__])
        self._lines: list[Connection] = []
        self._processes = []
        for rank in range(1, size):
            line, theirs = context.Pipe()
            place = Layout(rank, tensor, pipeline)
            process = context.Process(target=follow, args=(place, rendezvous, theirs), daemon=True)
            process.start()
            self._lines.append(line)
            self._processes.append(process)
        self.ranks = join_ranks(Layout(0, tensor, pipeline), CPU, self._store)
        self.followers = Followers(self._lines)

    def builder(self, options: dict[str, Any]) -> Callable[..., Ranked]:
        """A `build_executor` that builds on all ranks, and whose executor's commands they all carry out."""
        layout = self.ranks.layout
        options = {"tensor_parallel_size": layout.tensor, "pipeline_parallel_size": layout.pipeline, **options}

        def build(config: EngineConfig, progress: Callable[[str, float], None], *_: object) -> Ranked:
            self._send(options)
            executor = build_executor(engine_config(**options), progress, self.ranks)
            return Ranked(executor, self.followers, ExitStack())  # type: ignore[arg-type]

        return build

    def close(self) -> None:
        """End the other ranks."""
        self._send(None)
        for process in self._processes:
            process.join(20)
        self.ranks.close()

    def _send(self, message: object) -> None:
        for line in self._lines:
            line.send(message)


class AnswerLine:
    """What `CommandLoop` answers to."""

    def __init__(self, line: Connection):
        self._line = line

    def send(self, reply: Done) -> None:
        self._line.send(("answer", reply.error))


def follow(layout: Layout, rendezvous: Rendezvous, line: Connection) -> None:
    """Main of a further rank: options to build by, commands, and None at the end."""
    torch.set_num_threads(1)
    try:
        ranks = join_ranks(layout, CPU, find_store(rendezvous, layout.size))
        loop: CommandLoop | None = None
        gc.freeze()  # each engine that is closed collects garbage, and need not look at all modules
        while (message := line.recv()) is not None:
            if isinstance(message, dict):
                executor = build_executor(engine_config(**message), ranks=ranks)
                loop = CommandLoop(executor, AnswerLine(line), None)  # type: ignore[arg-type]
                continue
            command = decode_command(message)
            if isinstance(command, Execute):
                line.send(("begun", command.plan.step_id))
            assert loop is not None
            loop._carry_out(command)
        ranks.close()
    except BaseException:
        traceback.print_exc()
        os._exit(1)

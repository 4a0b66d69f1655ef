"""Ranks as processes that run the plans of an engine in the test's own process, which is rank 0."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from headrace.base.config import EngineConfig, engine_config
from headrace.base.step import StepPlan
from headrace.execution.executor import LocalExecutor, build_executor
from headrace.parallel.group import Rendezvous, find_store, serve_rendezvous
from headrace.parallel.layout import Layout
from headrace.parallel.ranks import join_ranks

CPU = torch.device("cpu")


class RankProcesses:
    """``tensor`` ranks for each of ``pipeline`` stages, of which all but this process's are processes of their own.
    They end when this is closed."""

    def __init__(self, tensor: int, pipeline: int = 1):
        self.size = size = tensor * pipeline
        self._store, rendezvous = serve_rendezvous("127.0.0.1", size)
        context = multiprocessing.get_context("spawn")
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

    def builder(self, options: dict[str, Any]) -> Callable[..., LocalExecutor]:
        """A `build_executor` that builds on all ranks, and whose executor's plans they all run."""
        options = {"tensor_parallel_size": self.group.size, **options}

        def build(config: EngineConfig, progress: Callable[[str, float], None], *_: object) -> LocalExecutor:
            self._send(("build", options))
            executor = build_executor(engine_config(**options), progress, self.ranks)
            execute = executor.execute

            def execute_everywhere(plan: StepPlan) -> Any:
                self._send(("plan", msgspec.msgpack.encode(plan)))
                return execute(plan)

            executor.execute = execute_everywhere  # type: ignore[method-assign]
            return executor

        return build

    def close(self) -> None:
        """End the other ranks."""
        self._send(("end", None))
        for process in self._processes:
            process.join(20)
        self.ranks.close()

    def _send(self, message: object) -> None:
        for line in self._lines:
            line.send(message)


def follow(layout: Layout, rendezvous: Rendezvous, line: Connection) -> None:
    """Main of a further rank."""
    torch.set_num_threads(1)
    try:
        ranks = join_ranks(layout, CPU, find_store(rendezvous, layout.size))
        executor: LocalExecutor | None = None
        while True:
            kind, what = line.recv()
            if kind == "end":
                break
            if kind == "build":
                executor = build_executor(engine_config(**what), ranks=ranks)
            else:
                assert executor is not None
                executor.execute(msgspec.msgpack.decode(what, type=StepPlan))
        ranks.close()
    except BaseException:
        traceback.print_exc()
        os._exit(1)

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
from headrace.parallel.group import Group, Rendezvous, find_store, join_group, serve_rendezvous

CPU = torch.device("cpu")


class RankProcesses:
    """``size`` ranks, of which all but this process's are processes of their own. They end when this is closed."""

    def __init__(self, size: int):
        self._store, rendezvous = serve_rendezvous("127.0.0.1", size)
        context = multiprocessing.get_context("spawn")
        self._lines: list[Connection] = []
        self._processes = []
        for rank in range(1, size):
            line, theirs = context.Pipe()
            process = context.Process(target=follow, args=(rank, size, rendezvous, theirs), daemon=True)
            process.start()
            self._lines.append(line)
            self._processes.append(process)
        self.group = join_group(0, size, CPU, self._store)

    def builder(self, options: dict[str, Any]) -> Callable[..., LocalExecutor]:
        """A `build_executor` that builds on all ranks, and whose executor's plans they all run."""

        def build(config: EngineConfig, progress: Callable[[str, float], None], *_: object) -> LocalExecutor:
            self._send(("build", options))
            executor = build_executor(engine_config(**options), progress, self.group)
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
        self.group.close()

    def _send(self, message: object) -> None:
        for line in self._lines:
            line.send(message)


def follow(rank: int, size: int, rendezvous: Rendezvous, line: Connection) -> None:
    """Main of a further rank."""
    torch.set_num_threads(1)
    try:
        group: Group = join_group(rank, size, CPU, find_store(rendezvous, size))
        executor: LocalExecutor | None = None
        while True:
            kind, what = line.recv()
            if kind == "end":
                break
            if kind == "build":
                executor = build_executor(engine_config(**what), group=group)
            else:
                assert executor is not None
                executor.execute(msgspec.msgpack.decode(what, type=StepPlan))
        group.close()
    except BaseException:
        traceback.print_exc()
        os._exit(1)

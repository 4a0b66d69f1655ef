"""What steps a workload of ``benchmarks.cpu`` is made of, without HTTP: how many decode, compute prompts, or both, how
long they take, and whether all layers run in one call. Requests follow one another as they do over HTTP.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import psutil

from headrace.base.messages import EngineRequest
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.base.step import StepPlan

VOCAB = 20_000


@dataclass(frozen=True)
class Step:
    """Seconds by the clock and of processor time; what was planned."""

    wall_s: float
    cpu_s: float
    num_decodes: int
    chunks: list[int]
    is_joined: bool

    @property
    def kind(self) -> str:
        """What it computes, and how."""
        what = "decodes" if not self.chunks else "both" if self.num_decodes else "prompts"
        return f"{what:8} {'in one call' if self.is_joined else 'one by one'}"


class StepWatch:
    """Runs an engine's steps and remembers each."""

    def __init__(self, engine: Any):
        self.steps: list[Step] = []
        self._engine = engine
        self._plans: list[StepPlan] = []
        self._is_joined = False
        self._watch(engine._scheduler, "plan", self._plans.append)
        self._watch(engine.executor._runner._model, "_run_together", self._note_call)

    def _watch(self, owner: Any, name: str, note: Any) -> None:
        function = getattr(owner, name, None)
        if function is not None:
            setattr(owner, name, lambda *args: _tell(function(*args), note))

    def _note_call(self, result: Any) -> None:
        self._is_joined = result is not None

    def step(self) -> list[Any]:
        """One step of the engine."""
        self._plans.clear()
        began, spent = time.perf_counter(), time.process_time()
        outputs = self._engine.step()
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - spent
        for plan in filter(None, self._plans):
            self.steps.append(Step(wall_s, cpu_s, plan.num_decodes, plan.lengths[plan.num_decodes :], self._is_joined))
        return outputs


def _tell(result: Any, note: Any) -> Any:
    note(result)
    return result


def run_workload(engine: Any, workload: Any, most: int | None) -> tuple[list[Step], float]:
    """The steps of a workload, and output tokens per second."""
    rng, watch = random.Random(0), StepWatch(engine)
    shared = [rng.randrange(3, VOCAB) for _ in range(workload.prefix_len)]
    count, sent = min(workload.num_requests, most or workload.num_requests), 0

    def ask(output_len: int) -> None:
        prompt = shared + [rng.randrange(3, VOCAB) for _ in range(workload.input_len)]
        engine.submit(EngineRequest(f"{rng.random()}", prompt, SamplingSpec(), StopSpec(max_tokens=output_len)))

    ask(1)
    while engine.has_work:
        watch.step()
    watch.steps.clear()
    began = time.perf_counter()
    while sent < min(count, workload.concurrency):
        ask(workload.output_len)
        sent += 1
    while engine.has_work:
        for output in watch.step():
            if output.finish is not None and sent < count:
                ask(workload.output_len)
                sent += 1
    return watch.steps, count * workload.output_len / (time.perf_counter() - began)


def print_steps(config: Any, workloads: dict[str, Any], most: int | None) -> None:
    """A table for each workload."""
    from headrace.service.build import build_engine

    for name, workload in workloads.items():
        engine = build_engine(config)
        try:
            steps, rate = run_workload(engine, workload, most)
        finally:
            engine.close()
        print(
            f"{name}  {rate:.0f} tokens/s without HTTP, {psutil.Process().memory_info().rss / 1e6:.0f} MB, load "
            f"{os.getloadavg()[0]:.1f}"
        )
        kinds: dict[str, list[Step]] = defaultdict(list)
        for step in steps:
            kinds[step.kind].append(step)
        for kind, found in sorted(kinds.items()):
            times = (
                f"{sum(s.wall_s for s in found):6.2f} s, {statistics.median(s.wall_s for s in found) * 1e3:7.1f} ms "
                f"each (cpu {statistics.median(s.cpu_s for s in found) * 1e3:7.1f})"
            )
            print(
                f"  {kind:24} {len(found):5} steps {times}  {statistics.mean(s.num_decodes for s in found):5.1f} "
                f"decodes, {statistics.mean(sum(s.chunks) for s in found):6.1f} tokens of prompts"
            )

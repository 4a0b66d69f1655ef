"""`Driver`: plans written by hand for a runner, without a scheduler."""

from __future__ import annotations

import random

from headrace.base.sampling import SamplingSpec
from headrace.base.step import PageAppend, RowStart, StepPlan, StepResult
from headrace.execution.executor import LocalExecutor
from headrace.execution.runner import Runner


class Driver:
    """Hand-made planning: pages in shuffled order, prefill chunks mixed with decodes."""

    def __init__(
        self, runner: Runner | LocalExecutor, seed: int = 0, num_pages: int = 40, page_size: int = 4,
        num_groups: int | None = None
    ):
        self.runner, self.random, self.page_size = runner, random.Random(seed), page_size
        self.num_groups = num_groups or len(runner.pools)
        self.free = [list(range(1, num_pages)) for _ in range(self.num_groups)]
        for pages in self.free:
            self.random.shuffle(pages)
        self.step_id = 0
        self.computed, self.known, self.output, self.held = {}, {}, {}, {}
        self.starts, self.releases, self.appends = [], [], []

    def start(
        self, row: int, prompt: list[int], sampling: SamplingSpec, *, output: tuple[int, ...] = (),
        adapter_slot: int = -1
    ) -> None:
        known = [*prompt, *output]
        self.starts.append(RowStart(row, f"r{row}", known, len(prompt), sampling, adapter_slot=adapter_slot))
        self.computed[row], self.known[row], self.output[row] = 0, len(prompt) + len(output), list(output)
        self.held[row] = [[] for _ in range(self.num_groups)]

    def release(self, row: int) -> None:
        self.releases.append(row)
        for group, pages in enumerate(self.held.pop(row)):
            self.free[group].extend(pages)
        del self.computed[row], self.known[row]

    def _reserve(self, row: int, end: int) -> None:
        for group in range(self.num_groups):
            held = self.held[row][group]
            missing = -(-end // self.page_size) - len(held)
            if missing > 0:
                pages = [self.free[group].pop() for _ in range(missing)]
                self.appends.append(PageAppend(group, row, len(held), pages))
                held.extend(pages)

    def plan(self, chunks: dict[int, int]) -> StepPlan:
        """Compute ``chunks[row]`` tokens of prefilling rows, and a decode of every row that has its prompt computed."""
        decodes = [row for row in self.computed if self.computed[row] >= self.known[row]]
        spans = [(row, self.computed[row], 1, 1) for row in decodes]
        for row, length in chunks.items():
            length = min(length, self.known[row] - self.computed[row])
            if row not in decodes and length > 0:
                spans.append((row, self.computed[row], length, int(self.computed[row] + length == self.known[row])))
        for row, begin, length, _ in spans:
            self._reserve(row, begin + length)
            self.computed[row] = begin + length
        self.step_id += 1
        columns = [list(column) for column in zip(*spans, strict=True)] or [[], [], [], []]
        plan = StepPlan(
            self.step_id, len(decodes), *columns, releases=self.releases, starts=self.starts, appends=self.appends
        )
        self.starts, self.releases, self.appends = [], [], []
        return plan

    def step(self, chunks: dict[int, int]) -> StepResult:
        plan = self.plan(chunks)
        result = self.runner.execute(plan).result()
        assert result.step_id == plan.step_id
        for row, token in zip(
            (r for r, s in zip(plan.rows, plan.samples, strict=True) if s), result.token_ids, strict=True
        ):
            self.output[row].append(token)
        return result

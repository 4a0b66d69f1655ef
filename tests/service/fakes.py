"""A scheduler and an executor without cache and tensors. The token after a sequence is a fixed function of it."""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections import deque
from dataclasses import dataclass, field

from headrace.base.cache import CacheGroup, CacheLayout, CacheSpec
from headrace.base.config import EngineConfig, engine_config, resolve_for_device
from headrace.base.errors import QueueFull, RequestError, WeightError
from headrace.base.messages import EngineRequest, EngineStats, ErrorInfo, Finish, MemoryLine, ModelFacts, RequestOutput
from headrace.base.step import RowStart, StepPlan, StepResult
from headrace.service.engine import Engine
from headrace.service.executor import Progress

VOCABULARY = 256
MAX_MODEL_LEN = 4096


def next_token(token_ids: list[int]) -> int:
    """What the fake model says after a sequence."""
    return zlib.crc32(bytes(t % 256 for t in token_ids)) % 250  # never one of the poisons below


def continuation(prompt: list[int], count: int) -> list[int]:
    """The fake model's greedy output."""
    known = list(prompt)
    for _ in range(count):
        known.append(next_token(known))
    return known[len(prompt):]


class Boom(RuntimeError):
    """What a broken kernel raises."""


@dataclass
class FakePending:
    outcome: StepResult | Exception
    delay_s: float = 0.0

    def result(self) -> StepResult:
        if self.delay_s:
            time.sleep(self.delay_s)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class FakeExecutor:
    """Runs plans as `StepPlan` prescribes them, on lists. A prompt that contains ``FAIL_LAUNCH`` or ``FAIL_RESULT``
    makes its step raise; the former when launched, the latter when its result is read. ``DIE`` kills the process."""

    FAIL_LAUNCH, FAIL_RESULT, DIE = 251, 252, 253

    def __init__(self, config: EngineConfig, *, delay_s: float = 0.0, layout: CacheLayout | None = None):
        self.config = resolve_for_device(config, "cpu")
        rows = self.config.scheduler.max_running_requests
        group = CacheGroup(CacheSpec("full", 1, 8, 8, "float32"), [0], num_pages=config.cache.kv_pages or 512)
        self.layout = layout or CacheLayout(config.cache.page_size or 16, rows, MAX_MODEL_LEN, [group])
        self.facts = ModelFacts(
            model="fake", architecture="Fake", family="fake", dtype="float32", device="cpu", max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCABULARY, eos_ids=[], num_parameters=0, page_size=self.layout.page_size, num_kv_tokens=group.num_pages * self.layout.page_size,
        )
        self.memory = [MemoryLine("weights", 1)]
        self.delay_s = delay_s
        self.rows: dict[int, list[int]] = {}
        self.num_resets = 0
        self.is_closed = False
        self.launched: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> FakePending:
        self.launched.append(plan)
        for row in plan.releases:
            self.rows.pop(row, None)
        for start in plan.starts:
            self.rows[start.row] = list(start.token_ids)
        tokens = []
        planned = {t for row in plan.rows for t in self.rows[row][:64]}
        if self.DIE in planned:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.FAIL_LAUNCH in planned and not any(t == self.FAIL_RESULT for t in planned):
            raise Boom("launch failed")
        for index, (row, begin, length, samples) in enumerate(zip(plan.rows, plan.begins, plan.lengths, plan.samples, strict=True)):
            known = self.rows[row]
            if index < plan.num_decodes:
                assert length == 1 and samples
            assert begin + length <= len(known), "a span reaches beyond the known tokens"
            if samples:
                assert begin + length == len(known), "a token is drawn after the last known one"
                tokens.append(next_token(known))
                known.append(tokens[-1])
        outcome = Boom("device lost") if self.FAIL_RESULT in planned else StepResult(plan.step_id, tokens)
        return FakePending(outcome, self.delay_s)

    def reset(self) -> None:
        self.num_resets += 1
        self.rows.clear()

    def close(self) -> None:
        self.is_closed = True


@dataclass
class _Running:
    request: EngineRequest
    row: int = -1
    num_planned: int = 0
    num_output: int = 0
    output: list[int] = field(default_factory=list)
    is_over: bool = False


class FakeScheduler:
    """One row per request, the whole prompt in the first span, no pages. Honest about overlap and over-run."""

    def __init__(self, config: EngineConfig):
        self.max_rows = config.scheduler.max_running_requests
        self.max_queued = config.scheduler.max_queued
        self.queued: deque[_Running] = deque()
        self.running: dict[str, _Running] = {}
        self.free_rows = list(range(self.max_rows))
        self.releases: list[int] = []
        self.in_flight: deque[StepPlan] = deque()
        self.zombies: dict[int, _Running] = {}
        self.is_broken = False
        self.counts = {"requests_total": 0, "aborted_total": 0, "failed_steps_total": 0, "steps_total": 0, "generation_tokens_total": 0}

    @property
    def has_work(self) -> bool:
        return bool(self.queued or self.running)

    def add(self, request: EngineRequest) -> None:
        if len(self.queued) >= self.max_queued:
            raise QueueFull("the queue is full", retry_after=1.0)
        if request.request_id in self.running or any(q.request.request_id == request.request_id for q in self.queued):
            raise RequestError("duplicate id", param="request_id")
        if len(request.prompt_token_ids) + 1 > MAX_MODEL_LEN:
            raise RequestError("too long", param="prompt")
        self.queued.append(_Running(request))
        self.counts["requests_total"] += 1

    def abort(self, request_id: str, reason: str = "abort") -> RequestOutput | None:
        for waiting in self.queued:
            if waiting.request.request_id == request_id:
                self.queued.remove(waiting)
                return RequestOutput(request_id, [], Finish(reason))
        if request_id not in self.running:
            return None
        self.counts["aborted_total"] += 1
        return self._end(self.running[request_id], Finish(reason), [])

    def expire(self) -> list[RequestOutput]:
        return []

    def plan(self) -> StepPlan | None:
        starts, fresh = [], []
        while self.queued and self.free_rows:
            request = self.queued.popleft()
            request.row = self.free_rows.pop()
            self.running[request.request.request_id] = request
            ids = request.request.prompt_token_ids
            starts.append(RowStart(request.row, request.request.request_id, ids, len(ids), request.request.sampling))
            fresh.append(request)
        decodes = [r for r in self.running.values() if r.num_planned and r.num_planned < r.request.stop.max_tokens]
        if not decodes and not fresh:
            return None
        lengths = [1] * len(decodes) + [len(r.request.prompt_token_ids) for r in fresh]
        begins = [len(r.request.prompt_token_ids) + r.num_planned - 1 for r in decodes] + [0] * len(fresh)
        for request in (*decodes, *fresh):
            request.num_planned += 1
        rows = [r.row for r in (*decodes, *fresh)]
        releases, self.releases = self.releases, []
        plan = StepPlan(self.counts["steps_total"], len(decodes), rows, begins, lengths, [1] * len(rows), releases, starts)
        self.counts["steps_total"] += 1
        self.in_flight.append(plan)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        assert self.in_flight.popleft() is plan and result.step_id == plan.step_id, "commits come in plan order"
        by_row = {r.row: r for r in self.running.values()}
        outputs = []
        for row, token in zip(plan.rows, result.token_ids, strict=True):
            request = by_row.get(row)
            if request is None or request.num_planned == 0:
                continue
            request.num_output += 1
            self.counts["generation_tokens_total"] += 1
            stop = request.request.stop
            finish = Finish("stop", stop_id=token) if token in stop.stop_ids else Finish("length") if request.num_output == stop.max_tokens else None
            outputs.append(RequestOutput(request.request.request_id, [token], finish))
            if finish is not None:
                self._end(request, finish, [])
        self._free_rows_nobody_plans()
        return outputs

    def fail(self, plan: StepPlan, error: BaseException) -> list[RequestOutput]:
        self.in_flight.remove(plan)
        self.counts["failed_steps_total"] += 1
        finish = Finish("error", error=ErrorInfo.of(error))
        victims = [r for r in self.running.values() if r.row in plan.rows]
        outputs = [self._end(r, finish, []) for r in victims]
        self._free_rows_nobody_plans()
        return outputs

    def check(self) -> None:
        assert not self.is_broken, "accounts are broken"
        used = {r.row for r in self.running.values()} | set(self.zombies)
        assert len(used) + len(self.free_rows) == self.max_rows

    def stats(self) -> EngineStats:
        return EngineStats(num_queued=len(self.queued), num_running=len(self.running), **self.counts)

    def reset_prefix_cache(self) -> bool:
        return not self.running

    def _end(self, request: _Running, finish: Finish, tokens: list[int]) -> RequestOutput:
        del self.running[request.request.request_id]
        self.zombies[request.row] = request
        self._free_rows_nobody_plans()
        return RequestOutput(request.request.request_id, tokens, finish)

    def _free_rows_nobody_plans(self) -> None:
        planned = {row for plan in self.in_flight for row in plan.rows}
        for row in [row for row in self.zombies if row not in planned]:
            del self.zombies[row]
            self.free_rows.append(row)
            self.releases.append(row)


def fake_engine(*, delay_s: float = 0.0, **options: object) -> Engine:
    """The real engine over fakes, in this process."""
    executor = FakeExecutor(engine_config(**options), delay_s=delay_s)
    return Engine(FakeScheduler(executor.config), executor)


BUILDER = "fakes:build_fake_engine"
"""For ``--builder``: the engine process finds this file through the path of its parent."""


def build_fake_engine(config: EngineConfig, progress: Progress) -> Engine:
    """As `headrace.service.build.build_engine`; the seed is the delay of each step in milliseconds."""
    progress("drawing fakes", 0.5)
    executor = FakeExecutor(config, delay_s=config.model.seed / 1000)
    return Engine(FakeScheduler(executor.config), executor)


def refuse_to_build(config: EngineConfig, progress: Progress) -> Engine:
    """A model that cannot be loaded."""
    raise WeightError("layer 3 is missing")


def die_while_building(config: EngineConfig, progress: Progress) -> Engine:
    """As the kernel's out-of-memory killer does it."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")

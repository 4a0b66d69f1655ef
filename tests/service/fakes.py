"""An executor without tensors, under the real engine and scheduler. The token after a sequence is a fixed function of
it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.base.adapters import AdapterFacts, LoadAdapter
from headrace.base.cache import CacheGroup, CacheLayout, CacheSpec
from headrace.base.config import EngineConfig, engine_config, resolve_for_device
from headrace.base.errors import HeadraceError, WeightError
from headrace.base.messages import ExpertStats, HotSlotStats, MemoryLine, ModelFacts
from headrace.base.speculation import Speculation
from headrace.base.step import StepPlan, StepResult
from headrace.scheduling.scheduler import Scheduler
from headrace.service.engine import Engine
from headrace.service.executor import Progress
from headrace.service.ranks.commands import Assignment
from headrace.service.ranks.executor import RankedExecutor
from headrace.service.ranks.gate import BoardGate
from headrace.service.ranks.launch import LocalLauncher
from headrace.service.ranks.workers import Workers

PATIENCE_S = 200.0
"""What never comes is waited for so long: less than a test may take, and far more than anything takes on a machine that
has other work."""

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
    is_busy: Callable[[], bool] = lambda: False

    @property
    def waits_for_device(self) -> bool:
        return self.is_busy()

    def take_arrived(self) -> list:
        return []

    def result(self) -> StepResult:
        if self.delay_s:
            time.sleep(self.delay_s)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class NoAdapters:
    """None are served."""

    def read(self, adapter_id: int, call: LoadAdapter) -> Future[AdapterFacts]:
        raise AssertionError("no adapters are served")

    def prepare(self, adapter_id: int) -> Future[Any]:
        raise AssertionError("no adapters are served")

    def forget(self, adapter_id: int) -> None:
        """Harmless."""


class FakeExecutor:
    """Runs plans as `StepPlan` prescribes them, on lists. A prompt that contains ``FAIL_LAUNCH`` or ``FAIL_RESULT``
    makes its step raise; the former when launched, the latter when its result is read. ``DIE`` kills the process,
    ``HANG`` stops it in its step for good; from ``LATE`` on, another rank has not come in time."""

    FAIL_LAUNCH, FAIL_RESULT, DIE, HANG, LATE = 251, 252, 253, 254, 255
    experts, hot_slots, late_kernels = ExpertStats(), HotSlotStats(), 3
    fallen_back = ("products are torch's: product.cu: no compiler",)
    adapters = NoAdapters()

    def __init__(self, config: EngineConfig, *, delay_s: float = 0.0, layout: CacheLayout | None = None):
        self.config = resolve_for_device(config, "cpu")
        rows = self.config.scheduler.max_running_requests
        group = CacheGroup(CacheSpec("full", 1, 8, 8, "float32"), [0], num_pages=config.cache.kv_pages or 512)
        self.layout = layout or CacheLayout(config.cache.page_size or 16, rows, MAX_MODEL_LEN, [group])
        self.facts = ModelFacts(
            model="fake", architecture="Fake", family="fake", dtype="float32", device="cpu",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCABULARY, eos_ids=[], num_parameters=0, page_size=self.layout.page_size,
            num_kv_tokens=group.num_pages * self.layout.page_size,
        )
        self.memory = [MemoryLine("weights", 1)]
        self.delay_s = delay_s
        self.rows: dict[int, list[int]] = {}
        self.num_resets = self.num_idle_moments = 0
        self.is_closed = self.is_late = False
        self.launched: list[StepPlan] = []
        self.released: frozenset[str] = frozenset()
        self.shift = 0
        self.is_busy: Callable[[], bool] = lambda: False

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
        self.is_late |= self.LATE in planned
        if self.HANG in planned:
            time.sleep(3600)
        if self.FAIL_LAUNCH in planned and not any(t == self.FAIL_RESULT for t in planned):
            raise Boom("launch failed")
        for index, (row, begin, length, samples) in enumerate(
            zip(plan.rows, plan.begins, plan.lengths, plan.samples, strict=True)
        ):
            known = self.rows[row]
            if index < plan.num_decodes:
                assert length == 1 and samples
            assert begin + length <= len(known), "a span reaches beyond the known tokens"
            if samples:
                assert begin + length == len(known), "a token is sampled after the last known one"
                tokens.append((next_token(known) + self.shift) % 250)
                known.append(tokens[-1])
        outcome = Boom("device lost") if self.FAIL_RESULT in planned else StepResult(plan.step_id, tokens)
        return FakePending(outcome, self.delay_s, self.is_busy)

    def check(self) -> None:
        if self.is_late:
            from headrace.parallel.group import PeerTimeout  # with torch, which most fakes do without

            raise PeerTimeout("rank 1 waited in vain for rank 0; the ranks must be restarted")

    def use_idle_moment(self) -> bool:
        self.num_idle_moments += 1
        return self.num_idle_moments < 3

    def reset(self) -> None:
        self.num_resets += 1
        self.rows.clear()

    def release_memory(self, parts, *, discards_weights: bool = False) -> None:
        assert not self.rows, "rows are in use"
        self.released |= set(parts)

    def acquire_memory(self, parts) -> None:
        self.released -= set(parts)

    def replace_weights(self, model: str, load_format: str) -> None:
        """Names of models are numbers, which are added to all tokens."""
        assert not self.rows, "rows are in use"
        if not model.isdigit():
            raise WeightError("the checkpoint does not fit the model")
        self.shift = int(model)

    def start_profile(self, options) -> None:
        self.profile = options

    def stop_profile(self) -> str:
        return f"{self.profile.num_steps} steps"

    def close(self) -> None:
        self.is_closed = True


def fake_engine(*, delay_s: float = 0.0, **options: object) -> Engine:
    """An engine over a fake executor, in this process."""
    return engine_over(FakeExecutor(engine_config(**options), delay_s=delay_s))


def engine_over(executor: FakeExecutor | RankedExecutor) -> Engine:
    """The engine as `headrace.service.build` makes it."""
    return Engine(Scheduler(executor.config.scheduler, executor.config.cache, executor.layout), executor)


BUILDER = "fakes:build_fake_engine"
"""For ``--builder``: the engine process finds this file through the path of its parent."""


def build_fake_engine(config: EngineConfig, progress: Progress) -> Engine:
    """As `headrace.service.build.build_engine`; the seed is the delay of each step in milliseconds."""
    progress("drawing fakes", 0.5)
    return engine_over(FakeExecutor(config, delay_s=config.model.seed / 1000))


def build_slowly(config: EngineConfig, progress: Progress) -> Engine:
    """Loads longer than a test's engine may be silent."""
    time.sleep(4.0)
    return build_fake_engine(config, progress)


def build_beside_compilers(config: EngineConfig, progress: Progress) -> Engine:
    """As where kernels are compiled meanwhile, two on threads and one that waits for its turn."""
    pool = ThreadPoolExecutor(2)
    for _ in range(3):
        pool.submit(subprocess.run, ["sleep", "287.25"], check=False)
    return build_fake_engine(config, progress)


def refuse_to_build(config: EngineConfig, progress: Progress) -> Engine:
    """A model that cannot be loaded."""
    raise WeightError("layer 3 is missing")


def die_while_building(config: EngineConfig, progress: Progress) -> Engine:
    """As the kernel's out-of-memory killer does it."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def refuse_second(config: EngineConfig, progress: Progress) -> Engine:
    """The second of several replicas has no room."""
    return refuse_to_build(config, progress) if config.replica else build_fake_engine(config, progress)


class PickyExecutor(FakeExecutor):
    """Takes no other weights."""

    def replace_weights(self, model: str, load_format: str) -> None:
        raise WeightError("the checkpoint does not fit the model")


def build_picky(config: EngineConfig, progress: Progress) -> Engine:
    """The second of several replicas takes no other weights."""
    return engine_over(PickyExecutor(config)) if config.replica else build_fake_engine(config, progress)


class RecordingExecutor(FakeExecutor):
    """Of one rank; writes the commands that it gets to a file beside the model, one a line. A model called as a number
    is refused by the rank of that number, one called ``all`` by every rank."""

    def __init__(self, config: EngineConfig, rank: int):
        super().__init__(config, delay_s=config.model.seed / 1000)
        self.speculation = Speculation()
        self.rank, self.path = rank, Path(config.model.model) / f"rank-{rank}"

    def note(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{text}\n")

    def execute(self, plan: StepPlan) -> FakePending:
        self.note(f"execute {plan.step_id} {sum(map(len, (s.token_ids for s in plan.starts)))}")
        return super().execute(plan)

    def check(self) -> None:
        if (self.path.parent / f"broken-{self.rank}").exists():
            raise Boom("a kernel of an earlier step failed")
        super().check()

    def use_idle_moment(self) -> bool:
        self.note("idle")
        return super().use_idle_moment()

    def reset(self) -> None:
        self.note("reset")
        super().reset()

    def release_memory(self, parts, *, discards_weights: bool = False) -> None:
        self.note(f"release {sorted(parts)} {discards_weights}")
        super().release_memory(parts)

    def acquire_memory(self, parts) -> None:
        self.note(f"acquire {sorted(parts)}")
        super().acquire_memory(parts)

    def replace_weights(self, model: str, load_format: str) -> None:
        self.note(f"replace {model} {load_format}")
        if model in ("all", str(self.rank)):
            raise WeightError("the checkpoint does not fit the model")

    def close(self) -> None:
        self.note("close")


def build_fake_rank(assignment: Assignment, progress: Progress) -> RecordingExecutor:
    """As `headrace.service.ranks.build.build_rank`. Revisions of models say how the start fails on rank 1."""
    progress("drawing fakes", 0.5)
    revision = assignment.config.model.revision if assignment.rank == 1 else None
    if revision == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if revision == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if revision == "raises":
        raise WeightError("a tensor is missing", param="model")
    if revision == "breaks":
        raise Boom("no such kernel")
    return RecordingExecutor(assignment.config, assignment.rank)


def start_ranks(config: EngineConfig, **options: Any) -> tuple[Workers, RankedExecutor]:
    """As `headrace.service.ranks.build.build_ranked_engine`."""
    size = config.parallel.tensor_parallel_size
    workers = Workers(config, size, LocalLauncher(config, size, "fakes:build_fake_rank"), **options)
    try:
        workers.assign(1)
        workers.await_ready()
    except HeadraceError:
        workers.close()
        raise
    return workers, RankedExecutor(RecordingExecutor(config, 0), workers, ExitStack())


def build_fake_ranks(config: EngineConfig, progress: Progress) -> Engine:
    """As `headrace.service.build.build_engine`, with several ranks."""
    return engine_over(start_ranks(config)[1])


class SteppingExecutor(FakeExecutor):
    """Of a replica that takes its steps with others: writes what each of them had in every step beside the model."""

    def __init__(self, config: EngineConfig):
        super().__init__(config, delay_s=config.model.seed / 1000)
        self.speculation = Speculation()
        self._path = Path(config.model.model) / f"replica-{config.replica}"

    def execute(self, plan: StepPlan) -> FakePending:
        assert plan.replica_tokens[self.config.replica] == sum(plan.lengths)
        with self._path.open("a") as file:
            file.write(f"{plan.replica_tokens}\n")
        return super().execute(plan)


def build_fakes_in_step(config: EngineConfig, progress: Progress) -> Engine:
    """As `headrace.service.ranks.build.build_ranked_engine` of replicas that divide experts."""
    workers = Workers(config, 1, LocalLauncher(config, 1))
    executor = RankedExecutor(
        SteppingExecutor(config), workers, ExitStack(), BoardGate(config.board, config.replica)
    )
    scheduler = Scheduler(executor.config.scheduler, executor.config.cache, executor.layout)
    return Engine(scheduler, executor, pace=executor)

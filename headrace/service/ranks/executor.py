"""`RankedExecutor`: the executor of rank 0 together with those of the workers.

Every command that changes a device goes to the workers first and is then carried out here, so that all ranks do the
same in the same order; whether to do something is decided here alone. A failed step cannot be contained: ranks may
differ after it, so it raises `EngineBroken`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, TypeVar

import msgspec

from headrace.base.adapters import AdapterFacts, LoadAdapter
from headrace.base.admin import AcquireMemory, DevicePart, ReleaseMemory, ReplaceWeights, StartProfile
from headrace.base.cache import CacheLayout
from headrace.base.config import EngineConfig
from headrace.base.errors import EngineBroken, HeadraceError, PeerFailed
from headrace.base.grammar import Grammar
from headrace.base.messages import ErrorInfo, ExpertStats, HotSlotStats
from headrace.base.step import Arrival, StepPlan, StepResult
from headrace.service.executor import Adapters, Executor, Pace, PendingStep
from headrace.service.ranks.commands import (
    Acquire,
    Command,
    Execute,
    ForgetAdapter,
    OpenRegion,
    PrepareAdapter,
    ReadAdapter,
    RecordNext,
    Release,
    Replace,
    Reset,
)
from headrace.service.ranks.gate import StepGate
from headrace.service.ranks.workers import Workers

T = TypeVar("T")


class _RankArrivals:
    """Page moves end when they have ended on all ranks; what failed on any has failed."""

    def __init__(self, size: int):
        self._size = size
        self._reports: dict[int, tuple[int, set[int]]] = {}  # by ticket: ranks that reported, and what failed

    def merge(self, own: list[Arrival], others: list[Arrival]) -> list[Arrival]:
        """Take the reports of this rank and of others; returns the moves that have ended everywhere."""
        ended = []
        for arrival in (*own, *others):
            count, failed = self._reports.pop(arrival.ticket, (0, set()))
            failed |= set(arrival.failed)
            if count + 1 == self._size:
                ended.append(Arrival(arrival.ticket, sorted(failed)))
            else:
                self._reports[arrival.ticket] = count + 1, failed
        return ended


class _PendingRanks:
    """A step of rank 0. Raises `EngineBroken` for whatever its launch and the step raise, and if a rank came too late
    for it. With ``is_late`` it is launched when its result is asked for, which is in the order of plans."""

    def __init__(
        self, executor: Executor, plan: StepPlan, workers: Workers, arrivals: _RankArrivals, *, is_late: bool
    ):
        self._executor, self._plan, self._workers, self._arrivals = executor, plan, workers, arrivals
        self._pending = None if is_late else self._guard(self._launch)

    @property
    def waits_for_device(self) -> bool:
        """See `PendingStep`, here and below."""
        return self._pending is not None and self._pending.waits_for_device

    def result(self) -> StepResult:
        pending = self._pending = self._pending or self._guard(self._launch)
        return self._guard(lambda: self._read(pending))

    def take_arrived(self) -> list[Arrival]:
        """None: they come with results."""
        return []

    def _launch(self) -> PendingStep:
        self._executor.check()
        return self._executor.execute(self._plan)

    def _read(self, pending: PendingStep) -> StepResult:
        result = pending.result()
        self._executor.check()
        arrived = self._arrivals.merge(result.arrived, self._workers.take_arrived())
        return result if arrived == result.arrived else msgspec.structs.replace(result, arrived=arrived)

    def _guard(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:  # whatever the device or a kernel raises, see the module
            self._workers.explain()
            raise _broken(self._plan.step_id, error) from error


def _broken(step_id: int, error: Exception) -> EngineBroken:
    return EngineBroken(
        f"step {step_id} failed on rank 0, which can then differ from the others; the engine restarts: "
        f"{type(error).__name__}: {error}", retry_after=1.0
    )


class RankedAdapters:
    """Adapters in host memory of all ranks. Answers are rank 0's: the others read the same files, and those that are
    slower make the first step with an adapter wait. One that has read other content fails that step."""

    def __init__(self, own: Adapters, workers: Workers):
        self._own, self._workers = own, workers
        self._facts: dict[int, Future[AdapterFacts]] = {}

    def read(self, adapter_id: int, call: LoadAdapter) -> Future[AdapterFacts]:
        """See `headrace.service.executor.Adapters`, here and below."""
        self._workers.send(ReadAdapter(adapter_id, call))
        facts = self._facts[adapter_id] = self._own.read(adapter_id, call)
        return facts

    def prepare(self, adapter_id: int, digest: str = "") -> Future[Any]:
        """On all ranks; it has been read here."""
        digest = digest or self._facts[adapter_id].result().digest
        self._workers.send(PrepareAdapter(adapter_id, digest))
        return self._own.prepare(adapter_id, digest)

    def forget(self, adapter_id: int) -> None:
        """On all ranks."""
        self._facts.pop(adapter_id, None)
        self._workers.send(ForgetAdapter(adapter_id))
        self._own.forget(adapter_id)


class RankedRegions:
    """Memory of transfers in the ranks beside this one, which has it."""

    def __init__(self, workers: Workers):
        self._workers = workers

    def open_region(self, handle: bytes, epoch: int) -> None:
        """See `headrace.service.executor.Regions`."""
        self._workers.send(OpenRegion(handle, epoch))


class RankedExecutor(Pace):
    """See `headrace.service.executor.Executor`. ``resources`` are closed after the workers, such as their group.
    ``gate``: where other replicas take part in each step."""

    def __init__(self, executor: Executor, workers: Workers, resources: ExitStack, gate: StepGate | None = None):
        self.facts, self.memory, self.speculation = executor.facts, executor.memory, executor.speculation
        self._executor, self._workers, self._resources = executor, workers, resources
        self.adapters = RankedAdapters(executor.adapters, workers)
        self.regions = RankedRegions(workers)
        self._gate = gate or StepGate()
        self.waker = self._gate.waker
        self._arrivals = _RankArrivals(workers.size)
        self._may_record = True  # graphs may be missing; alike on all ranks
        # A CPU computes when it launches. This process has the last stage: it must not wait for the stages before while
        # there are plans to send to them.
        self._is_late = executor.facts.device == "cpu" and executor.config.parallel.pipeline_parallel_size > 1

    @property
    def config(self) -> EngineConfig:
        """That of rank 0."""
        return self._executor.config

    @property
    def layout(self) -> CacheLayout:
        """The same on all ranks."""
        return self._executor.layout

    @property
    def released(self) -> frozenset[DevicePart]:
        """The same on all ranks."""
        return self._executor.released

    @property
    def experts(self) -> ExpertStats:
        """The same on all ranks."""
        return self._executor.experts

    @property
    def hot_slots(self) -> HotSlotStats:
        """Those of rank 0: the same on all ranks of its pipeline stage."""
        return self._executor.hot_slots

    @property
    def late_kernels(self) -> int:
        """Those of rank 0."""
        return self._executor.late_kernels

    @property
    def fallen_back(self) -> tuple[str, ...]:
        """Those of rank 0."""
        return self._executor.fallen_back

    def execute(self, plan: StepPlan) -> PendingStep:
        """Launch a plan on all ranks."""
        self._may_record = True
        return self._launch(self._gate.admit(plan))

    def keep_pace(self) -> None:
        """See `headrace.service.executor.Pace`."""
        plan = self._gate.find_idle_step()
        if plan is not None:
            self._launch(plan)

    def _launch(self, plan: StepPlan) -> PendingStep:
        self._workers.send(Execute(plan))
        return _PendingRanks(self._executor, plan, self._workers, self._arrivals, is_late=self._is_late)

    def check(self) -> None:
        """Of rank 0, before and after each step; the others check theirs."""
        self._executor.check()

    def use_idle_moment(self) -> bool:
        """On all ranks, unless there was nothing left to do since the last command."""
        if not self._may_record:
            return False
        self._workers.send(RecordNext())
        self._may_record = self._executor.use_idle_moment()
        return self._may_record

    def prepare_grammar(self, grammar: Grammar) -> Future[Any]:
        """On rank 0, which alone samples."""
        return self._executor.prepare_grammar(grammar)

    def reset(self) -> None:
        """On all ranks."""
        self._may_record = True
        self._workers.send(Reset())
        self._executor.reset()

    def release_memory(self, parts: Collection[DevicePart], *, discards_weights: bool = False) -> None:
        """On all ranks; see `_call` for errors, here and below."""
        self._gate.meet(self._launch)
        self._call(
            Release(ReleaseMemory(list(parts), discards_weights)),
            lambda: self._executor.release_memory(parts, discards_weights=discards_weights),
        )

    def acquire_memory(self, parts: Collection[DevicePart]) -> None:
        """On all ranks."""
        self._call(Acquire(AcquireMemory(list(parts))), lambda: self._executor.acquire_memory(parts))

    def replace_weights(self, model: str, load_format: str) -> None:
        """On all ranks."""
        self._gate.meet(self._launch)
        self._call(
            Replace(ReplaceWeights(model, load_format)), lambda: self._executor.replace_weights(model, load_format)
        )

    def start_profile(self, options: StartProfile) -> None:
        """Of rank 0."""
        self._executor.start_profile(options)

    def stop_profile(self) -> str:
        """Of rank 0."""
        return self._executor.stop_profile()

    def close(self) -> None:
        """Free the devices and end the workers; idempotent."""
        self._workers.close()
        self._executor.close()
        self._resources.close()
        self._gate.close()

    def _call(self, command: Command, change: Callable[[], None]) -> None:
        """Change all ranks. Where all refuse, this rank's error is raised, or that of the one for which the others gave
        up; where some do, `EngineBroken`."""
        self._may_record = True
        self._workers.send(command)
        own: HeadraceError | OSError | None = None
        try:
            change()
        except (HeadraceError, OSError) as error:
            own = error
        failures: dict[int, ErrorInfo] = {0: ErrorInfo.of(own)} if own is not None else {}
        answers = self._workers.await_answers()
        failures |= {rank: error for rank, error in enumerate(answers, 1) if error is not None}
        if own is not None and len(failures) == 1 + len(answers):
            reasons = [error for error in failures.values() if error.kind != PeerFailed.kind]
            raise reasons[0].to_error() if isinstance(own, PeerFailed) and reasons else own
        if failures:
            texts = "; ".join(f"rank {rank}: {error.message}" for rank, error in failures.items())
            raise EngineBroken(f"not all ranks could change, and the engine restarts: {texts}", retry_after=1.0)

"""`Engine`: the step loop. Plans, executes and commits; contains failed steps.

Refuses: sockets, processes, text. Overlap scheduling is a queue of the depth that the scheduler has: with 2, step N+1
is planned and launched while the device computes step N. The scheduler plans with tokens that are not known yet;
`commit` settles what it assumed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from headrace.base.errors import Conflict, EngineAsleep, EngineBroken, HeadraceError, OutOfDeviceMemory, StepFailed
from headrace.base.hooks import Hooks
from headrace.base.messages import EngineRequest, EngineStats, ErrorInfo, Finish, RequestOutput
from headrace.base.step import Arrival, StepPlan, StepResult
from headrace.service.adapters import AdapterGate, AdapterRegistry
from headrace.service.coordination import Gate, WaitingRoom, create_coordinators
from headrace.service.executor import Executor, Pace, PendingStep

if TYPE_CHECKING:
    from headrace.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

MAX_EMPTY_STEPS = 1000
"""Steps in a row that may find requests but nothing to plan; more means a scheduler bug, see `_notice_empty_step`."""
ASLEEP_RETRY_AFTER_S = 5.0


class StepTimes:
    """Estimates how long one step may take, from measured steps. The cost of a step grows at most linearly with its
    tokens (fixed costs make it sublinear), so a step of n tokens in s seconds bounds a full one by s * max / n; the
    smallest such bound counts. The maximum with the longest step seen covers attention over growing contexts."""

    def __init__(self, max_step_tokens: int):
        self._max_tokens = max_step_tokens
        self._longest_s = 0.0
        self._full_s = math.inf

    @property
    def bound_s(self) -> float:
        """Infinite before the first step."""
        return max(self._longest_s, self._full_s)

    def note(self, seconds: float, num_tokens: int) -> None:
        """A step of so many tokens took so long, from its launch to its result."""
        self._longest_s = max(self._longest_s, seconds)
        self._full_s = min(self._full_s, seconds * max(1.0, self._max_tokens / max(1, num_tokens)))


class _FailedLaunch:
    """`PendingStep` of a step that raised in ``execute``; raises the same error when its turn to commit comes."""

    waits_for_device = False

    def __init__(self, error: Exception):
        self._error = error

    def result(self) -> StepResult:
        raise self._error

    def take_arrived(self) -> list[Arrival]:
        return []


class Engine:
    """One scheduler and one executor, driven by calls of `step`. Not thread-safe: one thread owns it.

    A bad request ends alone, with an error as its output. An exception inside a step ends the requests of that step;
    plans launched behind it are void, and other running requests resume from their committed tokens. Then the accounts
    are checked and the loop goes on. A step for which the device has no memory ends nobody: all running requests
    resume, in smaller steps. Whatever `step` raises itself means that the engine can no longer be trusted and must be
    thrown away; an executor whose failures cannot be contained raises `EngineBroken`. ``gates``: coordinators beside
    those of the registry, which are closed with it.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, hooks: Hooks | None = None, pace: Pace | None = None,
        gates: Sequence[Gate] = (),
    ):
        self.executor, self.pace = executor, pace or Pace()
        self._scheduler = scheduler
        self._hooks = Hooks() if hooks is None else hooks
        self.adapters = AdapterRegistry(scheduler.adapters, executor)
        self._waiting_room = WaitingRoom(scheduler, [
            *create_coordinators(executor, self._hooks), AdapterGate(self.adapters, scheduler.adapters, executor),
            *gates,
        ])
        self._gates = gates
        self._in_flight: deque[tuple[StepPlan, PendingStep, float]] = deque()
        """Plans, their results to come, and when they were launched (`time.monotonic`)."""
        self._last_result_at = 0.0
        self._times = StepTimes(executor.config.scheduler.max_step_tokens or 1)
        self._outputs: list[RequestOutput] = []
        """Outputs made between steps (refusals, aborts, drain); the next `step` returns them."""
        self._num_empty = 0
        self._is_paused = False
        self.is_asleep = False  # memory that every request needs is off the device

    @property
    def is_held(self) -> bool:
        """Whether it is paused with nothing in flight and no output to return: `step` can then only end requests."""
        return self._is_paused and not self._in_flight and not self._outputs

    @property
    def step_bound_s(self) -> float:
        """Seconds that a step may take, by what steps took; see `StepTimes`."""
        return self._times.bound_s

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do: requests, launched plans, or outputs not yet handed out."""
        return bool(self._outputs or self._in_flight or self._scheduler.has_work)

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. A refused request does not raise: its error is an output of the next step."""
        is_entered = False
        try:
            if self.is_asleep:
                raise EngineAsleep("the engine sleeps and takes no requests", retry_after=ASLEEP_RETRY_AFTER_S)
            request, adapter = self.adapters.enter(request)
            is_entered = True
            must_wait = self._waiting_room.concerns(request)
            self._scheduler.add(request, is_held=must_wait, adapter=adapter)
        except HeadraceError as error:
            if is_entered:
                self.adapters.leave(request.request_id)
            if request.transfer is not None:
                self.decline([request.transfer.room], error.message)
            finish = Finish("error", error=ErrorInfo.of(error))
            self._outputs.append(RequestOutput(request.request_id, [], finish))
            return
        self._waiting_room.forget(request.request_id)
        if must_wait:  # after `add`: a coordinator may release it at once, and the scheduler must know it then
            self._waiting_room.enter(request)

    def decline(self, rooms: Sequence[str], reason: str) -> None:
        """Tell engines that wait for pages in these rooms that none will come: the request was refused."""
        for gate in self._gates:
            gate.decline(rooms, reason)

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End a request at whatever state; its last output comes with the next step. Unknown ids are ignored."""
        output = self._scheduler.abort(request_id, reason)
        if output is not None:
            self._outputs.append(output)

    @property
    def waits_for_device(self) -> bool:
        """Whether `step` would do nothing now but wait for the device."""
        return bool(self._in_flight) and self._in_flight[0][1].waits_for_device

    def launch(self) -> bool:
        """Let in requests that wait for nothing any more, and launch plans until as many are in flight as the scheduler
        allows; `step` begins with this. False after a plan that could not be launched: nothing may follow it."""
        self._outputs += self._scheduler.expire()
        self.poll_coordinators()
        if self._in_flight and isinstance(self._in_flight[-1][1], _FailedLaunch):
            return False
        while not self._is_paused and (plan := self._scheduler.plan()) is not None:
            if not self._execute(plan):
                return False
        return True

    def poll_coordinators(self) -> None:
        """Let coordinators take notice of what happened outside; to be called every now and then without requests too,
        as a transfer agent may say that pages are free, or have died. What comes of it are outputs of the next step."""
        self._outputs += self._waiting_room.poll()
        refused = [self._scheduler.refuse(*failed) for failed in self.adapters.take_failed()]
        self._outputs += [output for output in refused if output is not None]

    def step(self) -> list[RequestOutput]:
        """Launch plans until as many are in flight as the scheduler allows, then wait for the oldest one and commit it.
        Returns the outputs of that step and of requests that were refused, aborted or expired since the last call."""
        outputs = self._step()
        for output in outputs:
            if output.finish is not None:
                self.adapters.leave(output.request_id)
        return outputs

    def _step(self) -> list[RequestOutput]:
        has_launched = self.launch()
        outputs, self._outputs = self._outputs, []
        if not has_launched:
            while self._in_flight:  # what was launched before the failure stands
                self._commit(outputs)
        elif self._in_flight:
            self._commit(outputs)  # one only: the next call launches a new plan before it waits again
            self._num_empty = 0
        elif self._waiting_room.is_waiting:  # all requests are held: sleep a moment instead of spinning
            self._waiting_room.pause()
        elif not outputs and not self._is_paused:
            self._notice_empty_step()
        return outputs

    def pause(self, is_paused: bool = True) -> None:
        """Plan no more steps, or plan again. What is in flight is committed; requests wait, and may be added and
        ended."""
        self._is_paused = is_paused

    def stats(self) -> EngineStats:
        """Counters and gauges as of the last step."""
        stats = self._scheduler.stats()
        tiers = msgspec.structs.replace(stats.tiers, hot_slots=self.executor.hot_slots)
        return msgspec.structs.replace(
            stats, experts=self.executor.experts, adapters=self.adapters.stats(), tiers=tiers,
            late_kernels_total=self.executor.late_kernels, kernel_fallbacks_total=len(self.executor.fallen_back),
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False when some are in use and therefore stayed."""
        return self._scheduler.reset_prefix_cache()

    def drain(self, *, retracts: bool = False) -> None:
        """Remove all requests and cached prefixes from the device. Raises `Conflict` while there are requests, unless
        ``retracts``: then they go back to the queue and resume from the tokens they have."""
        while self._in_flight:
            self._commit(self._outputs)
        if self._scheduler.has_requests and not retracts:
            stats = self._scheduler.stats()
            raise Conflict(f"{stats.num_running + stats.num_queued} requests are running or waiting")
        is_clear = self._scheduler.reset_prefix_cache(retracts=True)
        assert is_clear, "pages are in use although no request runs"
        self.executor.reset()

    def check(self) -> None:
        """Raise `AssertionError` when a page or row is not accounted for exactly once."""
        self._scheduler.check()

    def close(self) -> None:
        """Free the device. The engine cannot be used afterwards."""
        with contextlib.suppress(EngineBroken):
            while self._in_flight:  # of a step whose sampling is not launched yet, other ranks wait for an end
                self._commit([])
        for gate in self._gates:
            with contextlib.suppress(EngineBroken):  # by ranks that have died
                gate.close()
        self.executor.close()

    def _execute(self, plan: StepPlan) -> bool:
        """Launch a plan; returns whether that succeeded. A plan that raises is queued too, so that the steps before it
        are committed first and it fails in order."""
        self._hooks.dispatch("step_planned", plan)
        began = time.monotonic()
        try:
            pending, is_launched = self.executor.execute(plan), True
        except EngineBroken:
            raise
        except Exception as error:  # whatever the device or a kernel raises stays inside its step
            pending, is_launched = _FailedLaunch(error), False
        self._in_flight.append((plan, pending, began))
        return is_launched

    def _commit(self, outputs: list[RequestOutput]) -> None:
        plan, pending, began = self._in_flight.popleft()
        try:
            result = pending.result()
        except EngineBroken:
            raise
        except Exception as error:  # as above; asynchronous failures surface here
            self._fail([plan, *(p for p, _, _ in self._in_flight)], error, outputs)
        else:
            now = time.monotonic()
            if plan.rows:
                self._times.note(now - began, sum(plan.lengths))
            # With a step in flight before it, this one began on the device when that was done.
            seconds, self._last_result_at = now - max(began, self._last_result_at), now
            outputs += self._scheduler.commit(plan, result, seconds=seconds)

    def _fail(self, plans: list[StepPlan], error: Exception, outputs: list[RequestOutput]) -> None:
        # Later plans build on tokens and pages of the failed one, so their results are dropped unread; `reset` below
        # waits for the device before rows and pages are used again.
        self._in_flight.clear()
        if isinstance(error, OutOfDeviceMemory) and self._scheduler.retry(plans[0]):
            logger.warning(
                "step %d found no memory; its requests are computed again in smaller steps: %s", plans[0].step_id, error
            )
            self.executor.reset()
            self._scheduler.check()
            return
        logger.error("step %d failed with %d plans in flight", plans[0].step_id, len(plans), exc_info=error)
        failure = StepFailed(f"the step computing this request failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        # The first call ends the failed plan's requests and voids the later plans; for those the calls end nobody.
        for plan in plans:
            outputs += self._scheduler.fail(plan, failure)
        self.executor.reset()
        self._scheduler.check()

    def _notice_empty_step(self) -> None:
        """Raise after `MAX_EMPTY_STEPS` without progress: otherwise a stuck scheduler would spin for ever."""
        self._num_empty = self._num_empty + 1 if self._scheduler.has_work else 0
        if self._num_empty > MAX_EMPTY_STEPS:
            raise AssertionError(f"the scheduler has work but planned nothing in {self._num_empty} steps")

"""`Scheduler`: the interface of this package. The engine adds requests, takes plans, and commits or fails them in plan
order.

Refuses: tensors, threads, processes. All calls come from one thread and none blocks; time enters through ``clock``
alone, which keeps tests deterministic.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headrace.base.cache import CacheLayout
from headrace.base.config import DEVICE_DEFAULTS, CacheConfig, SchedulerConfig
from headrace.base.errors import DeadlineExceeded, HeadraceError, RequestError, StepFailed
from headrace.base.hooks import Hooks
from headrace.base.media_facts import MediaFacts
from headrace.base.messages import EngineRequest, EngineStats, ErrorInfo, Finish, RequestOutput, TransferStats
from headrace.base.step import StepPlan, StepResult
from headrace.scheduling.admission import Admission, QueueLimits
from headrace.scheduling.arrivals import Arrivals
from headrace.scheduling.audit import audit_pages, audit_requests
from headrace.scheduling.budget import StepLimit
from headrace.scheduling.cache.ledger import CacheLedger
from headrace.scheduling.commit import Committer
from headrace.scheduling.drafting import Drafting
from headrace.scheduling.encoding import EncoderAccount, EncoderLimits
from headrace.scheduling.exchange import Exchange
from headrace.scheduling.lifecycle import Lifecycle, Retraction
from headrace.scheduling.planner import Flight, Planner
from headrace.scheduling.queue import POLICIES, WaitingQueue
from headrace.scheduling.request import Counters, Request
from headrace.scheduling.running import RunningSet
from headrace.scheduling.sharing import SharedPrefills
from headrace.scheduling.speculation.costs import StepCosts
from headrace.scheduling.speculation.policy import DraftPolicy
from headrace.scheduling.tiering import Tiers
from headrace.scheduling.transfers import Transfers

_DEFAULTS = DEVICE_DEFAULTS["cpu"]


@dataclass(frozen=True)
class Features:
    """What the executor can do: its pipeline stages, which compute a step each; adapters that are on the device at a
    time; the media that its model takes."""

    num_stages: int = 1
    num_adapter_slots: int = 0
    media: MediaFacts | None = None


class Scheduler:
    """Up to ``depth`` plans may be in flight: ``overlap_depth``, or one for each pipeline stage.
    Every request added ends with exactly one output that carries ``finish``, whether from `commit`, `abort`, `expire`,
    `refuse` or `fail`."""

    def __init__(
        self, config: SchedulerConfig, cache: CacheConfig, layout: CacheLayout, *,
        drafting: Drafting | None = None,
        clock: Callable[[], float] = time.monotonic,
        hooks: Hooks | None = None,
        features: Features = Features(),
    ):
        self._clock = clock
        self._layout = layout
        self._default_deadline_s = config.default_deadline_s
        self.depth = max(config.overlap_depth or _DEFAULTS["overlap_depth"], features.num_stages)
        max_step_tokens = config.max_step_tokens or _DEFAULTS["max_step_tokens"]
        # A decode takes one token of a step's budget: with no more requests than tokens, all decodes fit every step.
        max_running = min(config.max_running_requests or layout.max_rows, layout.max_rows, max_step_tokens)

        self._counters = Counters()
        self._drafting = drafting or Drafting(DraftPolicy(StepCosts()))
        self._ledger = CacheLedger(layout, use_prefixes=cache.prefix_cache)
        self._tiers = Tiers(self._ledger, Transfers(), layout, clock)
        self.changes = self._tiers.changes
        self.exchange = Exchange(self._tiers, clock)
        encoders = EncoderAccount(
            features.media, _encoder_limits(config, cache, features.media, max_step_tokens - max_running)
        )
        self._running = RunningSet(
            layout.max_rows, encoders, features.num_adapter_slots, media_bytes=config.max_queued_media_mib << 20
        )
        self.adapters = self._running.adapters
        self._queue = WaitingQueue(
            # Late-bound: admission is built with the queue, below.
            POLICIES.load(config.policy), config.starvation_steps, lambda r: self._admission.hit_pages(r),
            self._running.shares
        )
        self._sharing = SharedPrefills(
            self._queue, layout.page_size, is_enabled=config.share_prefix_in_batch and self._ledger.use_prefixes
        )
        self._admission = Admission(
            exchange=self.exchange, running=self._running, queue=self._queue, sharing=self._sharing,
            counters=self._counters, max_model_len=layout.max_model_len, limits=QueueLimits.of(config), clock=clock,
        )  # fmt: skip
        forecast = self._admission.forecast
        self._lifecycle = Lifecycle(
            exchange=self.exchange, running=self._running, queue=self._queue, sharing=self._sharing,
            drafting=self._drafting, forecast=forecast, counters=self._counters,
            hooks=Hooks() if hooks is None else hooks,
        )  # fmt: skip
        retraction = Retraction(
            ledger=self._ledger, running=self._running, lifecycle=self._lifecycle, forecast=forecast,
            by_priority=config.policy == "priority",
        )
        target_ms = config.inter_token_target_ms
        self._limit = StepLimit(max_step_tokens, features.num_stages, None if target_ms is None else target_ms / 1e3)
        self._planner = Planner(
            tiers=self._tiers, running=self._running, queue=self._queue, admission=self._admission,
            retraction=retraction, drafting=self._drafting, limit=self._limit, max_running=max_running,
        )  # fmt: skip
        self._committer = Committer(
            lifecycle=self._lifecycle, sharing=self._sharing, drafting=self._drafting, counters=self._counters
        )
        self._arrivals = Arrivals(
            tiers=self._tiers, running=self._running, lifecycle=self._lifecycle, admission=self._admission,
            queue=self._queue, sharing=self._sharing, clock=clock,
        )

        self._flights: deque[Flight] = deque()  # oldest first; committed in this order
        self._first_valid_step = 0  # results of steps before it are void: they were launched before a failure
        self._next_seq = 0
        self._deadlines: list[tuple[float, int, str]] = []  # heap of (time, seq, id); finished requests leave theirs

    # -- requests -----------------------------------------------------------------------------------------------

    def add(self, submitted: EngineRequest, *, is_held: bool = False, adapter: int = 0) -> None:
        """Queue a request, or hold it until `release` (its grammar is being compiled). ``adapter``: the number of its
        adapter, 0 for none; ``namespace`` then has that one's content. Raises, with no state changed, when it is
        invalid (`RequestError`), can never fit (`OutOfPages`) or the queue is full (`QueueFull`)."""
        submitted = self._running.media.share(self.exchange.adapt(submitted))
        wait = submitted.deadline_s if submitted.deadline_s is not None else self._default_deadline_s
        deadline = None if wait is None else self._clock() + wait
        request = Request(
            submitted, seq=self._next_seq, max_model_len=self._layout.max_model_len, deadline=deadline, adapter=adapter
        )
        if submitted.request_id in self._running.requests:
            raise RequestError(
                f"request id {submitted.request_id!r} is already in use; choose another", param="request_id"
            )
        self._admission.check(request)
        request.arrived_at = self._clock()
        self._next_seq += 1
        self._counters.requests += 1
        self._running.register(request)
        if is_held:
            self._running.held[request] = None
            if submitted.transfer is not None:  # it may end before the gate sees it, held by another coordinator
                self.exchange.expected[submitted.request_id] = 0
        else:
            self._arrivals.enter(request)
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, request.seq, request.request_id))

    def release(self, request_id: str) -> RequestOutput | None:
        """Queue a request that was held. Does nothing if it has ended meanwhile (aborted, or past its deadline).
        Returns its first output if another engine computed its prompt, which may be its last."""
        request = self._running.requests.get(request_id)
        if request is None or request not in self._running.held:
            return None
        first = self.exchange.take_first(request)
        output = None if first is None else self._committer.take_first(request, first)
        if output is None:
            del self._running.held[request]
            self._arrivals.enter(request)
        elif output.finish is None:
            del self._running.held[request]
            self._queue.push(request)
        return output

    def refuse(self, request_id: str, error: HeadraceError) -> RequestOutput | None:
        """End a request that is held, or waits for an adapter, with an error; None when no such request is any more."""
        request = self._running.requests.get(request_id)
        if request is None or not (request in self._running.held or request in self._running.adapters.waiting):
            return None
        return self._lifecycle.finish(request, Finish("error", error=ErrorInfo.of(error)), [])

    def abort(self, request_id: str, reason: str = "abort") -> RequestOutput | None:
        """End a request now, in whatever state; None for an id that is unknown or has finished."""
        request = self._running.requests.get(request_id)
        return None if request is None else self._lifecycle.finish(request, Finish(reason), [])

    def expire(self) -> list[RequestOutput]:
        """End the requests whose deadline has passed. O(1) when none has."""
        outputs: list[RequestOutput] = []
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            _, seq, request_id = heapq.heappop(self._deadlines)
            request = self._running.requests.get(request_id)
            # The id may have been reused by a later request, with a deadline of its own.
            if request is not None and request.seq == seq:
                error = DeadlineExceeded(f"the request's deadline passed after {request.output_len} output tokens")
                outputs.append(self._lifecycle.finish(request, Finish("error", error=ErrorInfo.of(error)), []))
        return outputs

    # -- steps --------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step; None when nothing can run now (commit what is in flight, or wait for requests)."""
        if len(self._flights) >= self.depth:
            return None
        self._arrivals.expire()
        flight = self._planner.plan(is_idle=not self._flights)
        if flight is None:
            return None
        self._flights.append(flight)
        return flight.plan

    def commit(self, plan: StepPlan, result: StepResult, *, seconds: float | None = None) -> list[RequestOutput]:
        """Apply a step's result; returns one output per request that progressed. Results of steps launched before a
        failure (see `fail`) are ignored. ``seconds``: for how long the device did nothing but this step; these times
        decide how many drafts pay, and how much may be computed beside decodes."""
        flight = self._take_flight(plan)
        if seconds is not None and plan.num_decodes == len(plan.rows) > 0 and self._drafting.has_drafts:
            num_tokens = sum(result.counts) if result.counts else len(plan.rows)
            self._drafting.note_time(
                plan.lengths, seconds, num_tokens=num_tokens, num_proposals=plan.num_proposals
            )
        if flight is None:
            return []
        if seconds is not None:
            self._limit.note_time(flight.work, seconds)
        outputs = self._committer.commit(flight, result)
        self._arrivals.commit(result.arrived)
        return outputs

    def fail(self, plan: StepPlan, error: BaseException) -> list[RequestOutput]:
        """A step raised: its requests end with an error, and their pages are not stored in the prefix tree. The
        executor is reset and has no rows any more, so every other running request goes back to the queue and resumes
        from its committed tokens; later steps in flight are void."""
        flight = self._take_flight(plan)
        if not isinstance(error, HeadraceError):
            error = StepFailed(f"the step this request was part of failed: {type(error).__name__}: {error}")
        finish = Finish("error", error=ErrorInfo.of(error))
        # Before `_forget_device`: that retracts all running requests, and by their new epochs none would be live.
        failed = flight.find_failed() if flight is not None else []
        outputs = [self._lifecycle.finish(request, finish, [], keep_pages=False) for request in failed]
        self._forget_device()
        self._counters.failed_steps += flight is not None
        return outputs

    def retry(self, plan: StepPlan) -> bool:
        """The device had no memory for a step: every running request goes back to the queue, as for `fail`, and steps
        have a smaller token budget for a while. Returns False, with nothing done, when the budget cannot shrink; the
        caller then calls `fail`."""
        if plan.step_id < self._first_valid_step or self._ledger.keeps_nothing or not self._limit.shrink():
            return False
        self._take_flight(plan)
        self._forget_device()
        return True

    def _forget_device(self) -> None:
        """Requeue all running requests and void all steps in flight: the executor's rows are gone."""
        for request in list(self._running):
            self._lifecycle.retract(request)
        self._tiers.transfers.forget()
        self._running.forget_device()
        self.adapters.forget_device()
        self._running.encoders.forget_device()
        self._flights.clear()
        self._first_valid_step = self._planner.next_step_id

    def _take_flight(self, plan: StepPlan) -> Flight | None:
        """The oldest flight, which must be the plan's; None for a plan from before a failure."""
        if plan.step_id < self._first_valid_step:
            return None
        flight = self._flights.popleft()
        assert flight.plan.step_id == plan.step_id, f"step {plan.step_id} committed before step {flight.plan.step_id}"
        return flight

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._running.requests)

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, any step has not been committed or any page is still to be moved."""
        tiers = self._tiers
        return bool(
            self._running.requests or self._flights or tiers.transfers.num_open or tiers.has_unwritten
            or self.exchange.events or tiers.changes.has_events
        )

    def reset_prefix_cache(self, *, retracts: bool = False) -> bool:
        """Drop all stored prefixes that no running request reads; True when none is left. With ``retracts`` running
        requests go back to the queue first, to resume from their tokens on a device that has forgotten everything; no
        step may be in flight then."""
        if retracts:
            assert not self._flights, "a step in flight would be computed over pages that are gone"
            self._forget_device()
        self._tiers.clear()
        is_empty = self._ledger.tree.clear()
        if is_empty and self.changes.is_on:
            self.changes.note_cleared()
        return is_empty

    def stats(self) -> EngineStats:
        """Counters and gauges. Pages are summed over groups; ``num_used_pages`` are those that requests hold or pin."""
        accounts, counters, tree = self._ledger.accounts, self._counters, self._ledger.tree
        num_pages, num_evictable = sum(a.capacity for a in accounts), sum(tree.num_evictable)
        return EngineStats(
            num_queued=len(self._queue) + self._sharing.num_following + self._running.num_apart,
            num_running=self._running.num_running,
            num_pages=num_pages,
            num_used_pages=num_pages - num_evictable - sum(a.num_free for a in accounts),
            num_evictable_pages=num_evictable,
            prompt_tokens_total=counters.prompt_tokens,
            cached_tokens_total=counters.cached_tokens,
            computed_tokens_total=counters.computed_tokens,
            generation_tokens_total=counters.generation_tokens,
            requests_total=counters.requests,
            aborted_total=counters.aborted,
            retracted_total=counters.retracted,
            failed_steps_total=counters.failed_steps,
            steps_total=counters.steps,
            evicted_pages_total=tree.num_evicted,
            speculation=self._drafting.stats(),
            tiers=msgspec.structs.replace(self._tiers.stats(), peers=TransferStats(
                sent_requests_total=self.exchange.outcomes["sent"],
                received_requests_total=self.exchange.outcomes["received"],
                lost_requests_total=self.exchange.outcomes["lost"],
                sent_pages_total=self.exchange.num_sent_pages,
                received_pages_total=self.exchange.num_received_pages,
            )),
        )

    def check(self) -> None:
        """Raise AssertionError unless every page, row and request is accounted for exactly once."""
        audit_requests(self._running, self._queue)
        audit_pages(self._ledger, self._running)
        self._tiers.check()
        self._running.encoders.audit(set(self._running))


def _encoder_limits(
    config: SchedulerConfig, cache: CacheConfig, media: MediaFacts | None, model_tokens: int
) -> EncoderLimits:
    """Limits of a model's encoders in tokens."""
    bytes_per_token = 1 if media is None else media.vector_size * media.element_bytes
    step_tokens = config.max_encoder_tokens or _DEFAULTS["max_encoder_tokens"]
    return EncoderLimits(step_tokens, cache.encoder_cache_mib * 2**20 // bytes_per_token, max(1, model_tokens))

"""`Planner`: what the next step computes, under one token budget. Decodes first, then prefill chunks, then newcomers.

Refuses: waiting for results. ``planned_len`` advances as if every step in flight succeeded; commit corrects it.
"""

from __future__ import annotations

from headrace.base.step import PageAppend, StepPlan
from headrace.scheduling.admission import Admission, Verdict
from headrace.scheduling.cache.ledger import CacheLedger
from headrace.scheduling.lifecycle import Retraction
from headrace.scheduling.queue import WaitingQueue
from headrace.scheduling.request import Request, State
from headrace.scheduling.running import RunningSet

VOID = -1


class Flight:
    """A plan in flight. ``requests[i]`` is the request of span i, ``epochs[i]`` its epoch when planned: if the
    request's own has changed since, the span's result is void. ``computed`` are ``(request, epoch, end)`` of spans
    whose sampled token is void but whose computed positions count."""

    __slots__ = ("computed", "epochs", "plan", "requests")

    def __init__(self, plan: StepPlan, requests: list[Request]):
        self.plan = plan
        self.requests = requests
        self.epochs = [request.epoch for request in requests]
        self.computed: list[tuple[Request, int, int]] = []

    def void_sample(self, request: Request) -> None:
        """Ignore the token that this step samples for the request: a forced token took its position. The KV that the
        step computes is valid all the same."""
        for index, (other, epoch) in enumerate(zip(self.requests, self.epochs, strict=True)):
            if other is request and epoch == request.epoch:
                self.epochs[index] = VOID
                self.computed.append((request, epoch, self.plan.begins[index] + self.plan.lengths[index]))

    def live_requests(self) -> list[Request]:
        """Requests that have not left the running set since this plan was made."""
        return [request for request, epoch in zip(self.requests, self.epochs, strict=True) if request.epoch == epoch]


LEAST_TOKENS = 16
CALM_STEPS = 512


class StepLimit:
    """The token budget of a step: what is configured, halved when the device runs out of memory, and doubled again
    after every `CALM_STEPS` steps without another such failure."""

    def __init__(self, most: int):
        self.tokens = self._most = most
        self._calm = 0

    def shrink(self) -> bool:
        """Halve the budget; False, and unchanged, when it cannot get any smaller."""
        if self.tokens <= LEAST_TOKENS:
            return False
        self.tokens, self._calm = max(LEAST_TOKENS, self.tokens // 2), 0
        return True

    def count_step(self) -> None:
        """A step was planned."""
        if self.tokens < self._most:
            self._calm += 1
            if self._calm >= CALM_STEPS:
                self.tokens, self._calm = min(self._most, 2 * self.tokens), 0


class Draft:
    """The spans of a plan being made, as parallel lists; see `StepPlan`."""

    __slots__ = ("appends", "begins", "lengths", "num_decodes", "requests", "samples")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.begins: list[int] = []
        self.lengths: list[int] = []
        self.samples: list[int] = []
        self.appends: list[PageAppend] = []
        self.num_decodes = 0


class Planner:
    """Composes plans. A step takes at most ``limit.tokens`` tokens, and no more requests than that or ``max_running``
    are let in; as a decode is one token, all decodes fit every step."""

    def __init__(
        self,
        *,
        ledger: CacheLedger,
        running: RunningSet,
        queue: WaitingQueue,
        admission: Admission,
        retraction: Retraction,
        limit: StepLimit,
        max_running: int,
    ):
        self._ledger = ledger
        self._running = running
        self._queue = queue
        self._admission = admission
        self._retraction = retraction
        self._limit = limit
        self._max_running = max_running
        self._next_step_id = 0

    @property
    def next_step_id(self) -> int:
        return self._next_step_id

    def plan(self, *, is_idle: bool) -> Flight | None:
        """The next step, or None when nothing can run before another step is committed. ``is_idle``: no step is in
        flight, so no commit will free pages; requests are retracted, one at a time, until the oldest can go on."""
        draft = self._compose()
        while not draft.requests:
            if not is_idle or not self._running.num_running:
                return None
            self._retraction.retract_one()
            draft = self._compose()
        return self._seal(draft)

    def _compose(self) -> Draft:
        draft = Draft()
        self._add_decodes(draft)
        budget = self._limit.tokens - draft.num_decodes
        for request in list(self._running.prefilling):
            if budget <= 0:
                break
            length = self._add_chunk(draft, request, budget)
            if length == 0:
                return draft  # no pages: newcomers must not take what this one waits for
            budget -= length
        if budget > 0:
            self._admit(draft, budget)
        return draft

    def _add_decodes(self, draft: Draft) -> None:
        """One token for every decoding request whose output may still grow, counting tokens in flight."""
        ledger, make_room, decoding = self._ledger, self._retraction.make_room, self._running.decoding
        ready = [request for request in decoding if request.planned_len < request.limit_len]
        growing = [request for request in ready if request.planned_len == request.holding.capacity]
        if growing:
            for request in growing:
                ledger.trim(request.holding, request.planned_len)
            while make_room(len(growing)):
                ready = [request for request in ready if request.state == State.DECODING]
                growing = [request for request in growing if request.state == State.DECODING]
            for request in growing:
                ledger.grow(request.holding, request.planned_len + 1)
                ledger.take_appends(request.holding, request.row, draft.appends)
        draft.requests = ready
        draft.num_decodes = len(ready)
        draft.begins = [request.planned_len for request in ready]
        draft.lengths = [1] * len(ready)
        draft.samples = [1] * len(ready)
        for request in ready:
            request.planned_len += 1

    def _add_chunk(self, draft: Draft, request: Request, budget: int) -> int:
        """As much of the request's prefill as tokens and pages allow; returns the number of tokens, 0 for no pages."""
        ledger, holding, begin = self._ledger, request.holding, request.planned_len
        ledger.trim(holding, begin)
        end = min(request.goal_len, begin + budget)
        if end > holding.capacity:
            end = min(end, holding.capacity + ledger.count_room(holding) * ledger.page_size)
            if end <= begin:
                return 0
            assert ledger.reserve(-(-(end - holding.capacity) // ledger.page_size))
            ledger.grow(holding, end)
        ledger.take_appends(holding, request.row, draft.appends)
        request.planned_len = end
        is_last = end == request.goal_len
        if is_last:
            self._running.start_decoding(request)
        draft.requests.append(request)
        draft.begins.append(begin)
        draft.lengths.append(end - begin)
        draft.samples.append(int(is_last and request.pooling is None))
        return end - begin

    def _admit(self, draft: Draft, budget: int) -> None:
        """Admit waiting requests while there are tokens, rows and pages. A request that does not fit blocks those
        behind it: otherwise a large one would starve behind small ones. Models without a KV cache keep nothing between
        steps, so their requests are computed whole."""
        queue, running, is_whole = self._queue, self._running, self._ledger.keeps_nothing
        while budget > 0 and running.has_free_row and running.num_running < min(self._max_running, self._limit.tokens):
            request = queue.peek()
            if request is None or (is_whole and request.known_len > budget):
                break
            verdict = self._admission.admit_next(request)
            if verdict is Verdict.BLOCKED:
                break
            if verdict is Verdict.ADMITTED:
                length = self._add_chunk(draft, request, budget)
                assert length > 0, f"{request} was admitted without a page to start with"
                budget -= length
        queue.end_step()

    def _seal(self, draft: Draft) -> Flight:
        running = self._running
        if running.rewired:
            for request in running.rewired:
                self._ledger.take_appends(request.holding, request.row, draft.appends)
            running.rewired = {}
        releases, starts, growths = running.take_changes()
        plan = StepPlan(
            step_id=self._next_step_id,
            num_decodes=draft.num_decodes,
            rows=[request.row for request in draft.requests],
            begins=draft.begins,
            lengths=draft.lengths,
            samples=draft.samples,
            releases=releases,
            starts=starts,
            appends=draft.appends,
            growths=growths,
        )
        self._next_step_id += 1
        self._limit.count_step()
        return Flight(plan, draft.requests)

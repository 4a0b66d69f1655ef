"""`Planner`: what the next step computes, under one token budget: decodes first, then chunks of running prefills, then
newly admitted requests (chunked prefill as in Sarathi-Serve, https://arxiv.org/abs/2403.02310).

Refuses: waiting for results. ``planned_len`` advances as if every step in flight succeeded and all its drafts were
right; the commit takes wrong drafts back. A request whose step fails leaves the running set, and starts from the
committed length if it is admitted again.
"""

from __future__ import annotations

from headrace.base.step import PageAppend, StepPlan
from headrace.scheduling.admission import Admission, Verdict
from headrace.scheduling.budget import StepBudget, StepLimit
from headrace.scheduling.drafting import Drafting, Verified
from headrace.scheduling.fairness import Path, divide
from headrace.scheduling.lifecycle import Retraction
from headrace.scheduling.queue import WaitingQueue
from headrace.scheduling.request import Request, State
from headrace.scheduling.running import RunningSet
from headrace.scheduling.tiering import Tiers
from headrace.scheduling.timing import StepWork


class Flight:
    """A plan in flight. ``requests[i]`` is the request of span i, ``epochs[i]`` its epoch when planned: if the
    request's own epoch has changed since, the span's result is void. ``verified``: the guesses among its drafts.
    ``work``: what the step computes, where it matters how long it takes. ``waiting``: requests without a span that
    wait for media which it encodes pieces of."""

    __slots__ = ("epochs", "plan", "requests", "verified", "waiting", "work")

    def __init__(
        self, plan: StepPlan, requests: list[Request], verified: dict[Request, Verified], work: StepWork | None,
        waiting: list[Request]
    ):
        self.plan = plan
        self.requests = requests
        self.verified = verified
        self.work = work
        self.waiting = [(request, request.epoch) for request in waiting]
        self.epochs = [request.epoch for request in requests]

    def find_failed(self) -> list[Request]:
        """Requests that end if the step fails: what they had encoded may be the reason, and would fail others again."""
        waiting = [request for request, epoch in self.waiting if request.epoch == epoch]
        return list(dict.fromkeys(self.live_requests() + waiting))

    def live_requests(self) -> list[Request]:
        """Requests with a span that have not left the running set since this plan was made."""
        return [request for request, epoch in zip(self.requests, self.epochs, strict=True) if request.epoch == epoch]


LEAST_CHUNK = 256
"""Tokens of a chunk below which a prompt is not divided among pipeline stages: reading weights would take longer."""


class PlanSpans:
    """The spans of a plan being made, as parallel lists; see `StepPlan`."""

    __slots__ = ("appends", "begins", "lengths", "num_decodes", "num_tokens", "requests", "samples", "verified")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.begins: list[int] = []
        self.lengths: list[int] = []
        self.samples: list[int] = []
        self.appends: list[PageAppend] = []
        self.verified: dict[Request, Verified] = {}
        self.num_decodes = 0
        self.num_tokens = 0  # of decodes


class Planner:
    """Composes plans. A step has at most ``limit.tokens`` tokens, and at most ``min(limit.tokens, max_running)``
    requests run. As a decode without drafts is one token, all decodes fit into every step. With several pipeline stages
    a row decodes again only once its token was committed, as the first stage learns it from the host."""

    def __init__(
        self,
        *,
        tiers: Tiers,
        running: RunningSet,
        queue: WaitingQueue,
        admission: Admission,
        retraction: Retraction,
        drafting: Drafting,
        limit: StepLimit,
        max_running: int,
    ):
        self._ledger, self._tiers, self._transfers = tiers.ledger, tiers, tiers.transfers
        self._running = running
        self._queue = queue
        self._admission = admission
        self._retraction = retraction
        self._drafting = drafting
        self._limit, self._encoders = limit, running.encoders
        self._max_running, self._num_stages = max_running, limit.num_stages
        self._next_step_id = 0
        self._is_blocked = False  # whether the next in line had no pages in the last step

    @property
    def next_step_id(self) -> int:
        return self._next_step_id

    def plan(self, *, is_idle: bool) -> Flight | None:
        """The next step, or None when nothing can run before another step is committed. ``is_idle``: no step is in
        flight, so no commit will free pages; requests are retracted, one at a time, until the oldest can go on. A plan
        without spans starts page moves, or waits for them."""
        # Without spans there are no appends either, so they can be thrown away. Retracting while a step is in flight
        # would be premature: its commit may end requests and free their pages. So would it while pages move.
        self._tiers.start_writing()
        spans = self._compose()
        while not spans.requests and not self._transfers.has_unsent:
            moves = self._transfers
            if is_idle and (moves.num_awaited or (moves.num_open and not self._running.num_running)):
                break
            if not is_idle or not self._running.num_running:
                return None
            self._retraction.retract_one()
            spans = self._compose()
        return self._seal(spans)

    def _compose(self) -> PlanSpans:
        if self._running.num_several:
            self._make_way()
        for request in self._running.adapters.wake(is_alone=self._running.num_running == 0):
            self._queue.push(request, keeps_turn=True)
        spans = PlanSpans()
        self._add_decodes(spans)
        budget = self._limit.begin_step(spans.begins, spans.lengths)
        _begin_media(budget, spans, self._running, len(self._queue))
        shares = self._divide(budget) if self._running.prefilling else {}
        for request in list(self._running.prefilling):  # a copy: the last chunk moves a request to the decoding ones
            most = budget.most(request.planned_len)
            share = self._limit_chunk(request, min(most, shares.get(request.path, most)), budget)
            if share <= 0:
                continue
            length = self._add_chunk(spans, request, share)
            if length == 0:
                return spans  # no pages: newcomers must not take what this one waits for
            budget.take(spans.begins[-1], length, has_media=bool(request.media))
            if shares:
                shares[request.path] -= length
        if budget.most(0) > 0:
            self._admit(spans, budget)
        return spans

    def _count_room(self) -> int:
        """How many more requests may run; zero or less for none."""
        running = self._running
        return min(running.num_free_rows, min(self._max_running, self._limit.tokens) - running.num_running)

    def _make_way(self) -> None:
        """Where rows or pages are short, whoever has none gets a turn, and one that has several gives up one for it."""
        if self._is_blocked or self._count_room() <= 0:
            newcomer, self._is_blocked = self._queue.newcomer(), False
            if newcomer is not None and self._retraction.make_way(newcomer):
                self._queue.let_in(newcomer)

    def _divide(self, budget: StepBudget) -> dict[Path, int]:
        """Tokens of this step by path, when several clients or HTTP requests prefill or wait to, and can hope for a row
        in this step: one long prompt must not delay all others. Empty when only one does, which then gets what there
        is."""
        if self._ledger.keeps_nothing:
            return {}
        demands: dict[Path, int] = {}
        for request in self._running.prefilling:
            demands[request.path] = demands.get(request.path, 0) + request.goal_len - request.planned_len
        newcomer = self._queue.next_in_turn() if self._count_room() > 0 else None
        if newcomer is not None:
            demands[newcomer.path] = demands.get(newcomer.path, 0) + newcomer.known_len
        # as many as there are for the one whose tokens take longest: the last one's share must fit, too
        farthest = max(request.planned_len for request in self._running.prefilling)
        return divide(budget.most(farthest), demands) if len(demands) > 1 else {}

    def _add_decodes(self, spans: PlanSpans) -> None:
        """One token, and drafts to verify, for every decoding request whose output may still grow, counting tokens in
        flight. Retracts others when there are no pages for them. Runs for every request in every step: no work per
        request but the lists."""
        ready = self._find_ready()
        lengths = self._drafting.choose_lengths(ready, self._limit.tokens) if self._drafting.has_drafts else None
        if lengths is None or not self._grow_for_drafts(spans, ready, lengths):
            count = self._running.num_running
            ready = self._grow_decodes(spans, ready)
            while not ready and self._running.num_running < count:  # a part was retracted: the next one may go on
                count = self._running.num_running
                ready = self._grow_decodes(spans, self._find_ready())
            lengths = [1] * len(ready)
        spans.requests = ready
        spans.num_decodes = len(ready)
        spans.begins = [request.planned_len for request in ready]
        spans.lengths, spans.samples = lengths, list(lengths)  # apart: prefill spans are added to both
        spans.num_tokens = sum(lengths)
        if spans.num_tokens > len(ready):
            spans.verified = self._drafting.take_drafts(ready, lengths)
            for request, length in zip(ready, lengths, strict=True):
                request.planned_len += length
                request.num_unsure += length - 1
        else:
            for request in ready:
                request.planned_len += 1

    def _find_ready(self) -> list[Request]:
        """Decoding requests whose output may still grow. With several stages those whose last token is known, and of
        all decoding ones a stage's part, so that steps are of like size."""
        decoding = self._running.decoding
        ready = [request for request in decoding if request.planned_len < request.limit_len]
        if self._num_stages == 1:
            return ready
        return [request for request in ready if request.planned_len < request.known_len][
            : -(-len(decoding) // self._num_stages)
        ]

    def _grow_decodes(self, spans: PlanSpans, ready: list[Request]) -> list[Request]:
        """Give every ready request room for one more position; returns those that are still ready."""
        ledger, make_room = self._ledger, self._retraction.make_room
        # Those whose last page is full: each needs one more page per group.
        growing = [request for request in ready if request.planned_len == request.holding.capacity]
        if not growing:
            return ready
        for request in growing:  # first: a window may give back what is needed
            ledger.trim(request.holding, request.planned_len - request.num_unsure)
        if not ledger.reserve(len(growing)) and not (self._retraction.trim_decodes() and ledger.reserve(len(growing))):
            # Where drafts are in flight, the page may not be needed at all: their commit tells, so these wait for it.
            # Pages under a ticket are freed when it ends.
            waiting = {request for request in growing if request.num_unsure or ledger.limbo}
            ready = [request for request in ready if request not in waiting]
            growing = [request for request in growing if request not in waiting]
        # One victim at a time; it may be among the ready ones, and then they need fewer pages.
        while make_room(len(growing)):
            ready = [request for request in ready if request.state == State.DECODING]
            growing = [request for request in growing if request.state == State.DECODING]
            if ledger.limbo:  # the victim's pages come back later
                ready, growing = [request for request in ready if request not in growing], []
        for request in growing:
            ledger.grow(request.holding, request.planned_len + 1)
            ledger.take_appends(request.holding, request.row, spans.appends)
        return ready

    def _grow_for_drafts(self, spans: PlanSpans, ready: list[Request], lengths: list[int]) -> bool:
        """Give every ready request room for so many positions; False, with nothing done, if there are no pages for all
        of them: nobody is retracted for a draft."""
        ledger, spare = self._ledger, self._drafting.device_drafts
        growing = [
            (request, end)
            for request, length in zip(ready, lengths, strict=True)
            if (end := min(request.planned_len + length + spare, request.limit_len)) > request.holding.capacity
        ]
        for request, _ in growing:
            ledger.trim(request.holding, request.planned_len - request.num_unsure)
        if not ledger.reserve(sum(-(-(end - r.holding.capacity) // ledger.page_size) for r, end in growing)):
            return False
        for request, end in growing:
            ledger.grow(request.holding, end)
            ledger.take_appends(request.holding, request.row, spans.appends)
        return True

    def _add_chunk(self, spans: PlanSpans, request: Request, budget: int) -> int:
        """As much of the request's prefill as tokens and pages allow; returns the number of tokens, 0 for no pages."""
        ledger, holding, begin = self._ledger, request.holding, request.planned_len
        ledger.trim(holding, begin)
        end = self._encoders.align(request, begin, min(request.goal_len, begin + budget))
        if end > holding.capacity:
            # A prefill takes only unpromised pages, and gets shorter for it; it retracts nobody.
            if end - holding.capacity > ledger.count_room(holding) * ledger.page_size:
                self._retraction.trim_decodes()
            end = min(end, holding.capacity + ledger.count_room(holding) * ledger.page_size)
            end = self._encoders.align(request, begin, end)
            if end <= begin:
                return 0
            has_pages = ledger.reserve(-(-(end - holding.capacity) // ledger.page_size))  # may evict
            assert has_pages
            ledger.grow(holding, end)
        ledger.take_appends(holding, request.row, spans.appends)
        self._encoders.take(request, begin, end)
        request.planned_len = end
        is_last = end == request.goal_len
        # At planning, not at commit: the next plan decodes it, with the token that this step samples on the device. A
        # pooled request, or one of a single output token, has ``planned_len == limit_len`` and is never decoded.
        if is_last:
            self._running.start_decoding(request)
        spans.requests.append(request)
        spans.begins.append(begin)
        spans.lengths.append(end - begin)
        spans.samples.append(int(is_last and request.pooling is None))
        return end - begin

    def _limit_chunk(self, request: Request, share: int, budget: StepBudget) -> int:
        """How many of ``share`` tokens a request's next chunk may have, as encoders allow; 0 to wait for them."""
        if request.media and budget.media_tokens is not None:
            share = min(share, budget.media_tokens)
        share = min(share, _most_of(request, 1 if self._ledger.keeps_nothing else self._num_stages))
        if share <= 0 or not request.media:
            return max(0, share)
        begin = request.planned_len
        end = min(request.goal_len, begin + share)
        # What must be computed in one step is not held up by a smaller budget: it might never be planned.
        hard_end = begin + budget.tokens + self._limit.num_withheld
        return self._encoders.limit(request, begin, end, hard_end=hard_end) - begin

    def _admit(self, spans: PlanSpans, budget: StepBudget) -> None:
        """Admit waiting requests while there are tokens, rows and pages. A request that does not fit blocks those
        behind it: otherwise a large one would starve behind small ones. Models without a KV cache keep nothing between
        steps, so their requests are computed in one step, never in chunks."""
        queue, is_whole, self._is_blocked = self._queue, self._ledger.keeps_nothing, False
        room = self._count_room()
        while budget.most(0) > 0 and room > 0:
            request = queue.peek()
            if request is None or (is_whole and request.known_len > budget.tokens):
                break
            verdict = self._admission.admit_next(request)
            if verdict is Verdict.BLOCKED and self._retraction.trim_decodes():
                verdict = self._admission.admit_next(request)
            if verdict is Verdict.BLOCKED:
                self._is_blocked = True
                break
            if verdict is Verdict.ADMITTED:
                share = self._limit_chunk(request, budget.most(request.planned_len), budget)
                if share > 0:  # else it runs, and waits for encoders
                    length = self._add_chunk(spans, request, share)
                    if not length:  # trimmed decodes are promised more, and what they share is not free: it waits
                        break
                    budget.take(spans.begins[-1], length, has_media=bool(request.media))
            room -= verdict is not Verdict.FOLLOWS
        queue.end_step()

    def _seal(self, spans: PlanSpans) -> Flight:
        """Make the plan of spans, with all changes of rows and page tables since the last plan."""
        running = self._running
        # Tables in which a commit replaced pages by the tree's. The device must get these entries now, even where the
        # request has no span here: the replaced pages are free, and this plan may have handed them out.
        if running.rewired:
            for request in running.rewired:
                self._ledger.take_appends(request.holding, request.row, spans.appends)
            running.rewired = {}
        releases, starts = running.take_changes()
        decodes = spans.requests[: spans.num_decodes] if self._num_stages > 1 else []
        work, waiting = self._limit.measure(spans, self._encoders.num_planned), self._encoders.find_waiting()
        plan = StepPlan(
            step_id=self._next_step_id,
            num_decodes=spans.num_decodes,
            rows=[request.row for request in spans.requests],
            begins=spans.begins,
            lengths=spans.lengths,
            samples=spans.samples,
            releases=releases,
            starts=starts,
            appends=spans.appends,
            drafts=[verified.draft for verified in spans.verified.values()],
            num_proposals=self._propose(spans),
            last_tokens=[request.tokens[-1] for request in decodes],
            moves=self._transfers.take_moves(),
            adapter_loads=running.adapters.take_loads(),
            media=self._encoders.take_plan(),
        )
        self._next_step_id += 1
        self._limit.count_step()
        return Flight(plan, spans.requests, spans.verified, work, waiting)

    def _propose(self, spans: PlanSpans) -> int:
        """How many drafts the device makes for each row of the plan. Rows whose drafter misses a step stay without."""
        if not self._drafting.device_drafts:
            return 0
        newcomers = spans.requests[spans.num_decodes :]
        count = self._drafting.count_proposals(newcomers, spans.num_decodes, self._limit.tokens)
        for request, samples in zip(spans.requests, spans.samples, strict=True):
            request.is_warm = request.is_warm and count > 0
            request.num_proposed = count if request.is_warm and samples else 0
        return count


def _most_of(request: Request, num_stages: int) -> int:
    """The most tokens of a request's prefill in one step: with several stages, as many chunks as those, which then
    follow each other through them."""
    length = request.goal_len - request.cached_len
    return length if num_stages == 1 else max(LEAST_CHUNK, -(-length // num_stages))


def _begin_media(budget: StepBudget, spans: PlanSpans, running: RunningSet, num_queued: int) -> None:
    """Divide what the step encodes, and bound what it computes of prompts with media beside its decodes."""
    encoders = running.encoders
    num_encoded = encoders.begin_step(
        running.prefilling, is_beside=spans.num_decodes > 0, most=budget.encoder_tokens
    )
    budget.reserve_encoding(num_encoded)
    if spans.num_decodes and encoders.divides_prompts:
        num_prompts = num_queued + sum(bool(request.media) for request in running.prefilling)
        budget.bound_media(spans.num_tokens + int(num_encoded), num_prompts)

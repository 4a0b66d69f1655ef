"""`Admission`: whether the next waiting request starts, and how many pages are promised to it, so that memory is well
used and retraction stays rare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from headrace.base.config import SchedulerConfig
from headrace.base.errors import ContextLengthExceeded, OutOfPages, QueueFull, RequestError
from headrace.scheduling.cache.prefix_tree import PrefixMatch
from headrace.scheduling.exchange import Exchange
from headrace.scheduling.queue import WaitingQueue
from headrace.scheduling.request import Counters, Request
from headrace.scheduling.running import RunningSet
from headrace.scheduling.sharing import SharedPrefills


class Verdict(Enum):
    """The outcome for the next request. ADMITTED: it runs. FOLLOWS: it left the queue and waits for another request's
    prefill of the same prefix, or for its adapter. BLOCKED: there are no pages for it. AWAITS: it has a row and waits
    for pages from another tier or machine."""

    ADMITTED = 1
    FOLLOWS = 2
    BLOCKED = 3
    AWAITS = 4


class OutputForecast:
    """The share of ``max_tokens`` that requests really use: an exponential mean over finished ones, raised at each
    retraction.

    Pages for the prompt are always promised in full; for the output, the forecast share of what the user allows. With
    many requests running the errors cancel out; where they do not, retraction corrects them.
    """

    START, STEP, RAISE = 0.7, 0.05, 0.1  # first share; weight of a finished request; added per retraction
    MOST_TOKENS = 4096  # bound of the promise: a huge max_tokens must not keep all others out

    def __init__(self) -> None:
        self.share = self.START

    def expect_len(self, request: Request) -> int:
        """The length in tokens at which the request is expected to end."""
        output_len = min(int(self.share * request.max_output_len), self.MOST_TOKENS)
        return min(request.limit_len, max(request.prompt_len + output_len, request.known_len + 1))

    def note_finish(self, request: Request) -> None:
        """A request ended by a stop or its length."""
        if request.max_output_len > 0:
            self.share += self.STEP * (request.output_len / request.max_output_len - self.share)

    def note_retraction(self) -> None:
        """Too much was admitted."""
        self.share = min(1.0, self.share + self.RAISE)


class Pace:
    """How fast the queue moves: an exponential mean of the seconds between admissions, while others wait."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._last: float | None = None
        self._interval = 0.05

    def note_admission(self, num_waiting: int) -> None:
        """A request was admitted and left ``num_waiting`` behind."""
        now = self._clock()
        if self._last is not None:
            self._interval += 0.05 * (now - self._last - self._interval)
        self._last = now if num_waiting else None  # an empty queue's idle time says nothing about its speed

    def estimate_wait(self, num_waiting: int) -> float:
        """Seconds until half of the queue has moved on; within [1, 60]."""
        return round(min(60.0, max(1.0, 0.5 * num_waiting * self._interval)), 1)


@dataclass(frozen=True)
class QueueLimits:
    """The most requests that may wait, in all and of one client."""

    in_all: int
    per_client: int

    @classmethod
    def of(cls, config: SchedulerConfig) -> QueueLimits:
        """The configured limits; one client may by default fill half of the queue."""
        return cls(config.max_queued, config.max_queued_per_client or max(1, config.max_queued // 2))


class Admission:
    """Checks requests as they arrive, and lets the next in line run when there is room."""

    def __init__(
        self,
        *,
        exchange: Exchange,
        running: RunningSet,
        queue: WaitingQueue,
        sharing: SharedPrefills,
        counters: Counters,
        max_model_len: int,
        limits: QueueLimits,
        clock: Callable[[], float],
    ):
        self._ledger, self._tiers, self._exchange = exchange.tiers.ledger, exchange.tiers, exchange
        self._running = running
        self._queue = queue
        self._sharing = sharing
        self._counters = counters
        self._max_model_len = max_model_len
        self._limits = limits
        self._clock = clock
        self._pace = Pace(clock)
        self.forecast = OutputForecast()

    def check(self, request: Request) -> None:
        """Raise for a request that can never run, and `QueueFull` for any while the queue is full."""
        if request.prompt_len == 0:
            raise RequestError("the prompt is empty; send at least one token", param="prompt")
        # One position is for the output, which a pooled request does not have.
        if request.prompt_len > self._max_model_len - (request.pooling is None):
            raise ContextLengthExceeded(
                f"the prompt has {request.prompt_len} tokens; max_model_len is {self._max_model_len}, output included",
                param="prompt"
            )
        self._running.encoders.check(request)
        lack = self._ledger.find_lack(request.limit_len, self._running.encoders.count_undivided(request))
        if lack is not None:
            raise OutOfPages(
                f"{request.prompt_len} prompt tokens and up to {request.max_output_len} output tokens need {lack[0]} "
                "KV pages, "
                f"there are {lack[1]}; lower max_tokens, shorten the prompt, or serve with more kv_pages",
                param="max_tokens",
            )
        self._check_room(request)

    def _check_room(self, request: Request) -> None:
        num_waiting = len(self._queue) + self._sharing.num_following + self._running.num_apart
        if num_waiting >= self._limits.in_all:
            raise QueueFull(
                f"{num_waiting} requests are waiting, the limit is max_queued",
                retry_after=self._pace.estimate_wait(num_waiting)
            )
        if not self._running.media.has_room(request):
            raise QueueFull(
                f"the media of requests here take {self._running.media.num_bytes >> 20} MiB, the limit is "
                "max_queued_media_mib; try again when some have ended",
                retry_after=self._pace.estimate_wait(num_waiting)
            )
        num_own = self._running.count_waiting(request.origin[:-1]) if request.origin[1:] else 0
        if num_own >= self._limits.per_client:
            raise QueueFull(
                f"{num_own} requests of this client are waiting, the limit is max_queued_per_client (each prompt and "
                "choice counts); send fewer at once",
                retry_after=self._pace.estimate_wait(num_own)
            )

    def admit_next(self, request: Request) -> Verdict:
        """Try to let ``request``, the next in line, run."""
        if not self._running.adapters.admit(request, is_alone=self._running.num_running == 0):
            self._queue.remove(request)
            return Verdict.FOLLOWS
        match = self.match(request)
        leader = None if self._exchange.has_pages(request) else self._sharing.find_leader(request, match)
        if leader is not None:
            self._sharing.follow(request, leader)
            return Verdict.FOLLOWS
        # Alone it fits, as `check` refused what never can; forced, or an expectation beyond all pages would block it.
        # But not while pages are still to be freed, which it might need.
        is_alone = self._running.num_running == 0 and not self._ledger.limbo
        expected_len = self.forecast.expect_len(request)
        at_once = self._running.encoders.count_undivided(request)
        holding = self._ledger.open(match, expected_len, at_once, force=is_alone)
        if holding is None:
            return Verdict.BLOCKED
        # Once: a retracted request has been charged. `Lifecycle.finish` settles what differs.
        self._queue.admit(request, 0 if request.charged_len else expected_len - holding.capacity)
        self._running.start_prefill(request)
        request.holding = holding
        request.cached_len = request.computed_len = request.planned_len = holding.capacity
        request.num_unsure = request.num_proposed = 0
        request.is_warm = True
        request.goal_len = request.known_len
        if self._exchange.start_importing(request) or self._start_reading(request, match):
            self._running.await_pages(request)
            self._sharing.update(request)
            return Verdict.AWAITS
        self.note_start(request)
        self._sharing.update(request)
        return Verdict.ADMITTED

    def _start_reading(self, request: Request, match: PrefixMatch) -> bool:
        hit = self._tiers.find_hit(request, match)
        return hit > match.num_pages and self._tiers.start_reading(request, hit)

    def note_start(self, request: Request) -> None:
        """Its hit is known, and the rest is computed from now on."""
        if request.num_cached_tokens < 0:  # the first admission: later ones, after a retraction, are not counted again
            request.num_cached_tokens = request.cached_len
            request.queued_s = self._clock() - request.arrived_at
            self._counters.prompt_tokens += request.prompt_len
            self._counters.cached_tokens += request.cached_len
            self._pace.note_admission(len(self._queue))

    def match(self, request: Request) -> PrefixMatch:
        """The usable prefix hit, in whole pages. Shorter than the known tokens, as at least one must be computed for
        its logits; empty for requests that need every position's hidden state, or compute all of them anew."""
        ledger = self._ledger
        if not ledger.use_prefixes or request.needs_all_tokens or request.was_doubted:
            return PrefixMatch(request.namespace, None, 0)
        whole = (request.known_len - 1) // ledger.page_size * ledger.page_size
        return ledger.match(request.namespace, request.key_bytes(0, whole))

    def hit_pages(self, request: Request) -> int:
        """Length of the hit, looked up again only when the tree has gained something since the last time."""
        version = self._ledger.tree.version
        if request.hit_version != version:
            request.hit_pages = self.match(request).num_pages
            request.hit_version = version
        return request.hit_pages

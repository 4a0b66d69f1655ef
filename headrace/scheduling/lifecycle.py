"""`Exits`: the two ways out of running, for good or back to the queue. Every path that ends a request comes through."""

from __future__ import annotations

from headrace.base.hooks import Hooks, RequestNews
from headrace.base.messages import Finish, RequestOutput
from headrace.base.step import TokenLogprobs
from headrace.scheduling.admission import OutputForecast
from headrace.scheduling.cache.ledger import CacheLedger
from headrace.scheduling.queue import WaitingQueue
from headrace.scheduling.request import Counters, Request, State
from headrace.scheduling.running import Roster
from headrace.scheduling.sharing import SharedPrefills


class Exits:
    """Gives back pages, row, place in the queue and followers, each exactly once."""

    def __init__(
        self, *, ledger: CacheLedger, roster: Roster, queue: WaitingQueue, sharing: SharedPrefills,
        forecast: OutputForecast, counters: Counters,
        hooks: Hooks,
    ):
        self._ledger = ledger
        self._roster = roster
        self._queue = queue
        self._sharing = sharing
        self._forecast = forecast
        self._counters = counters
        self._hooks = hooks

    def finish(
        self,
        request: Request,
        finish: Finish,
        token_ids: list[int],
        *,
        keep_pages: bool = True,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
        pooled: bytes | None = None,
    ) -> RequestOutput:
        """End a request in whatever state it is; the returned output is its last. ``keep_pages`` stores what it has
        computed in the prefix tree; a request that failed must not."""
        if self._hooks:
            self._hooks.dispatch("request_finished", tell_news(request), finish.reason)
        if request in self._queue:
            self._queue.remove(request)
        self._give_up_pages(request, keep_pages=keep_pages)
        self._roster.leave(request, State.FINISHED)
        if finish.reason in ("stop", "length"):
            self._forecast.note_finish(request)
        elif finish.reason == "abort":
            self._counters.aborted += 1
        num_cached = max(0, request.num_cached_tokens)
        return RequestOutput(
            request.request_id, token_ids, finish, num_cached, logprobs, prompt_logprobs, pooled, request.queued_s
        )

    def retract(self, request: Request) -> None:
        """Back to the queue, to resume later from the tokens known now. What it has computed stays in the prefix tree
        for as long as nobody needs the pages."""
        if self._hooks:
            self._hooks.dispatch("request_retracted", tell_news(request))
        self._give_up_pages(request, keep_pages=True)
        self._roster.leave(request, State.RETRACTED)
        self._queue.push(request)
        self._counters.retracted += 1

    def note_admission(self, request: Request) -> None:
        """The first token of a run is drawn."""
        if self._hooks:
            self._hooks.dispatch("request_admitted", tell_news(request))

    def store_computed(self, request: Request) -> None:
        """Put the whole pages computed so far into the prefix tree."""
        holding, page_size = request.holding, self._ledger.page_size
        end = request.computed_len // page_size
        if end > holding.stored and self._ledger.use_prefixes:
            run = request.token_bytes(holding.stored * page_size, end * page_size)
            if self._ledger.store(holding, run):
                self._roster.rewired[request] = None

    def _give_up_pages(self, request: Request, *, keep_pages: bool) -> None:
        if request.is_running:
            if keep_pages:
                self.store_computed(request)
            self._ledger.close(request.holding)
            request.holding = None  # type: ignore[assignment]
        self._sharing.leave(request)


def tell_news(request: Request) -> RequestNews:
    """What hooks are told of a request."""
    row = request.row if request.is_running else -1
    return RequestNews(request.request_id, row, request.prompt_len, request.computed_len, request.output_len)


class Retraction:
    """The lowest priority goes first, then the youngest; the oldest running request never goes.

    So there is always progress: the oldest keeps what it computed and is given whatever the others leave, and alone it
    fits, or it would have been refused on arrival.
    """

    def __init__(
        self, *, ledger: CacheLedger, roster: Roster, exits: Exits, forecast: OutputForecast, by_priority: bool
    ):
        self._ledger = ledger
        self._roster = roster
        self._exits = exits
        self._forecast = forecast
        self._by_priority = by_priority

    def make_room(self, count: int) -> bool:
        """One victim, if ``count`` pages cannot be had in every group otherwise; returns whether there was one."""
        if self._ledger.reserve(count):
            return False
        self.retract_one()
        return True

    def retract_one(self) -> Request:
        """Send one running request back to the queue."""
        victim = self._choose_victim()
        self._exits.retract(victim)
        self._forecast.note_retraction()
        return victim

    def _choose_victim(self) -> Request:
        running = list(self._roster.running())
        oldest = min(running, key=lambda request: request.seq)
        others = [request for request in running if request is not oldest]
        assert others, f"{oldest} runs alone and does not fit; it should have been refused on arrival"
        if self._by_priority:
            return min(others, key=lambda request: (request.priority, -request.seq))
        return max(others, key=lambda request: request.seq)

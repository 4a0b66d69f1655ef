"""`Lifecycle`: how a request leaves the running set, finished or retracted; `Retraction` chooses who is retracted.

Every path that ends a request comes through `Lifecycle.finish`, so pages, row and followers are released once.
"""

from __future__ import annotations

from headrace.base.hooks import Hooks, RequestUpdate
from headrace.base.messages import Finish, RequestOutput
from headrace.base.step import TokenLogprobs
from headrace.scheduling.admission import OutputForecast
from headrace.scheduling.cache.ledger import CacheLedger
from headrace.scheduling.cache.prefix_tree import find_unsound
from headrace.scheduling.drafting import Drafting
from headrace.scheduling.exchange import Exchange
from headrace.scheduling.fairness import Share
from headrace.scheduling.queue import WaitingQueue
from headrace.scheduling.request import Counters, Request, State
from headrace.scheduling.running import RunningSet
from headrace.scheduling.sharing import SharedPrefills


class Lifecycle:
    """Releases pages, row, queue entry and followers of a request, each exactly once."""

    def __init__(
        self, *, exchange: Exchange, running: RunningSet, queue: WaitingQueue, sharing: SharedPrefills,
        drafting: Drafting, forecast: OutputForecast, counters: Counters,
        hooks: Hooks,
    ):
        self._ledger, self._tiers, self._exchange = exchange.tiers.ledger, exchange.tiers, exchange
        self._running = running
        self._queue = queue
        self._sharing = sharing
        self._drafting = drafting
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
        num_draft_tokens: int = 0,
    ) -> RequestOutput:
        """End a request in any state; the returned output is its last. ``keep_pages`` stores its computed pages in the
        prefix tree; it must be False for a request whose step failed, as the content of its pages is unknown. Of
        ``token_ids`` made with drafts all but the first are accepted ones."""
        # Hooks first, while the request still has its row.
        if self._hooks:
            self._hooks.dispatch("request_finished", update_of(request), finish.reason)
        if request in self._queue:
            self._queue.remove(request)
        if request.path:
            self._queue.settle(request, max(1, request.known_len - max(0, request.num_cached_tokens)))
        self._give_up_pages(request, keep_pages=keep_pages)  # before `leave`, which makes it a request without pages
        self._running.leave(request, State.FINISHED)
        self._exchange.note_end(request, finish, token_ids, logprobs)
        if finish.reason in ("stop", "length"):
            self._forecast.note_finish(request)
        elif finish.reason == "abort":
            self._counters.aborted += 1
        num_cached = max(0, request.num_cached_tokens)
        return RequestOutput(
            request.request_id, token_ids, finish, num_cached, logprobs, prompt_logprobs, pooled, request.queued_s,
            num_draft_tokens, len(token_ids) - 1 if num_draft_tokens else 0
        )

    def doubt(self, request: Request, finish: Finish) -> RequestOutput | None:
        """The numbers of a running request were not finite. What is not known to be sound of its prefix leaves the
        prefix cache. As that may be another request's fault, it goes back to the queue once, to compute all of it
        itself, beside the cache; otherwise it ends."""
        node, keys = self._tiers.find_suspects(request)
        output = None
        if request.was_doubted or find_unsound(node) is None:
            output = self.finish(request, finish, [], keep_pages=False)
        else:
            request.was_doubted = request.skips_tiers = True
            request.hit_version = -1
            self.retract(request, keep_pages=False)
        self._tiers.forget(node, keys)  # what it pinned is evictable now
        return output

    def retract(self, request: Request, *, keeps_turn: bool = True, keep_pages: bool = True) -> None:
        """Return a running request to the queue; it resumes later from the tokens known now, before others of its
        client unless ``keeps_turn`` is false. Tokens of steps in flight
        are lost (the epoch changes) and sampled again. With ``keep_pages`` its computed pages stay in the prefix tree
        until evicted, so resuming is mostly a prefix hit."""
        if self._hooks:
            self._hooks.dispatch("request_retracted", update_of(request))
        self._give_up_pages(request, keep_pages=keep_pages)
        self._running.leave(request, State.RETRACTED)
        self._queue.push(request, keeps_turn=keeps_turn)
        self._counters.retracted += 1

    def note_admission(self, request: Request) -> None:
        """The first token since admission was sampled: tell the hooks."""
        if self._hooks:
            self._hooks.dispatch("request_admitted", update_of(request))

    def note_chunk(self, request: Request) -> None:
        """A chunk of its prefill was committed."""
        self.store_computed(request)
        self._exchange.note_computed(request)

    def store_computed(self, request: Request) -> None:
        """Put the complete pages computed so far into the prefix tree. Committed positions alone: pages that a step in
        flight still writes stay the request's own."""
        holding, page_size = request.holding, self._ledger.page_size
        begin, end = holding.stored, request.computed_len // page_size
        if end > begin and self._ledger.use_prefixes and not request.was_doubted:
            run = request.key_bytes(begin * page_size, end * page_size)
            # The tree had some of these tokens, from another request: the table now refers to those pages instead.
            if self._ledger.store(holding, run):
                self._running.rewired[request] = None
            self._tiers.note_stored(request, begin, end)

    def _give_up_pages(self, request: Request, *, keep_pages: bool) -> None:
        if request.is_running:
            if keep_pages:
                self.store_computed(request)
            self._tiers.note_used(request)
            self._ledger.close(request.holding)
            request.tickets.clear()
            request.holding = None  # type: ignore[assignment]
            self._drafting.forget(request)
        self._sharing.leave(request)


def update_of(request: Request) -> RequestUpdate:
    """The record that step hooks get."""
    row = request.row if request.is_running else -1
    return RequestUpdate(request.request_id, row, request.prompt_len, request.computed_len, request.output_len)


class Retraction:
    """Chooses who is retracted when pages run out: the lowest priority first (under that policy), then the youngest;
    never the oldest running request.

    So there is always progress: the oldest keeps what it computed and gets the pages that the others release, and alone
    it fits, or it would have been refused on arrival.
    """

    def __init__(
        self, *, ledger: CacheLedger, running: RunningSet, lifecycle: Lifecycle, forecast: OutputForecast,
        by_priority: bool,
    ):
        self._ledger = ledger
        self._running = running
        self._lifecycle = lifecycle
        self._forecast = forecast
        self._by_priority = by_priority

    def trim_decodes(self) -> bool:
        """Free pages of decoding requests that their windows no longer reach: those of the last chunk of a prompt are
        else kept until the request needs its next page. Only where pages are short, as prefix hits may want them.
        Returns whether any came free."""
        if not self._ledger.has_windows:
            return False
        before = self._ledger.num_loose
        for request in self._running.decoding:
            # of positions that are committed: the next plan may write and read others, which it must not give away
            self._ledger.trim(request.holding, request.computed_len)
        return self._ledger.num_loose > before

    def make_room(self, count: int) -> bool:
        """Retract one request if ``count`` pages cannot be freed in every group by eviction; returns whether it did."""
        if self._ledger.reserve(count):
            return False
        self.retract_one()
        return True

    def retract_one(self) -> Request:
        """Send one running request back to the queue."""
        victim = self._choose_victim()
        self._lifecycle.retract(victim)
        self._forecast.note_retraction()
        return victim

    def make_way(self, newcomer: Share) -> bool:
        """Retract a request of those that have several rows, for a client or HTTP request that has none: the youngest
        request of the client that runs most, or of the HTTP request that does so within the same client. Returns
        whether it did. Higher priorities give up nothing for lower ones."""
        path = newcomer.path
        if not self._running.num_several.get(len(path)):
            return False
        peers: dict[tuple[str, ...], list[Request]] = {}
        for request in self._running:
            if request.path[: len(path) - 1] == path[:-1] and len(request.path) >= len(path):
                peers.setdefault(request.path[: len(path)], []).append(request)
        most = max(peers.values(), key=len, default=[])
        if self._by_priority:
            most = [request for request in most if request.priority <= newcomer.priority]
        if len(most) < 2:
            return False
        self._lifecycle.retract(max(most, key=lambda request: request.seq), keeps_turn=False)
        return True

    def _choose_victim(self) -> Request:
        running = list(self._running)
        # By arrival, not by admission: a retracted request keeps its age.
        oldest = min(running, key=lambda request: request.seq)
        others = [request for request in running if request is not oldest]
        assert others, f"{oldest} runs alone and does not fit; it should have been refused on arrival"
        if self._by_priority:
            return min(others, key=lambda request: (request.priority, -request.seq))
        return max(others, key=lambda request: request.seq)

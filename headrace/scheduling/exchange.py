"""`Exchange`: pages that leave for another engine (prefill) or have come from one (decode). Integers only: bytes lie in
a region that the engine shares with its transfer agent (service/transfer), at the places that an `Extent` counts.

Refuses: peers, messages and memory of the region; `service.transfer.gate` keeps those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from headrace.base.messages import EngineRequest, Finish
from headrace.base.step import PageMove, TokenLogprobs
from headrace.base.transfer import Extent, FirstTokens, Span
from headrace.scheduling.cache.ledger import Holding
from headrace.scheduling.request import Request
from headrace.scheduling.tiering import LATE_S, Tiers
from headrace.scheduling.transfers import NO_TICKET

PEER = "peer"
"""The place of `PageMove` that stands for the region. ``PageMove.peer`` is then ``"EPOCH OFFSET"``: the life of the
agent, and the byte of the region at which the move's pages begin."""


@dataclass(frozen=True)
class Lease:
    """Bytes of the region from ``begin`` on, for the pages of one request. ``ticket`` names it to the agent, ``epoch``
    the region."""

    ticket: int
    epoch: int
    begin: int
    extent: Extent
    tickets: set[int] = field(default_factory=set)  # page moves that read it

    def place(self, group: int, first: int) -> str:
        """`PageMove.peer` of pages from table entry ``first`` on."""
        return f"{self.epoch} {self.begin + self.extent.span(group, first, first)[0]}"


@dataclass(frozen=True)
class Event:
    """News of a lease for the gate, in order. ``spans`` were filled. The last event has ``first`` (all pages are there)
    or a ``reason`` (they are not); with neither, ``is_over`` says that the engine no longer uses the lease."""

    ticket: int
    spans: list[Span] = field(default_factory=list)
    first: FirstTokens | None = None
    reason: str = ""
    is_over: bool = False


class _Export:
    """A request whose pages leave. ``num_done``: pages whose moves were opened; ``num_open`` moves have not ended.
    ``was_doubted``: of the request, when the first page left."""

    __slots__ = ("is_stopped", "last", "lease", "num_done", "num_open", "was_doubted")

    def __init__(self, lease: Lease):
        self.lease = lease
        self.num_done = self.num_open = 0
        self.is_stopped = self.was_doubted = False
        self.last: Event | None = None  # said when the last move has ended


class Role(NamedTuple):
    """An engine's part: prefill or decode. ``page_bytes`` by cache group: of a page in all layers."""

    is_prefill: bool
    page_bytes: list[int]


class Exchange:
    """Prefill-decode disaggregation. Does nothing in an engine without a role. In a prefill engine, a request whose
    pages are exported samples one token."""

    def __init__(self, tiers: Tiers, clock: Callable[[], float]):
        self.tiers, self._ledger, self._transfers = tiers, tiers.ledger, tiers.transfers
        self._clock, self._is_prefill = clock, False
        self._page_bytes: list[int] = []
        self._exports: dict[str, _Export] = {}
        self._imports: dict[str, tuple[Lease, FirstTokens]] = {}
        self.expected: dict[str, int] = {}  # held requests with a transfer, by id: their ticket, or 0
        self.events: list[Event] = []  # that the gate has not passed on yet
        self.num_sent_pages = self.num_received_pages = 0
        self.outcomes: Counter[str] = Counter()  # of requests, as the gate has seen: sent, received, lost

    def assume(self, role: Role) -> None:
        """Have a role, before the first request comes."""
        self._is_prefill, self._page_bytes = role.is_prefill, role.page_bytes

    def take_events(self) -> list[Event]:
        """Since the last call."""
        events, self.events = self.events, []
        return events

    def adapt(self, submitted: EngineRequest) -> EngineRequest:
        """A request as this engine computes it."""
        if not self._is_prefill or submitted.transfer is None or submitted.stop.max_tokens <= 1:
            return submitted
        stop = msgspec.structs.replace(submitted.stop, max_tokens=1, min_tokens=min(1, submitted.stop.min_tokens))
        return msgspec.structs.replace(submitted, stop=stop)

    def measure(self, length: int) -> Extent:
        """The pages that a request of ``length`` computed tokens needs to go on elsewhere, the last one perhaps not
        full; with those that a prefix hit at the latest page border needs."""
        page_size = self._ledger.page_size
        border = length - length % page_size
        firsts = [policy.first_needed(border) for policy in self._ledger.policies]
        return Extent.of(-(-length // page_size), firsts, self._page_bytes)

    # -- prefill ------------------------------------------------------------------------------------------------

    def export(self, request_id: str, lease: Lease) -> None:
        """Bring the pages of a request that waits into a lease, as they are computed."""
        self._exports[request_id] = _Export(lease)

    def stop(self, request_id: str, ticket: int) -> None:
        """Nobody wants the pages under a ticket any more. The request may have ended, and its id be another's."""
        export = self._exports.get(request_id)
        if export is not None and export.lease.ticket == ticket:
            export.is_stopped = True

    def note_computed(self, request: Request) -> None:
        """A chunk of a request's prefill was committed: its pages leave with the next plan, which starts moves before
        it computes, so that pages which it hands out again are read before they are written."""
        export = self._exports.get(request.request_id) if self._exports else None
        if export is None or export.is_stopped:
            return
        extent, done = export.lease.extent, export.num_done
        if not done:
            export.was_doubted = request.was_doubted
        elif export.was_doubted != request.was_doubted:  # what has left before may hold numbers that are not finite
            self._end_early(export, "the prefill engine computes its pages anew")
            self._say_last(export)
            return
        is_whole = request.computed_len >= request.prompt_len
        end = extent.num_pages if is_whole else request.computed_len // self._ledger.page_size
        if end <= done:  # also after a retraction: what was computed before is the same
            return
        export.num_done = end
        for group, table in enumerate(request.holding.tables):
            first = max(done, extent.firsts[group])
            if first < end:
                export.num_open += 1
                move = PageMove(
                    NO_TICKET, group, "device", PEER, table[first:end], list(range(end - first)),
                    peer=export.lease.place(group, first),
                )
                self._transfers.open(move, partial(self._end_export, export, (first, end)))

    def _end_export(self, export: _Export, pages: tuple[int, int], move: PageMove, failed: list[int]) -> None:
        export.num_open -= 1
        if failed and not export.is_stopped:
            self._end_early(export, "the prefill engine lost its pages")
        elif not export.is_stopped:
            self.num_sent_pages += pages[1] - pages[0]
            self.events.append(Event(export.lease.ticket, spans=[export.lease.extent.span(move.group, *pages)]))
        self._say_last(export)

    @staticmethod
    def _end_early(export: _Export, reason: str) -> None:
        export.is_stopped = True
        export.last = Event(export.lease.ticket, reason=reason, is_over=True)

    def _say_last(self, export: _Export) -> None:
        if export.last is not None and not export.num_open:
            self.events.append(export.last)
            export.last = None

    # -- decode -------------------------------------------------------------------------------------------------

    def arrive(self, request_id: str, lease: Lease, first: FirstTokens) -> None:
        """The pages of a held request are in a lease; `Scheduler.release` follows."""
        self._imports[request_id] = lease, first

    def take_first(self, request: Request) -> FirstTokens | None:
        """The first tokens of a released request, sampled by a prefill engine; None if its prompt is computed here."""
        self.expected.pop(request.request_id, None)
        found = self._imports.get(request.request_id)
        return None if found is None else found[1]

    def has_pages(self, request: Request) -> bool:
        """Whether a lease holds the pages of a request."""
        return request.request_id in self._imports

    def start_importing(self, request: Request) -> bool:
        """Fill what a request's holding lacks from its lease; False when it has none, or there are no pages for it, and
        it computes. Its tickets are those of the request, which goes on behind its prompt."""
        found = self._imports.pop(request.request_id, None) if self._imports else None
        if found is None:
            return False
        lease, holding = found[0], request.holding
        entries = None
        if holding.capacity < request.prompt_len:
            entries = self._ledger.extend(holding, lease.extent.num_pages, request.prompt_len)
        moving = [(group, begin, end) for group, (begin, end) in enumerate(entries or []) if begin < end]
        if not moving:
            self.events.append(Event(lease.ticket, is_over=True))
            return False
        for group, begin, end in moving:
            move = PageMove(
                NO_TICKET, group, PEER, "device", list(range(end - begin)), holding.tables[group][begin:end],
                peer=lease.place(group, begin),
            )
            ticket = self._transfers.open(move, partial(self._end_import, request, request.epoch, holding, lease))
            holding.arriving[ticket] = group, begin, end
            request.tickets.add(ticket)
            lease.tickets.add(ticket)
        request.arriving_len, request.awaits_until = request.prompt_len, self._clock() + LATE_S
        return True

    def _end_import(
        self, request: Request, epoch: int, holding: Holding, lease: Lease, move: PageMove, failed: list[int]
    ) -> None:
        self._ledger.end_ticket(holding, move.ticket)
        lease.tickets.discard(move.ticket)
        if not lease.tickets:
            self.events.append(Event(lease.ticket, is_over=True))
        self.num_received_pages += move.num_pages - len(failed)
        if request.epoch == epoch:
            request.tickets.discard(move.ticket)
            request.skips_tiers = request.skips_tiers or bool(failed)
            if not request.tickets:
                self.tiers.arrived.append(request)

    # -- ends ---------------------------------------------------------------------------------------------------

    def note_end(
        self, request: Request, finish: Finish, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> None:
        """A request has ended, in whatever state."""
        ticket = self.expected.pop(request.request_id, 0)
        if not self._page_bytes:
            return
        if ticket:
            self.events.append(Event(ticket, reason="the request has ended", is_over=True))
        export = self._exports.pop(request.request_id, None)
        if export is not None:
            ticket = export.lease.ticket
            if export.is_stopped:
                export.last = export.last or Event(ticket, is_over=True)
            elif finish.reason in ("stop", "length") and token_ids:
                export.last = Event(ticket, first=FirstTokens(token_ids, logprobs), is_over=True)
            else:
                message = finish.error.message if finish.error is not None else finish.reason
                export.last = Event(ticket, reason=f"the request ended on the prefill engine: {message}", is_over=True)
            self._say_last(export)
        found = self._imports.pop(request.request_id, None)
        if found is not None:
            self.events.append(Event(found[0].ticket, is_over=True))

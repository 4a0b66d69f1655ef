"""`RunningSet`: the requests that run, their device rows and adapters, and by id all requests that have not finished.

Refuses: pages, order of admission, and what a step computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from headrace.base.step import RowStart
from headrace.scheduling.adapters import AdapterSlots
from headrace.scheduling.encoding import EncoderAccount
from headrace.scheduling.held_media import HeldMedia
from headrace.scheduling.request import Request, State


class RunningSet:
    """Iterating yields the requests that have a row.

    A row is reused at once, with steps that use it still in flight: plans run in order, and each releases rows before
    it starts requests in them. Sets of requests are dicts with None values, for O(1) removal in a fixed order.
    """

    def __init__(
        self, num_rows: int, encoders: EncoderAccount, num_adapter_slots: int = 0, *, media_bytes: int = 1 << 32
    ):
        self.num_rows = num_rows
        self.adapters = AdapterSlots(num_adapter_slots)
        self.encoders = encoders  # holds what running requests still need of encoders
        self.media = HeldMedia(media_bytes)
        self.requests: dict[str, Request] = {}
        self.held: dict[Request, None] = {}  # added, but not to be queued before `Scheduler.release`
        self.prefilling: dict[Request, None] = {}  # in order of admission
        self.decoding: dict[Request, None] = {}
        self.awaiting: dict[Request, None] = {}  # those with a row whose pages are on their way, by when they began
        self.shares: dict[tuple[str, ...], int] = {}  # running requests by each beginning of their path
        self.num_several: dict[int, int] = {}  # by length: such beginnings with two running requests or more
        self._unfinished: Counter[tuple[str, ...]] = Counter()  # by client
        self.rewired: dict[Request, None] = {}  # with entries that the device has already, but that were replaced
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._newcomers: dict[Request, None] = {}  # given a row since the last plan
        self._released: list[int] = []

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding) + len(self.awaiting)

    @property
    def num_apart(self) -> int:
        """Requests that neither run nor are in the queue: held, or waiting for their adapter."""
        return len(self.held) + len(self.adapters.waiting)

    def __iter__(self) -> Iterator[Request]:
        yield from self.awaiting
        yield from self.prefilling
        yield from self.decoding

    def register(self, request: Request) -> None:
        """A request has arrived."""
        self.requests[request.request_id] = request
        self.media.enter(request)
        if request.origin:
            self._unfinished[request.origin[:-1]] += 1

    def count_waiting(self, client: tuple[str, ...]) -> int:
        """Requests of a client that have no row."""
        return self._unfinished[client] - self.shares.get(client, 0)

    def start_prefill(self, request: Request) -> None:
        """Give a request a row; it starts to prefill in the next plan."""
        self._count_shares(request, 1)
        request.row = self._free_rows.pop()
        request.state = State.PREFILLING
        self.prefilling[request] = None
        self._newcomers[request] = None
        self.adapters.enter(request)

    def start_decoding(self, request: Request) -> None:
        """All known tokens of the request are planned; from the next plan on it takes one token a step."""
        request.state = State.DECODING
        del self.prefilling[request]
        self.decoding[request] = None

    def await_pages(self, request: Request) -> None:
        """A request that has just been given a row computes nothing before its pages have arrived."""
        request.state = State.AWAITING_PAGES
        del self.prefilling[request]
        self.awaiting[request] = None

    def resume(self, request: Request) -> None:
        """Its pages have arrived: it prefills the rest."""
        request.state = State.PREFILLING
        del self.awaiting[request]
        self.prefilling[request] = None

    def leave(self, request: Request, state: State) -> None:
        """Take the row away. The new epoch makes results of steps in flight void for this request."""
        if request.is_running:
            del self._members(request.state)[request]
            self.rewired.pop(request, None)
            self.encoders.leave(request)
            self._count_shares(request, -1)
            self._free_rows.append(request.row)
            if request in self._newcomers:  # the device never heard of it
                del self._newcomers[request]
            else:
                self._released.append(request.row)
            self.adapters.leave(request)
        self.held.pop(request, None)
        self.adapters.waiting.pop(request, None)
        request.row = -1
        request.epoch += 1
        request.state = state
        if state == State.FINISHED:
            del self.requests[request.request_id]
            self.media.leave(request)
            if request.origin:
                self._forget_one(request.origin[:-1])

    def _members(self, state: State) -> dict[Request, None]:
        if state == State.AWAITING_PAGES:
            return self.awaiting
        return self.prefilling if state == State.PREFILLING else self.decoding

    def _forget_one(self, client: tuple[str, ...]) -> None:
        self._unfinished[client] -= 1
        if not self._unfinished[client]:
            del self._unfinished[client]

    def _count_shares(self, request: Request, change: int) -> None:
        path, shares = request.path, self.shares
        for end in range(1, len(path) + 1):
            number = shares[path[:end]] = shares.get(path[:end], 0) + change
            if not number:
                del shares[path[:end]]
            if number == 1 + (change > 0):  # from one to two, or back
                self.num_several[end] = self.num_several.get(end, 0) + change

    def take_changes(self) -> tuple[list[int], list[RowStart]]:
        """Rows released and started since the last plan. A request that was retracted and admitted again in
        between is in both, with its new row among the starts."""
        starts = [
            RowStart(
                request.row, request.request_id, request.tokens[:], request.prompt_len, request.sampling,
                request.pooling, self.adapters.slot_of(request.adapter), request.places
            )
            for request in self._newcomers
        ]
        released = self._released
        self._newcomers, self._released = {}, []
        return released, starts

    def free_rows(self) -> list[int]:
        """A copy, for audits."""
        return list(self._free_rows)

    def forget_device(self) -> None:
        """The executor was reset and has no rows: nothing needs releasing."""
        self._released.clear()

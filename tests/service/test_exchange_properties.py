"""Leases and tickets of engines with a role, beside an agent that is slow, loses pages, writes late and dies: no page
or lease is lost or written by two, and every request says what it says alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from headrace.base.messages import EngineRequest, RequestOutput
from headrace.base.sampling import TransferSpec
from headrace.base.step import Arrival, PageMove
from headrace.base.transfer import (
    Arrived,
    Cancel,
    Completed,
    Extent,
    Fetch,
    Filled,
    FirstTokens,
    FromAgent,
    Lost,
    Offer,
    Reclaim,
    Released,
    ToAgent,
)
from headrace.scheduling.exchange import PEER, Role
from headrace.service.coordination import WaitingRoom
from headrace.service.transfer.gate import TransferGate
from tests.scheduling.fake_runner import (
    FakeTiers,
    extend_print,
    make_ask,
    make_engine,
    make_layout,
    run_alone,
    start_print,
)
from tests.scheduling.pages_machine import MAX_MODEL_LEN, PAGE, SETTINGS, STEM_LEN, STEMS, VOCAB, PagesMachine

PAGE_BYTES = 64
GARBAGE = {0: -3}


def prompt_pages(ask: EngineRequest) -> list[dict[int, int]]:
    """What the pages of a prompt hold: fingerprints by offset."""
    pages: list[dict[int, int]] = [{} for _ in range(-(-len(ask.prompt_token_ids) // PAGE))]
    fingerprint = start_print(ask.namespace)
    for position, token in enumerate(ask.prompt_token_ids):
        fingerprint = extend_print(fingerprint, token)
        pages[position // PAGE][position % PAGE] = fingerprint
    return pages


class PeerTiers(FakeTiers):
    """Copies from and to the region too: ``region`` has a page's fingerprints by the byte where it begins."""

    def __init__(self, kv: list[dict[tuple[int, int], int]], random_: random.Random):
        super().__init__(kv, random_)
        self.region: dict[int, dict[int, int]] = {}
        self.epoch = 1

    def start(self, moves: list[PageMove]) -> None:
        for move in moves:
            if move.target == PEER:  # read before later moves and this plan write
                self.moving[move.ticket] = move, [self.page(move.group, page) for page in move.source_pages]
            elif move.source == PEER:
                self._spoil(move.group, move.target_pages)
                self.moving[move.ticket] = move, []
            else:
                super().start([move])

    def _end(self, move: PageMove, snapshot: list[dict[int, int]]) -> Arrival:
        if PEER not in (move.source, move.target):
            return super()._end(move, snapshot)
        epoch, begin = map(int, move.peer.split())
        if epoch != self.epoch or self.random.random() < self.failure_rate:
            return Arrival(move.ticket, list(range(move.num_pages)))
        for index in range(move.num_pages):
            byte = begin + index * PAGE_BYTES
            if move.target == PEER:
                self.region[byte] = snapshot[index]
                continue
            page = move.target_pages[index]
            self._spoil(move.group, [page])
            for offset, print_ in self.region[byte].items():
                self.kv[move.group][page, offset] = print_
        return Arrival(move.ticket)


class FakeAgent:
    """The agent and whoever is behind it; stands for `AgentLine`. ``open``: leases that it uses; ``asks``: requests by
    room."""

    descriptor = None

    def __init__(self, tiers: PeerTiers, num_bytes: int):
        self.tiers, self.num_bytes, self.asks = tiers, num_bytes, dict[str, EngineRequest]()
        self.is_up, self.silent_s, self.heard = True, 0.0, list[FromAgent]()
        self.open: dict[int, Offer | Fetch] = {}
        self.lost: set[int] = set()
        self.complete: dict[int, FirstTokens] = {}
        self.extent: Callable[[int], Extent]
        self.filled: dict[int, list[tuple[int, int]]] = {}

    @property
    def epoch(self) -> int:
        return self.tiers.epoch

    def poll(self) -> list[FromAgent]:
        heard, self.heard = self.heard, []
        return heard

    def send(self, message: ToAgent) -> None:
        if not self.is_up:
            return
        match message:
            case Fetch() if message.num_bytes == 0:  # pages that are not wanted
                self.heard.append(Released(message.ticket))
            case Reclaim():
                for ticket in [ticket for ticket in self.complete if isinstance(self.open.get(ticket), Offer)]:
                    self.lose(ticket)
            case Offer() | Fetch():
                self.open[message.ticket] = message
                self.filled[message.ticket] = []
            case Filled() if message.ticket in self.open:
                self.filled[message.ticket] += message.spans
            case Completed() if message.ticket in self.open:
                self.complete[message.ticket] = message.first
            case Cancel() if isinstance(self.open.get(message.ticket), Offer):
                self.release(message.ticket, message.reason)
            case Cancel() if message.ticket in self.open:
                self.lost.add(message.ticket)

    def ask_of(self, ticket: int) -> EngineRequest:
        lease = self.open[ticket]
        return self.asks[lease.spec.room if isinstance(lease, Fetch) else lease.room]

    def go_on(self, ticket: int) -> None:
        """The next thing that should happen to a lease."""
        lease = self.open[ticket]
        if ticket in self.lost:
            self.write_late(ticket)
            self.release(ticket)
        elif isinstance(lease, Fetch):
            self._bring(ticket, lease)
        elif ticket in self.complete:
            self._check(ticket, lease)
            self.release(ticket)

    def lose(self, ticket: int) -> None:
        """Its pages will not come, or are not wanted."""
        if isinstance(self.open[ticket], Offer):
            self.release(ticket, "nobody wants it")
        elif ticket not in self.lost:
            self.lost.add(ticket)
            self.heard.append(Lost(ticket, "the network"))

    def write_late(self, ticket: int) -> None:
        """A peer that has not stopped yet."""
        lease = self.open[ticket]
        for byte in range(lease.begin, lease.begin + lease.num_bytes, PAGE_BYTES):
            self.tiers.region[byte] = GARBAGE

    def release(self, ticket: int, reason: str = "") -> None:
        del self.open[ticket]
        self.lost.discard(ticket)
        self.complete.pop(ticket, None)
        self.heard.append(Released(ticket, reason))

    def die(self) -> None:
        self.is_up = False
        self.heard, self.open, self.lost, self.complete = [], {}, set(), {}

    def come_back(self) -> None:
        if not self.is_up:
            self.tiers.epoch += 1
            self.tiers.region, self.is_up = {}, True

    def _places(self, ticket: int, lease: Offer | Fetch) -> list[tuple[int, int]]:
        """``(byte, page of the prompt)`` of a lease: each group has the prompt's last pages."""
        extent = self.extent(len(self.ask_of(ticket).prompt_token_ids))
        return [
            (lease.begin + offset + i * PAGE_BYTES, first + i)
            for first, offset in zip(extent.firsts, extent.offsets, strict=True)
            for i in range(extent.num_pages - first)
        ]

    def _bring(self, ticket: int, lease: Fetch) -> None:
        pages = prompt_pages(self.ask_of(ticket))
        for byte, page in self._places(ticket, lease):
            self.tiers.region[byte] = pages[page]
        output, _ = run_alone(self.ask_of(ticket), VOCAB, MAX_MODEL_LEN)
        del self.open[ticket]
        self.heard.append(Arrived(ticket, FirstTokens(output[:1])))

    def _check(self, ticket: int, lease: Offer) -> None:
        pages, ask = prompt_pages(self.ask_of(ticket)), self.ask_of(ticket)
        for byte, page in self._places(ticket, lease):
            found = self.tiers.region[byte]
            assert {offset: found.get(offset) for offset in pages[page]} == pages[page], f"page {page} that left"
        assert sum(size for _, size in self.filled[ticket]) == lease.num_bytes, "complete, but not filled"
        assert self.complete[ticket].token_ids == run_alone(ask, VOCAB, MAX_MODEL_LEN)[0]


class ExchangeMachine(PagesMachine):
    """An engine with a role and few pages, and a region for few requests."""

    @initialize(
        is_prefill=st.booleans(), window=st.sampled_from([0, 0, 3, 9]), full=st.booleans(), spare=st.integers(0, 14),
        host_pages=st.sampled_from([0, 10, 40]), depth=st.integers(1, 2), rows=st.integers(1, 4),
        num_leases=st.integers(1, 4),
    )
    def build(self, *, is_prefill, window, full, spare, host_pages, depth, rows, num_leases):
        self.is_prefill = is_prefill
        layout = make_layout(
            1 + 16 + spare, page_size=PAGE, max_rows=rows, max_model_len=MAX_MODEL_LEN, window=window,
            window_pages=17 + spare, full=full or not window, host_pages=host_pages,
        )
        self.engine = make_engine(
            layout, vocab=VOCAB, clock=lambda: self.now, max_step_tokens=16, overlap_depth=depth
        )
        runner, scheduler = self.engine.runner, self.engine.scheduler
        runner.tiers = self.tiers = PeerTiers(runner.kv, runner.random)
        role = Role(is_prefill, [PAGE_BYTES] * len(layout.groups))
        scheduler.exchange.assume(role)
        self.agent = FakeAgent(self.tiers, num_leases * 11 * PAGE_BYTES * len(layout.groups))
        self.agent.extent = scheduler.exchange.measure
        self.gate = TransferGate(role, self.agent, scheduler.exchange, clock=lambda: self.now)
        self.room = WaitingRoom(scheduler, [self.gate])

    def submit(self, prompt: list[int], num_tokens: int, *, is_exchanged: bool, name: str = "") -> None:
        """``name``: of one that has ended, whose id comes again."""
        self.count += 1
        name, room = name or f"r{self.count}", f"room {self.count}"
        self.engine.finishes.pop(name, None)
        ask = make_ask(name, prompt, num_tokens, transfer=TransferSpec(room, "peer", 1) if is_exchanged else None)
        engine, must_wait = self.engine, self.gate.concerns(ask)
        engine.scheduler.add(ask, is_held=must_wait)
        if self.is_prefill and is_exchanged:  # samples one token
            engine.asks[name] = msgspec.structs.replace(ask, stop=msgspec.structs.replace(ask.stop, max_tokens=1))
        else:
            engine.asks[name] = ask
        self.agent.asks[room] = engine.asks[name]
        engine.tokens[name], engine.prompt_positions[name], engine.runner.namespaces[name] = [], [], ""
        if must_wait:
            self.room.enter(ask)

    @rule(
        asks=st.lists(
            st.tuples(
                st.integers(0, 3), st.integers(1, STEM_LEN), st.integers(0, 2), st.integers(1, 9),
                st.booleans(),
            ),
            min_size=1, max_size=6,
        ),
        steps=st.sampled_from([0, 3, 40]),
    )
    def add(self, asks, steps):
        for stem, length, tail, out, is_exchanged in asks:
            self.submit(STEMS[stem][:length] + [self.count % VOCAB] * tail, out, is_exchanged=is_exchanged)
        self.step(steps)

    @precondition(lambda self: self.engine.finishes)
    @rule(pick=st.integers(0, 100), stem=st.integers(0, 3), length=st.integers(1, STEM_LEN), steps=st.integers(0, 3))
    def add_again(self, pick, stem, length, steps):
        """A client that gave a request up sends another one with its id."""
        ended = list(self.engine.finishes)
        self.submit(STEMS[stem][:length], 3, is_exchanged=True, name=ended[pick % len(ended)])
        self.step(steps)

    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.poll()
            self.engine.step()
            self.engine.scheduler.check()

    def poll(self) -> list[RequestOutput]:
        outputs = self.room.poll()
        for output in outputs:
            self.engine.take([output])
        return outputs

    @rule()
    def time_passes(self):
        self.now += 6.0
        self.step(5)

    @precondition(lambda self: self.agent.open)
    @rule(pick=st.integers(0, 100), what=st.sampled_from(["go on", "go on", "go on", "lose", "write late"]))
    def agent_acts(self, pick, what):
        tickets = list(self.agent.open)
        ticket = tickets[pick % len(tickets)]
        if what == "go on":
            self.agent.go_on(ticket)
        elif what == "lose":
            self.agent.lose(ticket)
        elif ticket in self.agent.lost:
            self.agent.write_late(ticket)

    @precondition(lambda self: self.agent.open)
    @rule(steps=st.integers(0, 5))
    def agent_does_all(self, steps):
        for ticket in list(self.agent.open):
            self.agent.go_on(ticket)
        self.step(steps)

    @rule(really=st.booleans(), steps=st.integers(0, 3))
    def agent_dies(self, really, steps):
        if really:
            self.agent.die()
            self.step(steps)
            self.agent.come_back()

    @rule(silent_s=st.sampled_from([0.0, 0.0, 9.0]), steps=st.integers(0, 3))
    def agent_is_silent(self, silent_s, steps):
        self.agent.silent_s = silent_s
        self.step(steps)

    def finish(self) -> None:
        engine = self.engine
        for _ in range(2000):
            for ticket in list(self.agent.open):
                self.agent.go_on(ticket)
            self.step(1)
            if not (engine.scheduler.has_work or self.gate.is_waiting or self.agent.open or self.agent.heard):
                break
        self.poll()
        exchange = engine.scheduler.exchange
        assert not exchange._exports and not exchange._imports and not exchange.expected and not exchange.events
        assert not self.gate._held and self.gate._leases.num_taken_bytes == 0, "a lease is never given back"


ExchangeMachine.TestCase.settings = settings(SETTINGS, max_examples=40, stateful_step_count=30)
TestExchange = ExchangeMachine.TestCase


def decode_machine(*, spare: int) -> ExchangeMachine:
    machine = ExchangeMachine()
    machine.build(
        is_prefill=False, window=0, full=True, spare=spare, host_pages=40, depth=1, rows=4, num_leases=4
    )
    return machine


def test_pages_that_arrive_for_a_request_that_has_just_ended_leave_their_lease():
    machine = decode_machine(spare=8)
    machine.submit(STEMS[0], 3, is_exchanged=True)
    machine.step(1)
    machine.agent.go_on(1)  # on its way when the request ends
    machine.engine.abort("r1")
    machine.teardown()


def test_who_waits_for_memory_and_ends_does_not_get_in_the_way_of_the_next_of_its_id():
    machine = decode_machine(spare=8)
    for stem in range(4):
        machine.submit(STEMS[stem], 3, is_exchanged=True)
    machine.submit(STEMS[0][::-1], 3, is_exchanged=True)  # finds no lease
    machine.step(1)
    machine.engine.abort("r5")
    machine.submit(STEMS[1][::-1], 3, is_exchanged=True, name="r5")
    machine.step(1)
    machine.agent.go_on(1)
    machine.step(20)
    rooms = [lease.spec.room for lease in machine.agent.open.values()]
    assert "room 6" in rooms and "room 5" not in rooms
    machine.teardown()


def test_what_becomes_of_an_ended_request_does_not_stop_the_next_of_its_id():
    machine = ExchangeMachine()
    machine.build(is_prefill=True, window=0, full=True, spare=8, host_pages=40, depth=1, rows=4, num_leases=4)
    machine.submit(STEMS[0], 3, is_exchanged=True)
    machine.step(1)
    machine.engine.abort("r1")
    machine.poll()  # the agent is told, and its answer is on its way
    machine.submit(STEMS[1], 3, is_exchanged=True, name="r1")
    machine.step(20)
    assert list(machine.agent.complete) == [2]
    machine.teardown()


def test_requests_wait_for_a_silent_agent_no_longer_and_its_late_writes_reach_nobody():
    machine = decode_machine(spare=8)
    for stem in range(5):  # the last finds no lease
        machine.submit(STEMS[stem % 4], 3, is_exchanged=True)
    machine.step(1)
    assert machine.gate.is_waiting and not machine.engine.finishes
    machine.agent.silent_s = 3.5
    machine.submit(STEMS[0], 3, is_exchanged=True)
    machine.step(60)
    assert [output.finish.reason for output in machine.engine.finishes.values()] == ["length"] * 6
    assert machine.gate.outcomes == {"lost": 6}
    assert machine.gate._leases.num_taken_bytes > 0, "the agent may still have them written"
    machine.agent.silent_s = 0.0
    machine.teardown()


def test_what_arrived_before_a_failed_step_is_not_taken_for_what_the_host_has():
    machine = decode_machine(spare=0)
    for stem in range(4):  # the device forgets the first
        machine.submit(STEMS[stem][:20 + 20 * bool(stem)], 3, is_exchanged=False)
        machine.step(20)
    machine.submit(STEMS[0], 5, is_exchanged=True)
    machine.step(1)
    machine.agent.go_on(1)
    machine.tiers.delay_rate = 1.0
    machine.poll()
    machine.engine.launch()
    machine.engine.crash(RuntimeError("boom"))
    machine.teardown()
    assert machine.tiers.num_read > 0 and machine.engine.finishes["r5"].finish.reason == "length"


@pytest.mark.parametrize("has_left", [True, False])
def test_pages_that_may_hold_nan_do_not_leave_whole(has_left: bool):
    """The request is computed anew; what had left before is not sent again, so that nobody may fetch it."""
    machine = ExchangeMachine()
    machine.build(is_prefill=True, window=0, full=True, spare=8, host_pages=0, depth=1, rows=4, num_leases=4)
    stem = STEMS[0][:PAGE]
    machine.submit(stem + [1] * 20, 3, is_exchanged=False)
    machine.poll()
    machine.engine.launch()
    machine.engine.land()  # stored, and not known to be sound
    machine.submit(stem + [2] * (20 if has_left else 1), 3, is_exchanged=True)
    machine.poll()
    if has_left:
        while machine.engine.scheduler._running.requests["r2"].computed_len <= PAGE:
            machine.engine.step()
    machine.engine.launch({"r2"})
    machine.engine.land()
    machine.step(20)
    assert machine.engine.finishes["r2"].finish.reason == "length"
    assert list(machine.agent.complete) == ([] if has_left else [1])
    machine.teardown()

"""Two transfer agents and the lines of their engines: what arrives, and what happens when somebody dies or hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import numpy as np
import psutil
import pytest

from headrace.base.cache import CacheSpec
from headrace.base.errors import ConfigError
from headrace.base.sampling import TransferSpec
from headrace.base.transfer import (
    AgentOptions,
    Alive,
    Arrived,
    Cancel,
    Completed,
    Decline,
    Fetch,
    Filled,
    FirstTokens,
    FromAgent,
    GroupShape,
    Listening,
    Lost,
    Offer,
    PeerFacts,
    Released,
)
from headrace.memory.transfer.contract import Region
from headrace.service.transfer import line
from headrace.service.transfer.line import AgentLine

SIZE = 1 << 20
SPEC = CacheSpec("full", 2, 64, 64, "bfloat16")
FACTS = PeerFacts("model-1", 16, [GroupShape(SPEC, 4, 4096)])
FIRST = FirstTokens([42])
LIMIT_S = 20.0


class End:
    """One engine's side: its line, region and what its agent has said."""

    def __init__(self, facts: PeerFacts = FACTS, *, listens: bool, backend: str = "shared-memory", port: int = 0):
        self.regions: list[Region] = []
        self.heard: list[FromAgent] = []
        host = "127.0.0.1" if listens else ""
        self.line = AgentLine(AgentOptions(facts, backend, SIZE, host, port), self._attach)
        self.line.start()

    def _attach(self, region: Region | None, epoch: int) -> None:
        if region is not None:
            self.regions.append(region)

    @property
    def region(self) -> Region:
        return self.regions[-1]

    def poll(self) -> list[FromAgent]:
        self.heard += [message for message in self.line.poll() if not isinstance(message, (Alive, Listening))]
        return self.heard

    def hear(self, wanted: type, ticket: int, limit_s: float = LIMIT_S) -> FromAgent:
        """Wait for a message about a ticket."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            for message in self.poll():
                if isinstance(message, wanted) and message.ticket == ticket:
                    return message
            time.sleep(0.005)
        raise AssertionError(f"no {wanted.__name__} about {ticket} within {limit_s} s; heard {self.heard}")


@pytest.fixture
def ends() -> Iterator[Callable[..., tuple[End, End, int]]]:
    """Makes a prefill and a decode end; returns them with the port of the first."""
    with ExitStack() as undo:
        def make(backend: str = "shared-memory", facts: PeerFacts = FACTS) -> tuple[End, End, int]:
            prefill = End(listens=True, backend=backend)
            undo.callback(prefill.line.close)
            decode = End(facts, listens=False, backend=backend)
            undo.callback(decode.line.close)
            return prefill, decode, find_port(prefill.line.pid)

        yield make


def find_port(pid: int | None) -> int:
    return next(c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN)


def fill(end: End, begin: int, num_bytes: int, seed: int = 1) -> np.ndarray:
    data = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    end.region.data[begin : begin + num_bytes] = data
    return data


def fetch(ticket: int, room: str, port: int, begin: int, num_bytes: int, prompt: bytes = b"p") -> Fetch:
    return Fetch(ticket, TransferSpec(room, "127.0.0.1", port), prompt, begin, num_bytes)


def test_pages_arrive_chunk_by_chunk(ends):
    prefill, decode, port = ends()
    data = fill(prefill, 4096, 30_000)
    decode.line.send(fetch(7, "room", port, 64, 30_000))  # before the offer: routers send both requests at once
    prefill.line.send(Offer(1, "room", b"p", 4096, 30_000))
    prefill.line.send(Filled(1, [(0, 10_000)]))
    deadline = time.monotonic() + LIMIT_S
    while not (decode.region.data[64 : 64 + 10_000] == data[:10_000]).all():
        assert time.monotonic() < deadline, "the first chunk waits for the rest"
        time.sleep(0.01)
    assert not decode.poll()
    prefill.line.send(Filled(1, [(10_000, 15_000), (25_000, 5_000)]))
    prefill.line.send(Completed(1, FIRST))
    assert decode.hear(Arrived, 7).first == FIRST
    assert (decode.region.data[64 : 64 + 30_000] == data).all()
    assert not decode.region.data[:64].any() and not decode.region.data[64 + 30_000 :].any()
    assert prefill.hear(Released, 1).reason == ""


def test_first_tokens_may_be_larger_than_a_buffer(ends):
    source, target, port = ends()
    agent, first = source.line.pid, FirstTokens(list(range(4 << 20)))  # some 20 MB
    source.line.send(Offer(1, "7", b"p", 0, 64))
    target.line.send(fetch(5, "7", port, 0, 64))
    source.line.send(Filled(1, [(0, 64)]))
    source.line.send(Completed(1, first))
    arrived = target.hear(Arrived, 5)
    assert isinstance(arrived, Arrived) and arrived.first == first and source.line.pid == agent
    source.hear(Released, 1)


def test_many_rooms_over_one_link(ends):
    prefill, decode, port = ends()
    data = fill(prefill, 0, 64_000)
    for ticket in range(32):
        prefill.line.send(Offer(ticket, f"r{ticket}", b"p", ticket * 2000, 2000))
        prefill.line.send(Filled(ticket, [(0, 2000)]))
        decode.line.send(fetch(100 + ticket, f"r{ticket}", port, (31 - ticket) * 2000, 2000))
        prefill.line.send(Completed(ticket, FirstTokens([ticket])))
    for ticket in range(32):
        assert decode.hear(Arrived, 100 + ticket).first.token_ids == [ticket]
        begin = (31 - ticket) * 2000
        assert (decode.region.data[begin : begin + 2000] == data[ticket * 2000 : ticket * 2000 + 2000]).all()


@pytest.mark.parametrize("change, words", [
    ({"page_size": 32}, "page_size is 32 here and 16 there"),
    ({"model": "model-2"}, "the models, or how their weights are quantized, differ"),
    ({"groups": [GroupShape(msgspec.structs.replace(SPEC, dtype="int8"), 4, 4096)]}, "kv_dtype is int8 here and"),
    ({"groups": [GroupShape(SPEC, 5, 4096)]}, "other layers or shapes"),
])
def test_peers_that_do_not_fit_say_why(ends, change, words):
    _, decode, port = ends(facts=msgspec.structs.replace(FACTS, **change))
    decode.line.send(fetch(7, "room", port, 0, 100))
    assert words in decode.hear(Lost, 7, 5.0).reason
    decode.hear(Released, 7, 5.0)


def test_another_prompt_in_the_room_is_refused(ends):
    prefill, decode, port = ends()
    prefill.line.send(Offer(1, "room", b"one", 0, 100))
    prefill.line.send(Filled(1, [(0, 100)]))
    prefill.line.send(Completed(1, FIRST))
    decode.line.send(fetch(7, "room", port, 0, 100, prompt=b"two"))
    assert "different prompts" in decode.hear(Lost, 7).reason
    decode.hear(Released, 7)
    decode.line.send(fetch(8, "room", port, 0, 100, prompt=b"one"))  # the right one still gets it
    assert decode.hear(Arrived, 8).first == FIRST


def test_nobody_listens_there(ends):
    _, decode, _ = ends()
    decode.line.send(fetch(7, "room", 1, 0, 100))
    assert "prefill agent 127.0.0.1:1" in decode.hear(Lost, 7, 5.0).reason
    decode.hear(Released, 7, 5.0)


def test_a_room_that_is_never_offered_is_given_up_in_time(ends):
    _, decode, port = ends()
    began = time.monotonic()
    decode.line.send(fetch(7, "room", port, 0, 100))
    assert "got no such request" in decode.hear(Lost, 7).reason
    assert 4.0 < time.monotonic() - began < 7.0
    decode.hear(Released, 7)


def test_a_room_that_is_declined_is_given_up_at_once(ends):
    prefill, decode, port = ends()
    decode.line.send(fetch(1, "7.0/1", port, 0, 100))
    prefill.line.send(Offer(1, "6", b"p", 0, 100))
    decode.line.send(fetch(2, "8", port, 128, 100))
    decode.line.send(fetch(3, "71", port, 256, 100))
    time.sleep(0.2)
    for room in ("7", "8", "9"):
        prefill.line.send(Decline(room, f"no room {room}"))
    assert decode.hear(Lost, 1).reason == "no room 7" and decode.hear(Lost, 2).reason == "no room 8"
    decode.line.send(fetch(4, "9/0", port, 384, 100))  # declined before
    decode.line.send(fetch(5, "9/1", port, 512, 100))
    assert decode.hear(Lost, 4).reason == decode.hear(Lost, 5).reason == "no room 9"
    for ticket in (1, 2, 4, 5):
        decode.hear(Released, ticket)
    assert not [m for m in decode.heard if m.ticket == 3]
    prefill.line.send(Offer(2, "8", b"p", 128, 64))  # the same name again, and accepted
    decode.line.send(fetch(6, "8", port, 128, 64))
    prefill.line.send(Filled(2, [(0, 64)]))
    prefill.line.send(Completed(2, FIRST))
    assert decode.hear(Arrived, 6).first == FIRST


@pytest.mark.parametrize("is_offered", [True, False])
def test_pages_that_are_of_no_use_are_given_up_at_once(is_offered: bool, ends):
    prefill, decode, port = ends()
    messages = [Offer(1, "room", b"p", 0, 4096), Filled(1, [(0, 4096)]), Completed(1, FIRST)]
    fill(prefill, 0, 4096)
    for message in messages if is_offered else ():
        prefill.line.send(message)
    decode.line.send(fetch(7, "room", port, 0, 0))
    if not is_offered:
        time.sleep(0.2)
        for message in messages:
            prefill.line.send(message)
    assert prefill.hear(Released, 1, 4.0).reason == "the decode engine gave it up"
    decode.hear(Released, 7)
    assert not decode.region.data.any()


@pytest.mark.parametrize("fault, words", [
    ("corrupt=1", "a checksum is wrong"), ("drop=1", "a checksum is wrong"), ("refuse=1", "refused a write"),
])
def test_faults_of_the_connector_are_found(ends, fault, words):
    prefill, decode, port = ends(backend=f"faulty?{fault}")
    fill(prefill, 0, 5000)
    prefill.line.send(Offer(1, "room", b"p", 0, 5000))
    prefill.line.send(Filled(1, [(0, 5000)]))
    prefill.line.send(Completed(1, FIRST))
    decode.line.send(fetch(7, "room", port, 0, 5000))
    assert words in decode.hear(Lost, 7).reason
    decode.hear(Released, 7)
    assert not any(isinstance(message, Arrived) for message in decode.heard)


def test_delays_and_duplicates_change_nothing(ends):
    prefill, decode, port = ends(backend="faulty?delay=0.05&duplicate=1")
    data = fill(prefill, 0, 40_000)
    prefill.line.send(Offer(1, "room", b"p", 0, 40_000))
    decode.line.send(fetch(7, "room", port, 8192, 40_000))
    for begin in range(0, 40_000, 4000):
        prefill.line.send(Filled(1, [(begin, 4000)]))
    prefill.line.send(Completed(1, FIRST))
    decode.hear(Arrived, 7)
    assert (decode.region.data[8192 : 8192 + 40_000] == data).all()


def test_an_incomplete_transfer_never_counts(ends):
    prefill, decode, port = ends()
    prefill.line.send(Offer(1, "room", b"p", 0, 5000))
    prefill.line.send(Filled(1, [(0, 4999)]))
    prefill.line.send(Completed(1, FIRST))
    decode.line.send(fetch(7, "room", port, 0, 5000))
    assert "incomplete" in decode.hear(Lost, 7).reason
    decode.hear(Released, 7)


def test_a_request_that_fails_on_the_prefill_engine_is_given_up_at_once(ends):
    prefill, decode, port = ends()
    prefill.line.send(Offer(1, "room", b"p", 0, 5000))
    decode.line.send(fetch(7, "room", port, 0, 5000))
    prefill.line.send(Cancel(1, "its step failed"))
    assert "its step failed" in decode.hear(Lost, 7, 3.0).reason
    decode.hear(Released, 7)
    prefill.hear(Released, 1)


def test_an_aborted_request_releases_both_sides(ends):
    prefill, decode, port = ends()
    prefill.line.send(Offer(1, "room", b"p", 0, 5000))
    prefill.line.send(Filled(1, [(0, 100)]))
    decode.line.send(fetch(7, "room", port, 0, 5000))
    time.sleep(0.3)
    decode.line.send(Cancel(7, "the client left"))
    decode.hear(Released, 7, 3.0)
    assert "gave it up" in prefill.hear(Released, 1, 3.0).reason
    assert not any(isinstance(message, Lost) for message in decode.heard)


def test_a_killed_prefill_agent_is_noticed_and_comes_back(ends):
    prefill, decode, port = ends()
    prefill.line.send(Offer(1, "room", b"p", 0, 5000))
    decode.line.send(fetch(7, "room", port, 0, 5000))
    time.sleep(0.3)
    began, epoch = time.monotonic(), prefill.line.epoch
    os.kill(prefill.line.pid, signal.SIGKILL)
    assert "connection" in decode.hear(Lost, 7, 3.0).reason
    decode.hear(Released, 7, 3.0)
    assert time.monotonic() - began < 3.0
    while prefill.line.epoch == epoch or not prefill.line.is_up:
        prefill.poll()
        time.sleep(0.01)
        assert time.monotonic() - began < LIMIT_S
    assert len(prefill.regions) == 2
    time.sleep(2.1)  # the decode agent leaves a peer that broke alone for a moment
    port = find_port(prefill.line.pid)
    data = fill(prefill, 0, 3000, seed=2)
    prefill.line.send(Offer(2, "again", b"p", 0, 3000))
    prefill.line.send(Filled(2, [(0, 3000)]))
    prefill.line.send(Completed(2, FIRST))
    decode.line.send(fetch(8, "again", port, 0, 3000))
    decode.hear(Arrived, 8)
    assert (decode.region.data[:3000] == data).all()


def test_a_stopped_prefill_agent_keeps_the_lease_until_it_is_gone(ends):
    """It could go on in the middle of a write: its bytes must not be another request's by then."""
    prefill, decode, port = ends()
    prefill.line.send(Offer(1, "room", b"p", 0, 5000))
    decode.line.send(fetch(7, "room", port, 0, 5000))
    time.sleep(0.3)
    os.kill(prefill.line.pid, signal.SIGSTOP)
    assert "no sign of life" in decode.hear(Lost, 7, 6.0).reason
    time.sleep(0.5)
    assert not any(isinstance(message, Released) for message in decode.poll())
    os.kill(prefill.line.pid, signal.SIGKILL)
    decode.hear(Released, 7, 3.0)


def test_a_stopped_prefill_agent_that_goes_on_gives_the_lease_back(ends):
    prefill, decode, port = ends()
    prefill.line.send(Offer(1, "room", b"p", 0, 5000))
    decode.line.send(fetch(7, "room", port, 0, 5000))
    time.sleep(0.3)
    os.kill(prefill.line.pid, signal.SIGSTOP)
    decode.hear(Lost, 7, 6.0)
    os.kill(prefill.line.pid, signal.SIGCONT)
    decode.hear(Released, 7, 3.0)


def test_a_killed_decode_agent_releases_the_prefill_side(ends):
    prefill, decode, port = ends()
    prefill.line.send(Offer(1, "room", b"p", 0, 5000))
    decode.line.send(fetch(7, "room", port, 0, 5000))
    time.sleep(0.3)
    os.kill(decode.line.pid, signal.SIGKILL)
    prefill.hear(Released, 1, 3.0)


def test_a_stopped_agent_is_replaced(ends):
    _, decode, _ = ends()
    began, epoch = time.monotonic(), decode.line.epoch
    os.kill(decode.line.pid, signal.SIGSTOP)
    while decode.line.epoch == epoch or not decode.line.is_up:
        decode.poll()
        time.sleep(0.02)
        assert time.monotonic() - began < LIMIT_S
    assert decode.line.num_restarts == 1


def test_an_agent_that_cannot_be_started_again_costs_no_memory(ends, monkeypatch: pytest.MonkeyPatch):
    prefill, decode, _ = ends()
    os.kill(prefill.line.pid, signal.SIGKILL)
    with monkeypatch.context() as patch:
        patch.setattr(line, "LONGEST_PAUSE_S", 0.0)
        patch.setattr(line, "spawn_process", lambda *_: os.open("/nowhere", os.O_RDONLY))  # an `OSError`
        deadline, num_open = time.monotonic() + LIMIT_S, psutil.Process().num_fds()
        while prefill.line.num_restarts < 5:
            prefill.poll()
            assert time.monotonic() < deadline
        assert psutil.Process().num_fds() <= num_open and prefill.line.descriptor is None
    while not prefill.line.is_up:
        prefill.poll()
        assert time.monotonic() < deadline
    fill(prefill, 0, 1000)
    decode.line.send(fetch(1, "again", find_port(prefill.line.pid), 0, 1000))
    prefill.line.send(Offer(1, "again", b"p", 0, 1000))
    prefill.line.send(Filled(1, [(0, 1000)]))
    prefill.line.send(Completed(1, FIRST))
    decode.hear(Arrived, 1)


def test_an_agent_that_never_comes_to_listen_is_started_ever_more_rarely(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(line, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(line, "spawn_process", lambda *_: os.open("/nowhere", os.O_RDONLY))
    it, starts = AgentLine(AgentOptions(FACTS, "shared-memory", SIZE), lambda region, epoch: None), []
    while now < 120.0:
        now += 0.25
        it.poll()
        if it.num_restarts > len(starts):
            starts.append(now)
    assert [round(later - earlier) for earlier, later in pairwise(starts)] == [2, 4, 8, 16, 30, 30]


def test_agents_end_with_their_engine(ends):
    prefill, decode, _ = ends()
    pids = [prefill.line.pid, decode.line.pid]
    for end in (prefill, decode):
        end.line._line.close()  # as the system does when the engine is killed
    deadline = time.monotonic() + 5.0
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("backend", ["shared-memory?x=1", "faulty?drop=often", "nothing", "shared-memory?x"])
def test_a_wrong_backend_is_said_at_start(backend, capfd):
    with pytest.raises(ConfigError, match="transfer agent did not start"):
        End(listens=False, backend=backend)


def test_a_port_in_use_is_said_at_start(ends):
    _, _, port = ends()
    with pytest.raises(ConfigError, match="disaggregation_bootstrap_port"):
        End(listens=True, port=port)

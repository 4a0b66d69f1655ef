"""Pages in host memory: written through, brought back, counted once, and never awaited for ever."""

from __future__ import annotations

import random

import pytest

from headrace.base.step import Arrival, PageMove
from headrace.scheduling.transfers import Transfers
from tests.scheduling.fake_runner import FakeEngine, make_ask, make_engine, make_layout

PROMPTS = [[(7 * i + k) % 50 for i in range(32)] for k in range(4)]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def serve(engine: FakeEngine, name: str, prompt: list[int], max_tokens: int = 3) -> None:
    engine.add(make_ask(name, prompt, max_tokens))
    engine.drain()
    engine.scheduler.check()


def make_tiered(num_pages: int = 12, **options) -> FakeEngine:
    """Room for one prompt on the device, and for all in the host."""
    clock = options.pop("clock", lambda: 0.0)
    return make_engine(make_layout(num_pages, host_pages=options.pop("host_pages", 60), **options), clock=clock)


@pytest.mark.parametrize("window", [0, 6])
def test_evicted_prefixes_come_back_from_the_host(window):
    engine = make_tiered(window=window)
    for name in ("first", "second"):
        for index, prompt in enumerate(PROMPTS):
            serve(engine, f"{name}-{index}", prompt)
    engine.check_outputs()
    cached = [engine.finishes[f"second-{i}"].num_cached_tokens for i in range(4)]
    assert cached == [28] * 4  # of 32 tokens; the last page must be computed for its logits
    assert engine.runner.tiers.num_read > 0
    stats = engine.scheduler.stats()
    assert stats.evicted_pages_total > 0 and stats.num_used_pages == 0


def test_without_host_pages_they_are_computed_again():
    engine = make_tiered(host_pages=0)
    for name in ("first", "second"):
        for index, prompt in enumerate(PROMPTS):
            serve(engine, f"{name}-{index}", prompt)
    assert [engine.finishes[f"second-{i}"].num_cached_tokens for i in range(4)] == [0] * 4


def test_an_unwritten_page_that_is_evicted_is_dropped():
    engine = make_tiered(store_pages=1)
    engine.runner.tiers.delay_rate = 0.9
    for index, prompt in enumerate(PROMPTS):
        engine.add(make_ask(f"r{index}", prompt, 3))
    for _ in range(400):
        engine.step()
        engine.scheduler.check()
    engine.drain()
    engine.check_outputs()


@pytest.mark.parametrize("store_pages", [1, 3])
def test_so_many_pages_are_written_at_a_time_and_all_in_the_end(store_pages):
    """However slow the copies are, and however many pages come."""
    engine, most = make_tiered(40, store_pages=store_pages), 0
    engine.runner.tiers.delay_rate = 0.7
    for index, prompt in enumerate(PROMPTS):
        engine.add(make_ask(f"r{index}", prompt, 3))
    for _ in range(400):
        engine.step()
        moves = [move for move, _ in engine.runner.tiers.moving.values() if move.target == "host"]
        most = max(most, sum(move.num_pages for move in moves))
    engine.drain()
    assert most == store_pages
    assert engine.scheduler.stats().tiers.host.written_pages_total == 4 * 32 // 4


def test_a_late_copy_is_computed_instead_and_its_pages_stay_apart():
    clock = Clock()
    engine = make_tiered(clock=clock)
    for index, prompt in enumerate(PROMPTS):
        serve(engine, f"r{index}", prompt)
    engine.runner.tiers.delay_rate = 1.0
    engine.add(make_ask("again", PROMPTS[0], 3))
    for _ in range(5):
        engine.step()
    assert "again" not in engine.finishes and engine.runner.tiers.moving
    clock.now = 60.0
    for _ in range(3):
        engine.step()
        engine.scheduler.check()
    engine.runner.tiers.delay_rate = 0.0
    engine.drain()
    engine.scheduler.check()
    engine.check_outputs()
    assert engine.finishes["again"].num_cached_tokens == 0


def test_an_aborted_request_leaves_its_pages_to_the_ticket():
    engine = make_tiered()
    for index, prompt in enumerate(PROMPTS):
        serve(engine, f"r{index}", prompt)
    engine.runner.tiers.delay_rate = 1.0
    engine.add(make_ask("again", PROMPTS[0], 3))
    engine.step()
    engine.abort("again")
    engine.scheduler.check()
    assert engine.scheduler.stats().num_used_pages > 0, "pages under the ticket are nobody's"
    engine.runner.tiers.delay_rate = 0.0
    engine.drain()
    assert engine.scheduler.stats().num_used_pages == 0
    assert engine.scheduler.reset_prefix_cache()


def test_a_failed_copy_is_computed_instead():
    engine = make_tiered()
    for index, prompt in enumerate(PROMPTS):
        serve(engine, f"r{index}", prompt)
    engine.runner.tiers.failure_rate = 1.0
    serve(engine, "again", PROMPTS[0])
    engine.check_outputs()
    assert engine.finishes["again"].num_cached_tokens == 0


def test_a_failed_step_ends_all_tickets():
    engine = make_tiered()
    for index, prompt in enumerate(PROMPTS):
        serve(engine, f"r{index}", prompt)
    engine.runner.tiers.delay_rate = 1.0
    engine.add(make_ask("again", PROMPTS[0], 3))
    engine.launch()
    engine.crash(RuntimeError("boom"))
    engine.scheduler.check()
    engine.runner.tiers.delay_rate = 0.0
    engine.drain()
    engine.check_outputs()
    assert engine.finishes["again"].finish.reason == "length", "it was in no step that failed"


def test_a_reset_forgets_the_host_too():
    engine = make_tiered()
    serve(engine, "first", PROMPTS[0])
    assert engine.scheduler.reset_prefix_cache()
    serve(engine, "second", PROMPTS[0])
    assert engine.finishes["second"].num_cached_tokens == 0


def test_the_host_keeps_the_most_recently_used_prefixes():
    engine = make_tiered(host_pages=20)  # two prompts and a little
    for name, index in (("a", 0), ("b", 1), ("c", 0), ("d", 2), ("e", 0), ("f", 1)):
        serve(engine, name, PROMPTS[index])
    assert engine.finishes["e"].num_cached_tokens == 28, "used between the others"
    assert engine.finishes["f"].num_cached_tokens < 28


def test_transfers_end_once():
    ended = []

    def note(move: PageMove, failed: list[int]) -> None:
        ended.append((move.ticket, failed))

    transfers = Transfers()
    first = transfers.open(PageMove(0, 0, "device", "host", [1, 2], [3, 4]), note)
    second = transfers.open(PageMove(0, 0, "host", "storage", [5], [], [b"k"]), note, is_awaited=False)
    assert [move.ticket for move in transfers.take_moves()] == [first, second] and not transfers.take_moves()
    assert (transfers.num_open, transfers.num_awaited) == (2, 1)
    transfers.commit([Arrival(first, [1]), Arrival(99)])
    transfers.commit([Arrival(first)])
    transfers.forget()
    assert ended == [(first, [1]), (second, [0])] and transfers.num_open == transfers.num_awaited == 0


def test_what_the_end_of_a_forgotten_move_opens_is_forgotten_too():
    ended = []

    def note(move: PageMove, failed: list[int]) -> None:
        ended.append(move.ticket)

    transfers = Transfers()
    fetch = PageMove(0, 0, "storage", "host", [], [3], [b"k"])
    transfers.open(
        PageMove(0, 0, "storage", "", [], [], [b"k"]), lambda move, failed: ended.append(transfers.open(fetch, note))
    )
    transfers.forget()
    assert ended == [2, 2] and transfers.take_moves() == [] and transfers.num_open == 0


def test_random_traffic_reads_only_what_has_arrived():
    rng = random.Random(5)
    engine = make_tiered(20, window=6, store_pages=4)
    tiers = engine.runner.tiers
    tiers.delay_rate, tiers.failure_rate = 0.6, 0.05
    for index in range(150):
        tail = [rng.randrange(50) for _ in range(rng.randrange(3))]
        prompt = PROMPTS[rng.randrange(4)][: rng.randrange(8, 32)] + tail
        engine.add(make_ask(f"r{index}", prompt, rng.randrange(1, 8), seed=rng.randrange(3)))
        for _ in range(rng.randrange(4)):
            engine.step()
            engine.scheduler.check()
    engine.drain()
    engine.check_outputs()
    assert tiers.num_read > 50


@pytest.mark.parametrize("window", [0, 6])
def test_what_the_host_evicted_comes_back_from_storage(window):
    engine = make_tiered(host_pages=14, window=window, has_storage=True)
    for name in ("first", "second"):
        for index, prompt in enumerate(PROMPTS):
            serve(engine, f"{name}-{index}", prompt)
    engine.check_outputs()
    assert [engine.finishes[f"second-{i}"].num_cached_tokens for i in range(4)] == [28] * 4
    stats, num_fetched = engine.scheduler.stats().tiers, engine.runner.tiers.num_fetched
    assert stats.storage.read_pages_total == num_fetched > 0
    assert stats.storage.hit_tokens_total > 0 and stats.host.num_used_pages <= stats.host.num_pages


def test_a_restarted_engine_finds_what_storage_kept():
    engine = make_tiered(has_storage=True)
    serve(engine, "before", PROMPTS[0])
    restarted = make_tiered(has_storage=True)
    restarted.runner.tiers.storage = engine.runner.tiers.storage
    for name in ("one", "two", "three"):  # they wait for the same pages
        restarted.add(make_ask(name, PROMPTS[0], 3))
    restarted.drain()
    restarted.check_outputs()
    assert [restarted.finishes[name].num_cached_tokens for name in ("one", "two", "three")] == [28] * 3
    assert restarted.runner.tiers.num_fetched == 7


@pytest.mark.parametrize(("damage", "num_cached"), [
    (lambda keys: set(), 28), (set, 0), (lambda keys: {min(keys)}, None), (lambda keys: {max(keys)}, None),
])
def test_only_tokens_that_arrive_from_storage_are_counted(damage, num_cached):
    engine = make_tiered(has_storage=True)
    serve(engine, "before", PROMPTS[0])
    restarted = make_tiered(has_storage=True)
    storage = restarted.runner.tiers.storage = engine.runner.tiers.storage
    restarted.runner.tiers.damaged = damage(storage[0])
    serve(restarted, "after", PROMPTS[0])
    restarted.check_outputs()
    stats = restarted.scheduler.stats().tiers.storage
    assert stats.hit_tokens_total == restarted.finishes["after"].num_cached_tokens
    assert num_cached in (None, stats.hit_tokens_total)


def test_storage_that_does_not_answer_delays_a_request_for_so_long_and_no_longer():
    clock = Clock()
    engine = make_tiered(clock=clock, has_storage=True)
    engine.runner.tiers.delay_rate = 1.0
    engine.add(make_ask("r", PROMPTS[0], 3))
    for _ in range(5):
        engine.step()
        engine.scheduler.check()
    assert engine.scheduler.stats().num_running == 0
    clock.now = 6.0
    for _ in range(20):
        engine.step()
        engine.scheduler.check()
    assert engine.finishes["r"].finish.reason == "length" and engine.scheduler.stats().tiers.storage.late_total == 1
    engine.runner.tiers.delay_rate = 0.0
    engine.drain()


def test_a_request_that_waits_for_storage_can_be_aborted():
    engine = make_tiered(has_storage=True)
    engine.runner.tiers.delay_rate = 1.0
    engine.add(make_ask("r", PROMPTS[0], 3))
    engine.step()
    assert engine.abort("r").finish.reason == "abort"
    engine.runner.tiers.delay_rate = 0.0
    engine.drain()
    engine.scheduler.check()
    assert not engine.scheduler.has_work

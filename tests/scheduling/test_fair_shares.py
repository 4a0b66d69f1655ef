"""Equal shares of tokens: among clients, among a client's HTTP requests, and of the tokens of a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import QueueFull
from headrace.scheduling.fairness import MAX_IDLE, FairLine, divide
from headrace.scheduling.request import Request
from tests.scheduling.fake_runner import FakeEngine, make_ask, make_engine, make_layout

BATCH, OTHER = ("10.0.0.1", "batch"), ("10.0.0.2", "chat")


def steps_until(engine: FakeEngine, request_id: str) -> int:
    begin = len(engine.plans)
    while request_id not in engine.finishes:
        engine.step()
        engine.scheduler.check()
    return len(engine.plans) - begin


def fill(engine: FakeEngine, count: int, origin: tuple[str, ...], *, max_tokens: int = 20, **fields) -> None:
    for index in range(count):
        engine.add(make_ask(f"{'/'.join(origin)}-{index}", [1 + index % 40, 2, 3], max_tokens, origin=origin, **fields))


def admitted(engine: FakeEngine) -> list[str]:
    """Request ids in order of their first admission."""
    return list(dict.fromkeys(start.request_id for plan in engine.plans for start in plan.starts))


@pytest.mark.parametrize("origin", [OTHER, (BATCH[0], "chat")], ids=["another client", "another HTTP request"])
@pytest.mark.parametrize("depth", [1, 2])
def test_one_token_does_not_wait_for_a_batch(origin: tuple[str, ...], depth: int) -> None:
    engine = make_engine(make_layout(400, max_rows=4), overlap_depth=depth)
    fill(engine, 200, BATCH, max_tokens=40)
    for _ in range(10):
        engine.step()
    engine.add(make_ask("short", [7, 8], 1, origin=origin))
    assert steps_until(engine, "short") <= 3
    for index in range(5):  # one after another, as in a conversation: the batch's turn is not first
        engine.add(make_ask(f"next{index}", [7, 8, index], 1, origin=(*origin[:-1], f"next{index}")))
        assert steps_until(engine, f"next{index}") <= 3
    engine.drain()
    engine.check_outputs()


def test_a_request_whose_pages_a_batch_has_promised_gets_them() -> None:
    engine = make_engine(make_layout(34, max_rows=8), max_running_requests=8)
    fill(engine, 40, BATCH, max_tokens=40)
    for _ in range(5):
        engine.step()
    engine.add(make_ask("long", list(range(40)), 1, origin=OTHER))
    assert steps_until(engine, "long") <= 12
    engine.drain()
    engine.check_outputs()


def test_nobody_gives_up_an_only_row() -> None:
    """As many clients as rows: the next one waits for its turn."""
    engine = make_engine(make_layout(400, max_rows=3))
    for index in range(3):
        fill(engine, 1, (f"c{index}", "x"), max_tokens=30)
    engine.step()
    engine.add(make_ask("late", [7, 8], 1, origin=OTHER))
    engine.drain()
    assert engine.scheduler.stats().retracted_total == 0
    engine.check_outputs()


def test_a_higher_priority_gives_up_nothing_for_a_lower_one() -> None:
    engine = make_engine(make_layout(400, max_rows=2), policy="priority")
    fill(engine, 4, BATCH, max_tokens=10, priority=1)
    engine.step()
    engine.add(make_ask("meek", [7, 8], 1, origin=OTHER))
    engine.drain()
    assert engine.scheduler.stats().retracted_total == 0 and admitted(engine)[-1] == "meek"


def test_clients_take_turns_by_tokens_not_by_requests() -> None:
    """One sends requests of 32 tokens, one of 8: about four of the latter run for one of the former."""
    engine = make_engine(make_layout(400, max_rows=1, max_model_len=128), max_step_tokens=64)
    for index in range(12):
        engine.add(make_ask(f"large{index}", [index] * 30, 2, origin=("a", f"{index}")))
    for index in range(60):
        engine.add(make_ask(f"small{index}", [index] * 6, 2, origin=("b", f"{index}")))
    engine.drain()
    first = admitted(engine)[:40]
    assert 7 <= sum(name.startswith("large") for name in first) <= 9


def test_http_requests_of_one_prompt_stay_in_order_beside_a_batch() -> None:
    engine = make_engine(make_layout(400, max_rows=1))
    fill(engine, 10, ("c", "batch"), max_tokens=2)
    for index in range(10):
        engine.add(make_ask(f"single{index}", [9, 9, index], 2, origin=("c", f"s{index}")))
    engine.drain()
    order = admitted(engine)
    singles = [name for name in order if name.startswith("single")]
    assert singles == [f"single{index}" for index in range(10)]
    # Eleven share at first: the batch has its turn, but not all of them before the singles.
    assert order.index("single9") <= 13 and order.index("c/batch-9") >= 15


def test_an_endless_stream_of_single_requests_does_not_starve_a_batch() -> None:
    engine = make_engine(make_layout(400, max_rows=1))
    fill(engine, 10, ("c", "batch"), max_tokens=2)
    for index in range(400):
        engine.add(make_ask(f"s{index}", [9, index % 40], 2, origin=("c", f"s{index}")))
        if index >= 5:
            while f"s{index - 5}" not in engine.finishes:
                engine.step()
    assert sum(name.startswith("c/batch") for name in engine.finishes) == 10


def test_what_was_not_computed_after_all_is_given_back() -> None:
    """One client allows 60 tokens and stops after one, another says 1: they count the same."""
    engine = make_engine(make_layout(400, max_rows=1))
    for index in range(30):
        engine.add(make_ask(f"open{index}", [5, index], 60, stop_ids=list(range(50)), origin=("a", f"{index}")))
        engine.add(make_ask(f"exact{index}", [6, index], 1, origin=("b", f"{index}")))
    engine.drain()
    assert 8 <= sum(name.startswith("open") for name in admitted(engine)[:20]) <= 12


def test_who_was_away_neither_saves_up_nor_owes_for_ever() -> None:
    line = FairLine(lambda waiting, oldest: oldest, {})
    requests = [Request(make_ask(f"r{i}", [1]), seq=i, max_model_len=64, deadline=None) for i in range(200)]
    for request in requests[:100]:
        line.push(request, ("a", "x"))
    for _ in range(50):
        line.charge(("a", "x"), 1000)
        line.remove(line.peek(), ("a", "x"))
    for request in requests[100:110]:
        line.push(request, ("b", "y"))
    order = []
    for _ in range(20):
        request = line.peek()
        path = ("b", "y") if request.seq >= 100 else ("a", "x")
        line.charge(path, 1000)
        line.remove(request, path)
        order.append(path[0])
    assert order.count("b") == 10 and abs(order[:10].count("b") - 5) <= 1


def test_idle_clients_are_forgotten() -> None:
    line = FairLine(lambda waiting, oldest: oldest, {})
    keeper = Request(make_ask("keeper", [1]), seq=0, max_model_len=64, deadline=None)
    line.push(keeper, ("keeper", "x"))
    for index in range(1, 5 * MAX_IDLE):
        request = Request(make_ask(f"r{index}", [1]), seq=index, max_model_len=64, deadline=None)
        line.push(request, (f"client{index}", "x"))
        line.charge((f"client{index}", "x"), 100_000)
        line.remove(request, (f"client{index}", "x"))
    assert len(line._root.children) <= 2 + MAX_IDLE + 1 and line.peek() is keeper


def test_a_long_prompt_leaves_tokens_of_each_step_to_others() -> None:
    engine = make_engine(make_layout(400, max_rows=4, max_model_len=600), max_step_tokens=16)
    engine.add(make_ask("long", [3] * 500, 1, origin=BATCH))
    engine.step()
    engine.add(make_ask("short", [7] * 20, 1, origin=OTHER))
    assert steps_until(engine, "short") <= 4
    # The step is still full: what the short one leaves goes to the long one.
    assert all(sum(plan.lengths) == 16 for plan in engine.plans[1:4])
    engine.drain()
    engine.check_outputs()


def test_a_client_is_told_that_its_part_of_the_queue_is_full() -> None:
    engine = make_engine(make_layout(60, max_rows=1), max_queued=100, max_queued_per_client=3)
    fill(engine, 3, BATCH)
    with pytest.raises(QueueFull, match=r"3 requests of this client.*max_queued_per_client") as caught:
        engine.add(make_ask("more", [1], origin=(BATCH[0], "another")))
    assert caught.value.retry_after >= 1
    engine.add(make_ask("other", [1], origin=OTHER))
    engine.step()
    engine.add(make_ask("after a step", [1], origin=BATCH))
    for index in range(20):
        engine.add(make_ask(f"local{index}", [1]))
    engine.drain()
    engine.check_outputs()


@given(
    total=st.integers(0, 500),
    demands=st.dictionaries(st.lists(st.sampled_from("abc"), max_size=3).map(tuple), st.integers(0, 300), min_size=1),
)
def test_division_is_max_min_fair(total: int, demands: dict[tuple[str, ...], int]) -> None:
    shares = divide(total, demands)
    assert shares.keys() == demands.keys()
    assert all(0 <= shares[path] <= demands[path] for path in demands)
    assert sum(shares.values()) == min(total, sum(demands.values()))
    wanted, given = dict.fromkeys("abc", 0), dict.fromkeys("abc", 0)
    for path, demand in demands.items():
        if path:
            wanted[path[0]] += demand
            given[path[0]] += shares[path]
    for hungry in (name for name in wanted if given[name] < wanted[name]):
        assert all(given[other] <= given[hungry] + 1 for other in given)

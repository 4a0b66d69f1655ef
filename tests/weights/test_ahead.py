"""Work ahead of the consumer: order, budget, errors, and stopping early."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.models.weights.ahead import map_ahead


@settings(max_examples=50, deadline=None)
@given(costs=st.lists(st.integers(0, 50), max_size=40), budget=st.integers(0, 100), threads=st.integers(1, 4))
def test_results_come_in_order_and_the_budget_holds(costs, budget, threads):
    lock, started, taken, worst = threading.Lock(), [], [], []

    def work(item):
        with lock:
            started.append(item[1])
            outstanding = sum(started) - sum(taken)
            worst.append((outstanding, item[1]))
        return item

    results = []
    for item in map_ahead(work, enumerate(costs), cost=lambda item: item[1], budget=budget, threads=threads):
        results.append(item)
        with lock:
            taken.append(item[1])
    assert results == list(enumerate(costs))
    assert all(outstanding <= max(budget, max(costs)) + max(costs, default=0) for outstanding, _ in worst)


def test_an_error_comes_in_its_turn_and_stops_the_rest():
    done = []

    def work(i):
        if i == 3:
            raise OSError("third")
        done.append(i)
        return i

    got = []
    with pytest.raises(OSError, match="third"):
        for i in map_ahead(work, range(1000), cost=lambda _: 1, budget=4, threads=2):
            got.append(i)
    assert got == [0, 1, 2] and len(done) < 20


def test_closing_early_leaves_no_thread():
    before = set(threading.enumerate())
    results = map_ahead(lambda i: time.sleep(0.001) or i, range(1000), cost=lambda _: 1, budget=8, threads=3)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    results.close()
    assert set(threading.enumerate()) <= before

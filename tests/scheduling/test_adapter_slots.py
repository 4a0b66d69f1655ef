"""Slots of adapters: who gets one, who waits, who goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from headrace.scheduling.adapters import MOST_OVERTAKINGS, AdapterSlots

SEQ = iter(range(10**6))


@dataclass(eq=False)
class Asked:
    """What slots look at of a request."""

    seq: int
    adapter: int


def make(adapter: int) -> Any:
    return Asked(next(SEQ), adapter)


def run(slots: AdapterSlots, adapter: int) -> Any:
    """A request that runs at once."""
    request = make(adapter)
    assert slots.admit(request, is_alone=True)
    slots.enter(request)
    slots.take_loads()
    return request


def test_the_one_used_least_lately_goes():
    slots = AdapterSlots(2)
    for adapter in (1, 2, 1):
        slots.leave(run(slots, adapter))
    run(slots, 3)
    assert sorted(slots.resident) == [1, 3] and slots.evictions_total == 1


def test_a_load_takes_a_step_unless_nothing_else_runs():
    slots = AdapterSlots(2)
    request = make(1)
    assert not slots.admit(request, is_alone=False)
    assert slots.wake(is_alone=False) == []
    assert [(load.slot, load.adapter_id) for load in slots.take_loads()] == [(slots.slot_of(1), 1)]
    assert slots.wake(is_alone=False) == [request]
    assert slots.admit(request, is_alone=False)


def test_the_base_model_needs_no_slot():
    slots = AdapterSlots(0)
    assert slots.admit(make(0), is_alone=False) and slots.slot_of(0) == -1


def test_who_waits_for_a_slot_is_woken_by_the_next_end():
    slots = AdapterSlots(1)
    first, waiting = run(slots, 1), make(2)
    assert not slots.admit(waiting, is_alone=False)
    assert slots.wake(is_alone=False) == []
    slots.leave(first)
    assert slots.wake(is_alone=False) == [waiting]


def test_a_stream_of_younger_requests_cannot_hold_a_slot_for_ever():
    slots = AdapterSlots(1)
    running, old = [run(slots, 1)], make(2)
    assert not slots.admit(old, is_alone=False)
    for _ in range(MOST_OVERTAKINGS):
        young = make(1)
        assert slots.admit(young, is_alone=False)
        slots.enter(young)
        running.append(young)
    late = make(1)
    assert not slots.admit(late, is_alone=False), "the adapter is closed to younger requests"
    for request in running:
        slots.leave(request)
    assert old in slots.wake(is_alone=True)
    assert slots.admit(old, is_alone=True) and 1 not in slots.resident
    slots.enter(old)
    slots.take_loads()
    slots.leave(old)
    assert late in slots.wake(is_alone=True) or late not in slots.waiting


def test_an_adapter_is_open_again_when_who_waited_has_gone():
    slots = AdapterSlots(1)
    run(slots, 1)
    old = make(2)
    slots.admit(old, is_alone=False)
    for _ in range(MOST_OVERTAKINGS):
        slots.admit(make(1), is_alone=False)
    late = make(1)
    assert not slots.admit(late, is_alone=False)
    slots.waiting.pop(old)  # aborted
    assert slots.wake(is_alone=False) == [late] and slots.admit(late, is_alone=False)


def test_pins_leave_a_slot_for_others():
    slots = AdapterSlots(2)
    assert slots.pin(1) and not slots.pin(2)
    slots.leave(run(slots, 1))
    for adapter in (2, 3, 4):
        slots.leave(run(slots, adapter))
    assert 1 in slots.resident
    slots.pin(1, False)
    assert slots.pin(2)


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_dropped_adapter_leaves_its_slot_empty(is_sealed: bool):
    slots = AdapterSlots(1)
    request = make(1)
    assert slots.admit(request, is_alone=True)
    slots.enter(request)
    if is_sealed:
        slots.take_loads()
    slots.leave(request)
    slots.drop(1)
    assert [load.adapter_id for load in slots.take_loads()] == [0]
    slots.check([])


def test_an_arriving_adapter_that_nobody_wants_any_more_holds_no_slot():
    """Its load waits for a plan, and there is none before others run."""
    slots = AdapterSlots(1)
    gone, other = make(1), make(2)
    assert not slots.admit(gone, is_alone=False)
    slots.waiting.pop(gone)  # aborted
    assert not slots.admit(other, is_alone=False)
    assert slots.wake(is_alone=True) == [other] and slots.admit(other, is_alone=True)
    assert [load.adapter_id for load in slots.take_loads()] == [2]


def test_few_adapters_are_in_the_first_slots():
    """Whatever was given back before, in whatever order."""
    slots = AdapterSlots(6)
    for adapter in (1, 2, 3, 4, 5):
        slots.leave(run(slots, adapter))
    for adapter in (2, 4, 1):
        slots.drop(adapter)
    for adapter, slot in ((6, 0), (7, 1), (8, 3), (9, 5)):
        run(slots, adapter)
        assert slots.slot_of(adapter) == slot

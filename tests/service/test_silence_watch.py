"""How long an engine may be silent: derived from the steps that it measured, without a clock."""

from __future__ import annotations

import math

import pytest
from fakes import FakeExecutor, fake_engine
from msgspec import structs

from headrace.base.admin import ReleaseMemory
from headrace.base.config import engine_config
from headrace.base.messages import Call, EngineRequest, Outputs, Ready, Reply, Starting
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.service.engine import StepTimes
from headrace.service.supervisor import (
    LEAST_COMPILING_STALL_S,
    LEAST_LOADING_STALL_S,
    LEAST_STALL_S,
    PING,
    STALL_FACTOR,
    SilenceWatch,
)

MOST_S = 300.0
FACTS = FakeExecutor(engine_config()).facts


def loaded(step_s: float | None = None, device: str = "cpu") -> SilenceWatch:
    """The watch of an engine that is ready and has said how long its steps may take."""
    watch = SilenceWatch(MOST_S)
    watch.note_heard(Ready(structs.replace(FACTS, device=device), []))
    if step_s is not None:
        watch.note_heard(Reply(PING.call_id, step_s))
    watch.tick(1.0)
    return watch


@pytest.mark.parametrize(
    ("device", "step_s", "limit_s"),
    [
        ("cpu", 0.003, LEAST_STALL_S), ("cpu", 5.0, STALL_FACTOR * 5.0), ("cpu", 1000.0, MOST_S), ("cpu", None, MOST_S),
        ("cpu", math.inf, MOST_S), ("cuda:0", 0.003, LEAST_COMPILING_STALL_S),
    ],
)
def test_the_limit_follows_the_steps(device: str, step_s: float | None, limit_s: float):
    watch = loaded(step_s, device)
    assert watch.limit_s == limit_s
    ticks = 1
    while not watch.tick(5.0):
        ticks += 1
    assert 5.0 * ticks == limit_s


def test_a_longer_step_raises_the_limit():
    watch = loaded(0.003)
    watch.note_heard(Reply(PING.call_id, 20.0))
    assert watch.limit_s == STALL_FACTOR * 20.0


def test_any_message_is_a_sign_of_life():
    watch = loaded(0.003)
    for _ in range(100):
        assert not watch.tick(LEAST_STALL_S - 1.0)
        watch.note_heard(Outputs([]))
        assert not watch.tick(1.0)


@pytest.mark.parametrize("most_s", [MOST_S, 5.0])
def test_loading_may_take_any_time_with_signs_of_life(most_s: float):
    watch = SilenceWatch(most_s)
    for _ in range(100):
        watch.note_heard(Starting("loading weights", 0.5))
        assert not watch.tick(5.0) and not watch.is_silent
    ticks = 1
    while not watch.tick(5.0):
        ticks += 1
    assert 5.0 * ticks == max(most_s, LEAST_LOADING_STALL_S) and not watch.is_silent


def test_admin_calls_may_take_the_whole_timeout_and_other_calls_may_not():
    watch = loaded(0.003)
    watch.note_sent(Call(1, "stats"))
    assert watch.limit_s == LEAST_STALL_S
    watch.note_sent(Call(2, ReleaseMemory.method))
    assert watch.limit_s == MOST_S and not watch.tick(MOST_S - 1.0)
    watch.note_heard(Reply(2))
    assert watch.limit_s == LEAST_STALL_S


def test_a_step_of_all_tokens_is_bounded_by_what_smaller_ones_took():
    times = StepTimes(1024)
    assert times.bound_s == math.inf
    times.note(0.05, 16)  # cold
    assert times.bound_s == pytest.approx(3.2)
    times.note(0.1, 512)
    assert times.bound_s == pytest.approx(0.2)
    times.note(7.0, 1024)  # a long context
    times.note(0.1, 512)
    assert times.bound_s == 7.0


def test_an_engine_measures_its_steps():
    engine = fake_engine(delay_s=0.02)
    assert engine.step_bound_s == math.inf
    engine.submit(EngineRequest("a", [1] * 8, SamplingSpec(), StopSpec(max_tokens=2)))
    while engine.has_work:
        engine.step()
    assert 0.02 <= engine.step_bound_s < math.inf

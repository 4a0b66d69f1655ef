"""Tokens that come without a draw: fewer steps, the same outputs, whatever is in flight, stops or runs out
meanwhile."""

from __future__ import annotations

import random

import pytest

from tests.scheduling.fake_runner import FORCED, make_ask, make_engine, make_layout, run_alone

VOCAB = 50


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pages", [200, 24])
def test_outputs_are_those_of_single_steps_in_fewer_steps(depth: int, pages: int):
    layout = make_layout(pages, page_size=4, max_rows=4, max_model_len=80)
    engine = make_engine(layout, vocab=VOCAB, overlap_depth=depth, max_step_tokens=12)
    draw = random.Random(3)
    for i in range(12):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 20))]
        grammar = FORCED if i % 3 else None
        engine.add(make_ask(f"r{i}", prompt, 40, seed=i, grammar=grammar, stop_ids=[7] if i % 2 else []))
    engine.drain()
    engine.check_outputs()
    engine.scheduler.check()
    growths = [growth for plan in engine.plans for growth in plan.growths]
    sampled = sum(map(sum, (plan.samples for plan in engine.plans)))
    assert len(growths) > 20 and sampled < sum(map(len, engine.tokens.values())) * 0.9
    assert engine.scheduler.stats().generation_tokens_total == sum(map(len, engine.tokens.values()))


def run_one(depth: int, *, max_tokens: int = 30, seed: int = 0, **fields: object):
    engine = make_engine(make_layout(100, max_model_len=120), vocab=VOCAB, overlap_depth=depth)
    engine.add(make_ask("r", [1, 2, 3], max_tokens, seed=seed, grammar=FORCED, **fields))
    engine.drain()
    engine.check_outputs()
    return engine


@pytest.mark.parametrize("depth", [1, 2])
def test_a_run_may_end_the_request(depth: int):
    """At every length, and at every token as a stop, some of which fall into runs."""
    whole, _ = run_alone(make_ask("r", [1, 2, 3], 30, grammar=FORCED), VOCAB, 120)
    for length in range(1, 31):
        assert run_one(depth, max_tokens=length).finishes["r"].finish.reason == "length"
    for token in set(whole):
        assert run_one(depth, stop_ids=[token]).finishes["r"].finish.stop_id == token


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grown_request_goes_before_other_prefills(depth: int):
    engine = make_engine(
        make_layout(400, max_model_len=400, max_rows=3), vocab=VOCAB, overlap_depth=depth, max_step_tokens=8
    )
    engine.add(make_ask("short", [1, 2, 3], 40, grammar=FORCED))
    engine.step()
    engine.add(make_ask("long", list(range(50)) * 6, 2))
    while "short" not in engine.finishes:
        engine.step()
    assert "long" not in engine.finishes and engine.scheduler.stats().num_running == 1
    engine.drain()
    engine.check_outputs()


def test_an_abort_and_a_failure_between_growth_and_plan():
    engine = make_engine(make_layout(100, max_rows=2), vocab=VOCAB, overlap_depth=2)
    for name in ("a", "b"):
        engine.add(make_ask(name, [1, 2, 3], 40, grammar=FORCED))
    while not any(plan.growths for plan in engine.plans):
        engine.step()
    engine.abort("a")
    engine.crash(RuntimeError("boom"))
    engine.drain()
    engine.scheduler.check()
    assert {output.finish.reason for output in engine.finishes.values()} <= {"abort", "error", "length"}

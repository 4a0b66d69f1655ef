"""Drafts: fewer steps, the same outputs, whatever is right, in flight, stops or runs out meanwhile."""

from __future__ import annotations

import random

import pytest

from headrace.base.config import CacheConfig, SchedulerConfig
from headrace.scheduling.drafting import Drafting
from headrace.scheduling.scheduler import Scheduler
from headrace.scheduling.speculation.costs import StepCosts
from headrace.scheduling.speculation.policy import DraftPolicy
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
    assert engine.runner.num_accepted > 60
    # of the drafts that were right, the device also counts those behind the end of a request
    assert 60 < engine.num_accepted <= engine.runner.num_accepted
    steps = sum(sum(1 for length in plan.lengths[: plan.num_decodes] if length) for plan in engine.plans)
    assert steps < sum(map(len, engine.tokens.values()))
    assert engine.scheduler.stats().generation_tokens_total == sum(map(len, engine.tokens.values()))


def run_one(depth: int, *, max_tokens: int = 30, seed: int = 0, **fields: object):
    engine = make_engine(make_layout(100, max_model_len=120), vocab=VOCAB, overlap_depth=depth)
    engine.add(make_ask("r", [1, 2, 3], max_tokens, seed=seed, grammar=FORCED, **fields))
    engine.drain()
    engine.check_outputs()
    return engine


@pytest.mark.parametrize("depth", [1, 2])
def test_a_draft_may_end_the_request(depth: int):
    """At every length, and at every token as a stop, some of which are right drafts."""
    whole, _ = run_alone(make_ask("r", [1, 2, 3], 30, grammar=FORCED), VOCAB, 120)
    for length in range(1, 31):
        assert run_one(depth, max_tokens=length).finishes["r"].finish.reason == "length"
    for token in set(whole):
        assert run_one(depth, stop_ids=[token]).finishes["r"].finish.stop_id == token


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_take_no_pages_from_others_and_no_tokens_beyond_the_budget(depth: int):
    """Nobody is retracted for a draft, and a step with drafts keeps to its tokens."""
    layout = make_layout(7, page_size=4, max_rows=2, max_model_len=24)  # six pages: three each, without any to spare
    engine = make_engine(layout, vocab=VOCAB, overlap_depth=depth, max_step_tokens=8)
    for name in ("a", "b"):
        engine.add(make_ask(name, [1, 2, 3], 9, seed=ord(name), grammar=FORCED))
    engine.drain()
    engine.check_outputs()
    engine.scheduler.check()
    assert engine.scheduler.stats().retracted_total == 0
    assert max(sum(plan.lengths) for plan in engine.plans) <= 8


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_row_has_no_more_drafts_than_its_cache_takes(depth: int, most: int):
    """Whether a grammar forces them or a drafter on the device makes them."""
    layout = make_layout(200, max_model_len=120, max_rows=2)
    engine = make_engine(layout, vocab=VOCAB, overlap_depth=depth, max_step_tokens=64)
    config = SchedulerConfig(max_step_tokens=64, overlap_depth=depth, max_running_requests=2)
    policy = DraftPolicy(StepCosts(), fixed=most)
    engine.scheduler = Scheduler(
        config, CacheConfig(), layout, clock=lambda: 0.0,
        drafting=Drafting(policy, device_drafts=most, most_drafts=most),
    )
    for name, grammar in (("a", FORCED), ("b", None)):
        engine.add(make_ask(name, [1, 2, 3], 60, seed=ord(name), grammar=grammar))
    engine.drain()
    engine.check_outputs()
    lengths = [length for plan in engine.plans for length in plan.lengths[: plan.num_decodes]]
    assert max(lengths) == 1 + most


@pytest.mark.parametrize("depth", [1, 2])
def test_windows_keep_what_wrong_drafts_make_later_steps_read(depth: int):
    layout = make_layout(60, page_size=2, max_rows=3, max_model_len=90, window=3, window_pages=30)
    engine = make_engine(layout, vocab=VOCAB, overlap_depth=depth, max_step_tokens=40)
    for i in range(6):
        engine.add(make_ask(f"r{i}", [i, 2, 3], 60, seed=i, grammar=FORCED))
    engine.drain()
    engine.check_outputs()
    engine.scheduler.check()
    assert engine.runner.num_accepted > 50


@pytest.mark.parametrize("depth", [1, 2])
def test_a_wrong_guess_is_dropped(depth: int):
    engine = make_engine(make_layout(100, max_model_len=120), vocab=VOCAB, overlap_depth=depth, max_step_tokens=64)
    engine.add(make_ask("r", [1, 2, 3], 40))
    while not engine.tokens["r"]:
        engine.step()
    request = engine.scheduler._running.requests["r"]
    engine.scheduler._drafting.guess(request, request.known_len, [-7] * 20)  # no token is negative
    engine.drain()
    engine.check_outputs()
    assert [draft.row for plan in engine.plans for draft in plan.drafts] == [0]


def test_an_abort_and_a_failure_with_drafts_in_flight():
    engine = make_engine(make_layout(100, max_rows=2), vocab=VOCAB, overlap_depth=2)
    for name in ("a", "b"):
        engine.add(make_ask(name, [1, 2, 3], 40, grammar=FORCED))
    while not any(plan.drafts for plan in engine.plans):
        engine.step()
    engine.abort("a")
    engine.crash(RuntimeError("boom"))
    engine.drain()
    engine.scheduler.check()
    assert {output.finish.reason for output in engine.finishes.values()} <= {"abort", "error", "length"}


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_grammar_forces_comes_before_drafts_of_the_device(depth: int):
    """In its own row and nowhere else; the device's drafts are verified where nothing is forced."""
    layout = make_layout(200, max_model_len=120, max_rows=2)
    engine = make_engine(layout, vocab=VOCAB, overlap_depth=depth, max_step_tokens=64)
    config = SchedulerConfig(max_step_tokens=64, overlap_depth=depth, max_running_requests=2)
    engine.scheduler = Scheduler(
        config, CacheConfig(), layout, clock=lambda: 0.0,
        drafting=Drafting(DraftPolicy(StepCosts(), fixed=3), device_drafts=3),
    )
    for name, grammar in (("a", FORCED), ("b", None)):
        engine.add(make_ask(name, [1, 2, 3], 60, seed=ord(name), grammar=grammar))
    engine.drain()
    engine.check_outputs()
    assert engine.runner.num_accepted > 20
    forced = [{draft.row for draft in plan.drafts} for plan in engine.plans]
    drafted = [
        {row for row, length in zip(plan.rows[: plan.num_decodes], plan.lengths, strict=False) if length > 1}
        for plan in engine.plans
    ]
    assert set().union(*forced) == {0} and any(1 in rows for rows in drafted)
    assert all(guessed <= rows for guessed, rows in zip(forced, drafted, strict=True)), "only what is verified"
    assert any(0 in rows - guessed for guessed, rows in zip(forced, drafted, strict=True))

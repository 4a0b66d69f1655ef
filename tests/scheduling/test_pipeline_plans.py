"""Plans of a pipeline: as many in flight as stages, each with its part of the decodes, and chunks that follow."""

from __future__ import annotations

import pytest

from tests.scheduling.fake_runner import FORCED, FakeEngine, make_ask, make_engine, make_layout


def start(num_stages: int, num_asks: int, **options: int) -> FakeEngine:
    engine = make_engine(make_layout(200, max_rows=16), num_stages=num_stages, max_step_tokens=16, **options)
    for index in range(num_asks):
        engine.add(make_ask(f"r{index}", [index, 1, 2], 12, seed=index))
    return engine


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_decodes_spread_over_as_many_plans_as_stages(num_stages: int):
    engine = start(num_stages, 2 * num_stages)
    for _ in range(3 * num_stages):
        engine.step()
    plans = engine.plans[-num_stages:]
    assert [plan.num_decodes for plan in plans] == [2] * num_stages
    assert len({row for plan in plans for row in plan.rows}) == 2 * num_stages
    engine.drain()
    engine.check_outputs()


def test_one_request_has_one_plan_in_flight_at_a_time():
    engine = start(4, 1)
    while engine.scheduler.has_work:
        while engine.launch():
            pass
        assert len(engine.flights) == 1
        engine.land()
    engine.check_outputs()


def test_chunks_of_a_long_prompt_fill_the_pipeline():
    engine = make_engine(make_layout(200, max_model_len=128), num_stages=4, max_step_tokens=16)
    engine.add(make_ask("long", [i % 50 for i in range(60)], 3))
    while engine.launch():
        pass
    assert [(plan.begins, plan.lengths, plan.samples) for plan, _ in engine.flights] == [
        ([0], [16], [0]), ([16], [16], [0]), ([32], [16], [0]), ([48], [12], [1])
    ]
    engine.drain()
    engine.check_outputs()


def test_a_prompt_that_fits_one_step_has_a_chunk_for_each_stage():
    engine = make_engine(make_layout(900, max_model_len=3000), num_stages=3, max_step_tokens=2048)
    engine.add(make_ask("long", [i % 50 for i in range(1500)], 3))
    engine.add(make_ask("short", [7 + i % 40 for i in range(300)], 3))
    while engine.launch():
        pass
    assert [plan.lengths for plan, _ in engine.flights] == [[500, 256], [500, 44], [500]]
    engine.drain()
    engine.check_outputs()


def test_decodes_and_chunks_share_plans():
    engine = start(2, 4)
    for _ in range(4):
        engine.step()
    engine.add(make_ask("long", [i % 50 for i in range(50)], 3))
    engine.step()
    engine.step()
    assert all(plan.num_decodes == 2 and len(plan.rows) == 3 for plan in engine.plans[-2:])
    engine.drain()
    engine.check_outputs()


def test_drafts_of_text_are_verified_once_the_text_is_known():
    engine = start(2, 0)
    for index in range(4):
        engine.add(make_ask(f"r{index}", [index, 1, 2], 20, seed=index, grammar=FORCED))
    engine.drain()
    engine.check_outputs()
    assert engine.runner.num_accepted, "drafts were verified"


def test_one_stage_says_no_last_tokens():
    engine = start(1, 3, overlap_depth=2)
    engine.drain()
    assert not any(plan.last_tokens for plan in engine.plans)
    assert engine.scheduler.depth == 2

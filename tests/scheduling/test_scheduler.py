"""What a plan says, how requests are refused, stopped, cancelled, failed and retracted, one behaviour at a time."""

from __future__ import annotations

import msgspec
import pytest

from headrace.base.errors import ContextLengthExceeded, OutOfPages, QueueFull, RequestError
from headrace.base.step import StepResult, TokenLogprobs
from tests.scheduling.fake_runner import FakeEngine, make_ask, make_engine, make_layout, run_alone


def finish_reasons(engine: FakeEngine) -> dict[str, str]:
    return {request_id: output.finish.reason for request_id, output in engine.finishes.items()}


# -- plans --------------------------------------------------------------------------------------------------------


def fail(engine: FakeEngine, name: str) -> None:
    """Take steps in which the row of a request fails, until it has ended."""
    while name not in engine.finishes:
        engine.launch({name})
        engine.land()


def test_decodes_come_first_and_prefills_share_what_is_left_of_the_budget() -> None:
    engine = make_engine(make_layout(60, max_rows=5), max_step_tokens=16)
    engine.add(make_ask("a", [1] * 3, 9))
    engine.add(make_ask("b", [2] * 4, 9))
    first = engine.launch()
    assert (first.num_decodes, first.lengths, first.samples) == (0, [3, 4], [1, 1])
    engine.land()
    engine.add(make_ask("c", [3] * 9, 9))
    engine.add(make_ask("d", [4] * 9, 9))
    second = engine.launch()
    assert (second.num_decodes, second.lengths, second.samples) == (2, [1, 1, 9, 5], [1, 1, 1, 0])
    assert second.begins == [3, 4, 0, 0]
    engine.land()
    third = engine.launch()
    assert (third.num_decodes, third.lengths, third.begins[3]) == (3, [1, 1, 1, 4], 5)
    engine.drain()
    engine.check_outputs()


def test_a_long_prompt_is_cut_into_chunks_under_the_budget() -> None:
    engine = make_engine(make_layout(60, max_model_len=64), max_step_tokens=10)
    engine.add(make_ask("a", [*range(35)], 2))
    engine.drain()
    assert [plan.lengths for plan in engine.plans] == [[10], [10], [10], [5], [1]]
    assert [plan.samples for plan in engine.plans] == [[0], [0], [0], [1], [1]]


def test_never_more_running_than_rows_or_budget() -> None:
    engine = make_engine(make_layout(200, max_rows=20), max_step_tokens=8)
    for index in range(20):
        engine.add(make_ask(f"r{index}", [index], 5))
    while engine.scheduler.has_work:
        engine.step()
        assert engine.scheduler.stats().num_running <= 8
    assert all(sum(plan.lengths) <= 8 for plan in engine.plans)
    engine.check_outputs()


def test_with_overlap_no_token_beyond_the_limit_is_planned() -> None:
    engine = make_engine(make_layout(60), overlap_depth=2)
    engine.add(make_ask("a", [1, 2], 3))
    assert engine.launch() and engine.launch()
    assert engine.launch() is None  # depth reached
    engine.land()
    assert engine.launch().begins == [3]
    engine.land()
    assert engine.launch() is None  # all three tokens are in flight or known
    engine.land()
    assert finish_reasons(engine) == {"a": "length"} and engine.runner.num_computed == 4


def test_a_stop_found_late_costs_one_step_and_says_nothing_more() -> None:
    ask = make_ask("a", [1, 2], 10)
    stop = run_alone(ask, 50, 64)[0][1]
    engine = make_engine(make_layout(60), overlap_depth=2)
    engine.add(make_ask("a", [1, 2], 10, eos_ids=[stop]))
    engine.drain()
    engine.check_outputs()
    assert engine.finishes["a"].finish.stop_id == stop
    assert engine.runner.num_computed == 2 + 2  # the prompt, one decode, one decode too many


# -- stopping -----------------------------------------------------------------------------------------------------


def test_stop_ids_count_from_min_tokens_on() -> None:
    want, _ = run_alone(make_ask("a", [5], 12), 4, 64)
    stop = want[0]
    engine = make_engine(make_layout(60), vocab=4)
    engine.add(make_ask("a", [5], 12, stop_ids=[stop], min_tokens=3))
    engine.drain()
    engine.check_outputs()
    assert len(engine.tokens["a"]) >= 3


def test_output_ends_at_max_model_len() -> None:
    engine = make_engine(make_layout(60, max_model_len=16))
    engine.add(make_ask("a", [1] * 10, 100))
    engine.drain()
    assert len(engine.tokens["a"]) == 6 and finish_reasons(engine) == {"a": "length"}


def test_zero_max_tokens_reports_the_prompt_alone() -> None:
    engine = make_engine(make_layout(60), max_step_tokens=8)
    engine.add(make_ask("a", [*range(20)], 0, prompt_logprobs=1))
    engine.drain()
    assert engine.tokens["a"] == [] and engine.prompt_positions["a"] == list(range(1, 20))
    assert finish_reasons(engine) == {"a": "length"}


def test_prompt_logprobs_are_computed_in_full_and_reported_once() -> None:
    engine = make_engine(make_layout(60), max_step_tokens=8)
    prompt = [*range(20)]
    engine.add(make_ask("warm", prompt, 1))
    engine.drain()
    engine.add(make_ask("a", prompt, 4, prompt_logprobs=0))
    engine.step()
    assert engine.prompt_positions["a"] == list(range(1, 9))
    engine.scheduler._lifecycle.retract(engine.scheduler._running.requests["a"])
    engine.drain()
    engine.check_outputs()
    assert engine.finishes["a"].num_cached_tokens == 0


def test_logprobs_go_with_their_tokens() -> None:
    engine = make_engine(make_layout(60))
    engine.add(make_ask("a", [1], 2))
    plan = engine.scheduler.plan()
    entry = TokenLogprobs(7, -0.5, 1)
    (output,) = engine.scheduler.commit(plan, StepResult(plan.step_id, [7], [entry]))
    assert output.token_ids == [7] and output.logprobs == [entry]
    plan = engine.scheduler.plan()
    (output,) = engine.scheduler.commit(plan, StepResult(plan.step_id, [8], [None]))
    assert output.token_ids == [8] and output.logprobs is None and output.finish.reason == "length"


# -- refusing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "error", "param"),
    [
        (make_ask("x", []), RequestError, "prompt"),
        (make_ask("x", [1] * 64), ContextLengthExceeded, "prompt"),
        (make_ask("x", [1] * 40, 20), OutOfPages, "max_tokens"),
        (make_ask("known", [1]), RequestError, "request_id"),
    ],
)
def test_a_wrong_request_is_refused_and_leaves_nothing(ask, error, param) -> None:
    engine = make_engine(make_layout(13))
    engine.add(make_ask("known", [1]))
    with pytest.raises(error) as caught:
        engine.scheduler.add(ask)
    assert caught.value.param == param
    engine.drain()
    engine.check_outputs()
    assert engine.scheduler.stats().requests_total == 1


def test_a_full_queue_says_when_to_come_back() -> None:
    engine = make_engine(make_layout(60, max_rows=1), max_queued=2)
    engine.add(make_ask("running", [1], 50))
    engine.step()
    engine.add(make_ask("a", [1]))
    engine.add(make_ask("b", [1]))
    with pytest.raises(QueueFull) as caught:
        engine.add(make_ask("c", [1]))
    assert 1 <= caught.value.retry_after <= 60
    engine.abort("a")
    engine.add(make_ask("c", [1]))
    engine.drain()
    assert sorted(engine.finishes) == ["a", "b", "c", "running"]


# -- cancelling in every state --------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "state", ["queued", "following", "prefilling", "decoding", "in flight", "retracted", "finished"]
)
@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_a_request_can_be_ended_in_every_state(state: str, depth: int, how: str) -> None:
    now = [0.0]
    engine = make_engine(make_layout(40, max_rows=2), clock=lambda: now[0], max_step_tokens=8, overlap_depth=depth)
    scheduler, stem = engine.scheduler, [*range(6)]
    if state in ("queued", "following"):
        engine.add(make_ask("other", stem, 9))
    if state == "queued":
        engine.add(make_ask("other2", [40], 9))
        engine.step()
    engine.add(
        make_ask("x", stem if state == "following" else [7] * 12, 2 if state == "finished" else 9, deadline_s=5.0)
    )
    if state == "following":
        engine.launch()
        assert scheduler._running.requests["x"].leader is not None
    elif state == "prefilling":
        engine.step()
    elif state == "in flight":
        engine.launch()
    elif state != "queued":
        for _ in range(4):
            engine.step()
    if state == "retracted":
        scheduler._lifecycle.retract(scheduler._running.requests["x"])
    if state == "finished":
        engine.drain()
    now[0] = 6.0
    ended = [scheduler.abort("x")] if how == "abort" else scheduler.expire()
    scheduler.check()
    if state == "finished":
        assert ended in ([None], [])
    else:
        (output,) = engine.take(ended)
        assert output.request_id == "x" and output.finish.reason == ("abort" if how == "abort" else "error")
        assert how == "abort" or output.finish.error.kind == "deadline_exceeded"
    engine.drain()
    engine.check_outputs()
    assert scheduler.abort("x") is None and scheduler.expire() == []


def test_an_id_can_be_used_again_after_its_request_ended() -> None:
    now = [0.0]
    engine = make_engine(make_layout(40), clock=lambda: now[0])
    engine.scheduler.add(make_ask("x", [1], 50, deadline_s=5.0))
    engine.scheduler.abort("x")
    engine.add(make_ask("x", [1], 3))
    now[0] = 6.0
    assert engine.scheduler.expire() == []
    engine.drain()
    engine.check_outputs()


def test_the_default_deadline_applies_to_requests_without_one() -> None:
    now = [0.0]
    engine = make_engine(make_layout(40), clock=lambda: now[0], default_deadline_s=2.0)
    engine.add(make_ask("a", [1], 50))
    engine.add(make_ask("b", [1], 50, deadline_s=9.0))
    now[0] = 3.0
    assert [output.request_id for output in engine.take(engine.scheduler.expire())] == ["a"]


# -- failing ------------------------------------------------------------------------------------------------------


def test_a_failed_row_fails_its_request_alone_and_is_not_cached() -> None:
    engine = make_engine(make_layout(60))
    engine.add(make_ask("bad", [1] * 8, 5))
    engine.add(make_ask("good", [2] * 8, 5))
    engine.launch({"bad"})
    engine.land()
    assert engine.finishes["bad"].finish.error.kind == "step_failed" and "good" not in engine.finishes
    assert engine.scheduler.stats().num_evictable_pages == 0
    engine.drain()
    engine.check_outputs()


@pytest.mark.parametrize("window", [0, 9])
def test_what_a_failed_row_has_stored_is_forgotten(window: int) -> None:
    """Earlier chunks have stored it, and weights of 0 carry NaN into positions before that of its cause. Pages of which
    another request has got a token stay."""
    engine = make_engine(make_layout(60, window=window), max_step_tokens=8)
    engine.add(make_ask("other", [1] * 8 + [3] * 8, 1))
    engine.drain()
    engine.add(make_ask("bad", [1] * 24, 5))
    engine.launch()
    engine.land()
    fail(engine, "bad")
    assert engine.finishes["bad"].finish.error.kind == "step_failed"
    for name, prompt, cached in (("same", [1] * 24, 8), ("known", [1] * 8 + [3] * 9, 16)):
        engine.add(make_ask(name, prompt, 1))
        engine.drain()
        assert engine.finishes[name].num_cached_tokens == cached, name
    engine.check_outputs()


def test_pages_that_fill_a_gap_in_a_sound_prefix_are_forgotten_too() -> None:
    """The window's pages had gone, and were computed again: nobody has read these."""
    engine = make_engine(make_layout(60, window=4, window_pages=8), max_step_tokens=8)
    engine.add(make_ask("first", [1] * 16, 1))
    engine.drain()
    engine.add(make_ask("other", [2] * 40, 1))  # takes pages of the window
    engine.drain()
    engine.add(make_ask("bad", [1] * 17, 5))
    engine.launch()
    engine.land()
    fail(engine, "bad")
    engine.drain()
    engine.add(make_ask("after", [1] * 17, 1))
    engine.drain()
    assert engine.finishes["after"].num_cached_tokens == 0
    engine.check_outputs()


def test_who_read_pages_of_a_failed_row_computes_them_anew() -> None:
    """The bad one does so, too, and fails again."""
    engine = make_engine(make_layout(60, max_rows=4), max_step_tokens=24)
    engine.add(make_ask("bad", [1] * 40, 5))
    engine.launch()
    engine.land()  # 24 tokens are stored
    engine.add(make_ask("reader", [1] * 24 + [2], 5))
    assert engine.launch({"bad", "reader"}).lengths == [16, 1]
    engine.land()
    assert not engine.finishes
    fail(engine, "bad")
    engine.drain()
    assert engine.finishes["bad"].finish.error.kind == "step_failed" and len(engine.tokens["reader"]) == 5
    engine.check_outputs()


def test_pages_of_a_failed_row_leave_the_host_too() -> None:
    engine = make_engine(make_layout(60, host_pages=40, store_pages=1), max_step_tokens=8)
    engine.add(make_ask("bad", [1] * 20, 5))
    for failed in ((), (), {"bad"}, (), (), {"bad"}):
        engine.launch(failed)
        engine.land()
    assert engine.finishes["bad"].finish.error.kind == "step_failed"
    engine.drain()  # what was on its way to the host
    engine.scheduler.reset_prefix_cache()
    engine.add(make_ask("after", [1] * 20, 1))
    engine.drain()
    assert engine.finishes["after"].num_cached_tokens == 0


def test_pages_of_a_failed_row_are_not_read_from_storage_again() -> None:
    """It keeps what it has: whoever read them would be computed twice."""
    engine = make_engine(make_layout(60, host_pages=40, store_pages=8, has_storage=True), max_step_tokens=8)
    engine.add(make_ask("bad", [1] * 20, 5))
    engine.add(make_ask("beside", [2] * 4, 30))
    while not any(engine.runner.tiers.storage):
        engine.launch()
        engine.land()
    fail(engine, "bad")
    engine.drain()
    engine.scheduler.reset_prefix_cache()
    assert engine.finishes["bad"].finish.error.kind == "step_failed"
    engine.add(make_ask("after", [1] * 20, 1))
    engine.add(make_ask("sound", [2] * 4 + engine.tokens["beside"], 1))
    engine.drain()
    assert engine.finishes["after"].num_cached_tokens == 0 < engine.finishes["sound"].num_cached_tokens


def test_a_row_whose_own_grammar_allows_nothing_is_a_wrong_request() -> None:
    engine = make_engine(make_layout(60))
    engine.add(make_ask("bad", [1] * 8, 5))
    engine.launch({"bad"})
    plan, result = engine.flights[-1]
    engine.flights[-1] = (plan, msgspec.structs.replace(result, failed_rows=[], refused_rows=result.failed_rows))
    engine.land()
    assert engine.finishes["bad"].finish.error.kind == "invalid_request_error"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_step_ends_its_requests_and_others_resume(depth: int) -> None:
    engine = make_engine(make_layout(60, max_rows=3), max_step_tokens=8, overlap_depth=depth)
    engine.add(make_ask("a", [1] * 8, 9))
    engine.add(make_ask("b", [2] * 20, 9))
    engine.launch()  # a alone
    if depth == 2:
        engine.launch()  # a decodes, b begins
        assert len(engine.plans[1].rows) == 2
    outputs = engine.crash(ValueError("boom"))
    assert [output.request_id for output in outputs] == ["a"] and "boom" in outputs[0].finish.error.message
    engine.scheduler.check()
    if depth == 2:
        engine.land()  # the result of a step that the failure made void
        assert engine.tokens["a"] == engine.tokens["b"] == []
    engine.drain()
    engine.check_outputs()
    assert engine.scheduler.stats().failed_steps_total == 1


# -- pages run out ------------------------------------------------------------------------------------------------


def test_the_tree_gives_way_before_any_request_does() -> None:
    engine = make_engine(make_layout(13, max_rows=2))
    engine.add(make_ask("old", [9] * 30, 1))
    engine.drain()
    assert engine.scheduler.stats().num_evictable_pages == 7
    engine.add(make_ask("new", [1] * 20, 20))
    engine.drain()
    stats = engine.scheduler.stats()
    assert stats.retracted_total == 0 and stats.evicted_pages_total > 0
    engine.check_outputs()


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", "young"), ("priority", "minor")])
def test_the_youngest_or_least_important_gives_way(policy: str, victim: str) -> None:
    engine = make_engine(make_layout(16, max_rows=3), policy=policy, max_step_tokens=24)
    engine.scheduler._admission.forecast.expect_len = lambda request: request.known_len
    engine.add(make_ask("old", [1] * 8, 30))
    engine.add(make_ask("minor", [2] * 8, 30, priority=-1))
    engine.add(make_ask("young", [3] * 8, 30))
    first = None
    while engine.scheduler.has_work:
        engine.step()
        engine.scheduler.check()
        if first is None and engine.scheduler.stats().retracted_total:
            first = (
                {r.request_id for r in engine.scheduler._running.requests.values()}
                - {r.request_id for r in engine.scheduler._running}
            )
    assert first == {victim}
    engine.check_outputs()


def test_the_oldest_running_request_never_gives_way() -> None:
    engine = make_engine(make_layout(16, max_rows=3), policy="priority", max_step_tokens=24)
    engine.scheduler._admission.forecast.expect_len = lambda request: request.known_len
    engine.add(make_ask("meek", [1] * 8, 30, priority=-9))
    engine.step()
    for index in range(4):
        engine.add(make_ask(f"proud{index}", [2, index] * 4, 30, priority=9))
    while "meek" not in engine.finishes:
        assert engine.scheduler._running.requests["meek"].is_running
        engine.step()
    assert engine.scheduler.stats().retracted_total > 0
    engine.drain()
    engine.check_outputs()


def test_output_is_promised_so_that_nobody_is_retracted() -> None:
    """Requests that use all of max_tokens: after the first few are seen, the rest are admitted only as they fit."""
    engine = make_engine(make_layout(1 + 40, max_rows=16, max_model_len=64), max_step_tokens=64)
    engine.scheduler._admission.forecast.share = 1.0
    for index in range(30):
        engine.add(make_ask(f"r{index}", [index] * 4, 28))
    most = 0
    while engine.scheduler.has_work:
        engine.step()
        most = max(most, engine.scheduler.stats().num_running)
    assert engine.scheduler.stats().retracted_total == 0 and most == 5  # 8 pages each
    engine.check_outputs()


def test_the_forecast_learns_from_short_outputs() -> None:
    engine = make_engine(make_layout(60), vocab=2)
    start = engine.scheduler._admission.forecast.share
    for index in range(40):
        engine.add(make_ask(f"r{index}", [1, index], 40, eos_ids=[0, 1]))
    engine.drain()
    assert engine.scheduler._admission.forecast.share < start / 2


# -- prefixes -----------------------------------------------------------------------------------------------------


def test_a_follower_waits_for_the_shared_part_and_then_hits_it() -> None:
    engine = make_engine(make_layout(80, max_rows=3), max_step_tokens=8)
    stem = [*range(24)]
    engine.add(make_ask("leader", [*stem, 30], 3))
    engine.add(make_ask("follower", [*stem, 31], 3))
    engine.add(make_ask("stranger", [40] * 5, 3))
    engine.drain()
    engine.check_outputs()
    assert {
        request_id: output.num_cached_tokens for request_id, output in engine.finishes.items()
    } == {"leader": 0, "follower": 24, "stranger": 0}
    assert engine.scheduler.stats().num_queued == 0


def test_followers_go_on_when_their_leader_is_aborted() -> None:
    engine = make_engine(make_layout(80), max_step_tokens=40)
    engine.add(make_ask("leader", [*range(60)], 3))
    engine.add(make_ask("follower", [*range(60)], 3))
    engine.step()
    engine.launch()
    assert engine.scheduler._sharing.num_following == 1
    engine.abort("leader")
    engine.scheduler.check()
    engine.drain()
    engine.check_outputs()
    assert engine.finishes["follower"].num_cached_tokens == 40  # what the leader got done


@pytest.mark.parametrize("off", [{"share_prefix_in_batch": False}, {"prefix_cache": False}])
def test_sharing_can_be_turned_off(off: dict[str, bool]) -> None:
    engine = make_engine(make_layout(80), max_step_tokens=64, **off)
    for name in "ab":
        engine.add(make_ask(name, [*range(20)], 3))
    assert len(engine.launch().rows) == 2
    engine.drain()
    engine.check_outputs()


def test_duplicate_pages_are_given_back_while_both_requests_run() -> None:
    engine = make_engine(make_layout(80), max_step_tokens=64, share_prefix_in_batch=False)
    for name in "ab":
        engine.add(make_ask(name, [*range(20)], 8))
    engine.step()
    assert engine.scheduler.stats().num_used_pages == 5  # both had five; five went back
    plan = engine.launch()
    assert [append.start for append in plan.appends if len(append.pages) > 1] == [0]  # the rewritten table
    engine.drain()
    engine.check_outputs()


def test_a_whole_prompt_in_the_tree_still_leaves_a_token_to_compute() -> None:
    engine = make_engine(make_layout(80))
    for name in "abc":
        engine.add(make_ask(name, [*range(16)], 3))
        engine.drain()
    engine.check_outputs()
    assert engine.finishes["c"].num_cached_tokens == 12


@pytest.mark.parametrize("window", [3, 6, 17])
def test_a_conversation_goes_on_from_where_it_ended(window: int) -> None:
    """The next turn hits the last whole page of prompt and output, in hybrids too."""
    engine = make_engine(make_layout(80, window=window), max_step_tokens=8, overlap_depth=2)
    engine.add(make_ask("turn1", [*range(18)], 9))
    engine.drain()
    said = [*range(18), *engine.tokens["turn1"]]
    engine.add(make_ask("turn2", [*said, 3, 3], 2))
    engine.drain()
    engine.check_outputs()
    assert engine.finishes["turn2"].num_cached_tokens == (len(said) - 1) // 4 * 4


def test_a_window_group_uses_no_more_pages_than_its_window() -> None:
    engine = make_engine(make_layout(80, window=6, max_model_len=64), max_step_tokens=8, prefix_cache=False)
    engine.add(make_ask("a", [*range(8)], 50))
    most = 0
    while engine.scheduler.has_work:
        engine.step()
        holding = next((r.holding for r in engine.scheduler._running), None)
        most = max(most, sum(1 for page in holding.tables[1] if page) if holding else 0)
    assert most == 3
    engine.check_outputs()


@pytest.mark.parametrize("depth", [1, 2])
def test_decodes_give_up_what_their_windows_passed_where_pages_are_short(depth: int) -> None:
    """Prompts end within a page, and no output reaches the next one, at which pages behind a window are freed."""
    layout = make_layout(80, page_size=16, window=4, window_pages=13, max_model_len=64)
    engine = make_engine(layout, max_step_tokens=64, prefix_cache=False, overlap_depth=depth)
    for name in "abcd":
        engine.add(make_ask(name, [*range(49)], 12))
    most = 0
    while engine.scheduler.has_work:
        engine.step()
        most = max(most, len(engine.scheduler._running.decoding))
    assert most == 4
    engine.check_outputs()


def test_reset_prefix_cache_spares_what_runs() -> None:
    engine = make_engine(make_layout(80))
    engine.add(make_ask("a", [*range(12)], 3))
    engine.drain()
    engine.add(make_ask("b", [*range(12)], 9))
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.drain()
    assert engine.scheduler.reset_prefix_cache()
    engine.check_outputs()
    assert engine.scheduler.stats().num_evictable_pages == 0


def test_counters_add_up() -> None:
    engine = make_engine(make_layout(80))
    for name in "ab":
        engine.add(make_ask(name, [*range(10)], 3))
        engine.drain()
    stats = engine.scheduler.stats()
    assert (stats.prompt_tokens_total, stats.cached_tokens_total, stats.generation_tokens_total) == (20, 8, 6)
    assert stats.computed_tokens_total == engine.runner.num_computed == 20 - 8 + 4
    assert stats.steps_total == len(engine.plans)
    assert (stats.num_pages, stats.num_used_pages) == (79, 0)

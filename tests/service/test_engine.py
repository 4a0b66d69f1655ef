"""The step loop: results, overlap, and what a failed step may and may not touch."""

from __future__ import annotations

import pytest
from fakes import Boom, FakeExecutor, FakePending, continuation, engine_over, fake_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.config import engine_config
from headrace.base.errors import OutOfDeviceMemory
from headrace.base.messages import EngineRequest, RequestOutput
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.base.step import StepPlan
from headrace.scheduling import budget as budget_module
from headrace.service import engine as engine_module
from headrace.service.engine import Engine


def request(request_id: str, prompt: list[int], max_tokens: int = 4, **stop: object) -> EngineRequest:
    return EngineRequest(request_id, prompt, SamplingSpec(), StopSpec(max_tokens=max_tokens, **stop))


def run(engine: Engine, steps: int = 1000) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_work and (steps := steps - 1):
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert not engine.has_work, "the engine did not come to rest"
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [t for o in outputs for t in o.token_ids]


@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_do_not_depend_on_overlap(depth: int):
    engine = fake_engine(overlap_depth=depth, max_running_requests=3)
    prompts = {f"r{i}": [i, i + 1, 7] for i in range(8)}
    for i, (name, prompt) in enumerate(prompts.items()):
        engine.submit(request(name, prompt, max_tokens=i + 1))
    outputs = run(engine)
    for i, (name, prompt) in enumerate(prompts.items()):
        assert tokens(outputs[name]) == continuation(prompt, i + 1)
        assert [o.finish.reason for o in outputs[name] if o.finish] == ["length"]
    engine.check()


def test_depth_two_launches_before_it_reads():
    engine = fake_engine(overlap_depth=2)
    engine.submit(request("a", [1], max_tokens=5))
    assert tokens(engine.step()) == continuation([1], 1)
    assert len(engine.executor.launched) == 2
    assert tokens(engine.step()) == continuation([1], 2)[1:]
    assert len(engine.executor.launched) == 3


def test_overrun_after_a_stop_is_discarded():
    expected = continuation([9, 9], 6)
    engine = fake_engine(overlap_depth=2)
    engine.submit(request("a", [9, 9], max_tokens=6, stop_ids=[expected[2]]))
    outputs = run(engine)["a"]
    assert tokens(outputs) == expected[:3]
    assert outputs[-1].finish.reason == "stop" and outputs[-1].finish.stop_id == expected[2]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_pause_holds_everything_and_loses_nothing(depth: int):
    prompts = {"a": [1, 2, 3], "b": [4, 5]}
    undisturbed = fake_engine(overlap_depth=depth)
    engine = fake_engine(overlap_depth=depth)
    for name, prompt in prompts.items():
        undisturbed.submit(request(name, prompt, 6))
        engine.submit(request(name, prompt, 6))
    expected = {name: tokens(outputs) for name, outputs in run(undisturbed).items()}
    got: dict[str, list[RequestOutput]] = {"a": [], "b": [], "late": []}
    for is_paused in (False, True, False):
        engine.pause(is_paused)
        for _ in range(2000 if is_paused else 2):
            for output in engine.step():
                got[output.request_id].append(output)
        if is_paused:
            assert engine.is_held and engine.has_work
            num_before = sum(len(o.token_ids) for outputs in got.values() for o in outputs)
            engine.submit(request("late", [7], 6))
            assert engine.step() == []
            engine.abort("late")
            assert [o.finish.reason for o in engine.step()] == ["abort"]
            assert sum(len(o.token_ids) for outputs in got.values() for o in outputs) == num_before
    for name, outputs in run(engine).items():
        got[name] += outputs
    assert {name: tokens(outputs) for name, outputs in got.items() if name != "late"} == expected


def test_bad_request_fails_alone():
    engine = fake_engine(max_queued=2)
    engine.submit(request("long", [1] * 5000))
    engine.submit(request("good", [1, 2]))
    engine.submit(request("also", [1, 3]))
    engine.submit(request("full", [1]))
    outputs = run(engine)
    assert (
        outputs["long"][0].finish.error.kind == "context_length_exceeded"
        and outputs["long"][0].finish.error.param == "prompt"
    )
    assert outputs["full"][0].finish.error.kind == "queue_full" and outputs["full"][0].finish.error.retry_after > 0
    assert tokens(outputs["good"]) == continuation([1, 2], 4)


def test_abort_at_every_state():
    engine = fake_engine(max_running_requests=1, overlap_depth=2)
    engine.submit(request("running", [1], max_tokens=50))
    engine.submit(request("queued", [2], max_tokens=50))
    engine.step()
    engine.abort("queued")
    engine.abort("running", "stop")
    engine.abort("unknown")
    outputs = run(engine)
    assert [o.finish.reason for o in outputs["queued"] if o.finish] == ["abort"]
    assert [o.finish.reason for o in outputs["running"] if o.finish] == ["stop"]
    engine.abort("running")
    assert not engine.has_work
    engine.check()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("poison", [FakeExecutor.FAIL_LAUNCH, FakeExecutor.FAIL_RESULT])
def test_failed_step_ends_its_requests_and_the_loop_goes_on(depth: int, poison: int):
    engine = fake_engine(overlap_depth=depth)
    engine.submit(request("poison", [poison]))
    engine.submit(request("beside", [1]))
    outputs = run(engine)
    for name in ("poison", "beside"):
        assert [o.finish.error.kind for o in outputs[name] if o.finish] == ["step_failed"]
        assert "Boom" in outputs[name][-1].finish.error.message
    assert engine.executor.num_resets >= 1
    engine.check()
    engine.submit(request("after", [5, 6]))
    assert tokens(run(engine)["after"]) == continuation([5, 6], 4)
    assert engine.stats().failed_steps_total >= 1


def test_step_launched_before_a_failed_launch_still_counts():
    engine = fake_engine(overlap_depth=2)
    engine.submit(request("early", [1], max_tokens=20))
    engine.step()
    engine.submit(request("poison", [FakeExecutor.FAIL_LAUNCH]))
    outputs = run(engine)
    known = tokens(outputs["early"])
    assert known == continuation([1], 20)[1:1 + len(known)] and known, "the step in flight was committed"
    assert outputs["early"][-1].finish.reason == "error"


class TightExecutor(FakeExecutor):
    """Has memory for steps of ``room`` tokens."""

    room = 24

    def execute(self, plan: StepPlan) -> FakePending:
        if sum(plan.lengths) > self.room:
            self.launched.append(plan)
            raise OutOfDeviceMemory("no room")
        return super().execute(plan)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_without_memory_is_computed_again_in_smaller_ones(depth: int):
    engine = engine_over(
        TightExecutor(engine_config(overlap_depth=depth, max_step_tokens=128, max_running_requests=40))
    )
    prompts = {f"r{i}": [(i + j) % 250 for j in range(5 + 9 * i)] for i in range(12)}
    for name, prompt in prompts.items():
        engine.submit(request(name, prompt, max_tokens=6))
    outputs = run(engine)
    for name, prompt in prompts.items():
        assert tokens(outputs[name]) == continuation(prompt, 6), name
        assert [o.finish.reason for o in outputs[name] if o.finish] == ["length"]
    engine.check()
    assert engine.executor.num_resets == sum(sum(p.lengths) > TightExecutor.room for p in engine.executor.launched) == 3
    stats = engine.stats()
    assert (stats.failed_steps_total, stats.late_kernels_total, stats.kernel_fallbacks_total) == (0, 3, 1)


def test_steps_grow_again_after_a_calm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(budget_module, "CALM_STEPS", 8)
    executor = TightExecutor(engine_config(overlap_depth=1, max_step_tokens=128, max_running_requests=4))
    engine = engine_over(executor)
    engine.submit(request("first", [3] * 100, max_tokens=40))
    run(engine)
    executor.room, executor.launched = 128, []
    engine.submit(request("second", [4] * 120, max_tokens=2))
    assert tokens(run(engine)["second"]) == continuation([4] * 120, 2)
    assert max(sum(p.lengths) for p in executor.launched) == 120


def test_memory_for_not_even_the_smallest_step_fails_it_alone():
    executor = TightExecutor(engine_config(max_step_tokens=64, max_running_requests=4))
    executor.room = 2
    engine = engine_over(executor)
    engine.submit(request("large", list(range(40))))
    engine.submit(request("small", [7], max_tokens=3))
    outputs = run(engine)
    assert (
        outputs["large"][-1].finish.error.kind == "step_failed"
        and "no room" in outputs["large"][-1].finish.error.message
    )
    engine.submit(request("after", [8], max_tokens=3))
    assert tokens(run(engine)["after"]) == continuation([8], 3)
    engine.check()


def break_accounts() -> None:
    raise AssertionError("accounts are broken")


def test_broken_accounts_are_not_survived(monkeypatch: pytest.MonkeyPatch):
    engine = fake_engine()
    engine.submit(request("poison", [FakeExecutor.FAIL_RESULT]))
    monkeypatch.setattr(engine._scheduler, "check", break_accounts)
    with pytest.raises(AssertionError, match="accounts"):
        engine.step()


def test_device_that_cannot_be_reset_is_not_survived():
    class Lost(FakeExecutor):
        def reset(self) -> None:
            raise Boom("device lost for good")

    engine = engine_over(Lost(engine_config()))
    engine.submit(request("poison", [FakeExecutor.FAIL_RESULT]))
    with pytest.raises(Boom, match="for good"):
        engine.step()


def test_a_stuck_scheduler_is_told_and_not_spun_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_module, "MAX_EMPTY_STEPS", 10)
    engine = fake_engine()
    engine.submit(request("a", [1]))
    monkeypatch.setattr(engine._scheduler, "plan", lambda: None)
    with pytest.raises(AssertionError, match="planned nothing"):
        for _ in range(12):
            engine.step()


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 12)),
        st.tuples(
            st.just("poison"), st.sampled_from([FakeExecutor.FAIL_LAUNCH, FakeExecutor.FAIL_RESULT]), st.integers(1, 3)
        ),
        st.tuples(st.just("abort"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(
    events=EVENTS, depth=st.integers(1, 2), chunk=st.sampled_from([8, 24]), prefix_cache=st.booleans(),
    kv_pages=st.sampled_from([16, 40])
)
def test_whatever_happens_every_request_ends_once_and_nothing_is_lost(
    events: list, depth: int, chunk: int, prefix_cache: bool, kv_pages: int
):
    engine = fake_engine(
        overlap_depth=depth, max_step_tokens=chunk, prefix_cache=prefix_cache, kv_pages=kv_pages, page_size=4,
        max_running_requests=4,
    )
    asked: dict[str, tuple[list[int], int]] = {}
    outputs: dict[str, list[RequestOutput]] = {}

    def step() -> None:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check()

    for kind, value, max_tokens in events:
        if kind == "abort":
            engine.abort(str(value))
        elif kind == "step":
            for _ in range(value):
                step()
        else:
            prompt = value if kind == "submit" else [value]
            name = str(len(asked))
            asked[name] = (prompt, max_tokens)
            engine.submit(request(name, prompt, max_tokens))
    while engine.has_work:
        step()
    for name, (prompt, max_tokens) in asked.items():
        finishes = [o.finish for o in outputs[name] if o.finish is not None]
        assert len(finishes) == 1 and outputs[name][-1].finish is not None
        expected = continuation(prompt, max_tokens)
        assert tokens(outputs[name]) == (
            expected if finishes[0].reason == "length" else expected[:len(tokens(outputs[name]))]
        )
    assert engine.stats().num_used_pages == 0

"""Which steps replay a graph, and of which size. What a graph computes is tested in `test_families_through_plans`."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from driver import Driver
from toy import toy_logits, toy_runner

from headrace.base.sampling import SamplingSpec
from headrace.execution.captures import MOST_STAND_INS, Buckets
from headrace.execution.graph_sizes import MAX_SPAN, TOKEN_SIZES, GraphSizes, pick_sizes, step_sizes
from headrace.execution.graphs import CapturedSteps
from headrace.execution.step import StepShape
from headrace.parallel.links import Handover
from tests.execution.pretended_graphs import NO_MEDIA, PretendedRecorder


def shape_of(decode_lens: list[int], prefill_lens: list[int]) -> StepShape:
    """Decodes with so many keys, and prompts computed from their start."""
    lengths = np.array([1] * len(decode_lens) + prefill_lens, dtype=np.int64)
    ends = np.array(decode_lens + prefill_lens, dtype=np.int64)
    entries = np.stack((np.arange(len(ends)), np.zeros_like(ends)))
    return StepShape(len(decode_lens), entries, ends, lengths, np.concatenate(([0], lengths.cumsum())))


def capture_for(*backends: SimpleNamespace) -> CapturedSteps:
    """Steps over cache groups with such backends."""
    inputs = SimpleNamespace(
        max_requests=300, handover=Handover(), adapters=None, media=NO_MEDIA, backends=list(backends)
    )
    return CapturedSteps(GraphSizes([1], [64, 256, 2048]), None, inputs, None)


@pytest.fixture(scope="module")
def captured() -> CapturedSteps:
    return capture_for(SimpleNamespace(divides_dynamic_keys=False, prefix_members=0))


@pytest.mark.parametrize(("decodes", "prefills", "size"), [
    ([], [1], 64), ([5, 9], [62], 64), ([5, 9], [63], 256), ([], [256], 256), ([10] * 200, [500, 500], 2048),
    ([], [MAX_SPAN] * 2, 2048),
    ([], [2049], None), ([], [MAX_SPAN + 1], None), ([50_000], [10], None), ([50_000] * 64, [10], 256),
    ([10] * 300, [1], None),  # more requests than rows, as with drafts
])
def test_the_smallest_that_holds_the_step(
    captured: CapturedSteps, decodes: list[int], prefills: list[int], size: int | None
):
    found = captured.mixed.find(shape_of(decodes, prefills))
    assert (found.size if found is not None else None) == size


def test_long_contexts_beside_prompts_where_every_group_divides_their_keys():
    divides, does_not = (SimpleNamespace(divides_dynamic_keys=does, prefix_members=0) for does in (True, False))
    shape = shape_of([50_000], [10])
    assert capture_for(divides, does_not).mixed.find(shape) is None
    found = capture_for(divides, divides).mixed.find(shape)
    assert found is not None and found.size == 64


def test_short_contexts_have_a_graph_of_their_own(monkeypatch: pytest.MonkeyPatch):
    """Where a backend tells them apart: it is replayed until a row is longer, by the host's bound."""
    runner, bounds = toy_runner(), []
    monkeypatch.setattr(runner._backends[1], "short_context", {1: 14, 2: 10}.get)
    monkeypatch.setattr(runner._backends[0], "short_context", lambda num_decodes: 0)
    make = runner._inputs.decode_groups
    monkeypatch.setattr(
        runner._inputs, "decode_groups",
        lambda decodes, rows, longest, _: bounds.append((len(rows), longest)) or make(decodes, rows, longest),
    )
    runner.capture(GraphSizes([1, 2], []), PretendedRecorder()).record_all(lambda: None)
    assert sorted(bounds) == [(1, 14), (1, 64), (2, 10), (2, 64)], "each is recorded"
    bounds.clear()
    driver, prompts = Driver(runner), {0: [5, 6, 7, 8, 9, 10, 11], 1: [7] * 12}
    driver.start(0, prompts[0], SamplingSpec())
    for chunks in ({0: 7}, {}, {}):  # 8 and 9 keys
        driver.step(chunks)
    driver.start(1, prompts[1], SamplingSpec())
    for chunks in ({1: 12}, {}):  # 10 keys beside a prompt, 11 beside 13
        driver.step(chunks)
    driver.release(1)
    for _ in range(5):  # 12 to 16 keys
        driver.step({})
    assert bounds == [(1, 14)] * 2 + [(2, 64)] + [(1, 14)] * 3 + [(1, 64)] * 2
    for row, prompt in prompts.items():
        tokens = list(prompt)
        for token in driver.output[row]:
            assert token == int(toy_logits(tokens, 5).argmax())
            tokens.append(token)


def test_steps_run_in_a_larger_graph_until_theirs_is_there(monkeypatch: pytest.MonkeyPatch):
    """With the same tokens; nothing is recorded while requests wait."""
    runner, ran = toy_runner(), []
    make = runner._inputs.decode_groups
    monkeypatch.setattr(
        runner._inputs, "decode_groups",
        lambda decodes, rows, *about: ran.append(len(rows)) or make(decodes, rows, *about),
    )
    steps = runner.capture(GraphSizes([1, 2, 3, 4], []), PretendedRecorder())
    done: list[int] = []
    steps.record_some(lambda: done.append(1))
    assert ran == [4, 2, 1] and len(done) == 3 and steps._kinds[0].unrecorded() == [3]
    driver, prompts = Driver(runner), {0: [5, 6, 7], 1: [7, 1], 2: [3, 2, 4]}
    for row, prompt in prompts.items():
        driver.start(row, prompt, SamplingSpec())
    for chunks in ({0: 3}, {1: 2}, {2: 3}, {}, {}):
        driver.step(chunks)
    assert ran[3:] == [4, 4] and steps._kinds[0].unrecorded() == [3], "two steps of three decodes"
    while runner.record_next():
        pass
    ran.clear()
    driver.step({})
    assert ran == [3] and not any(buckets.unrecorded() for buckets in steps._kinds)
    for row, prompt in prompts.items():
        tokens = list(prompt)
        for token in driver.output[row]:
            assert token == int(toy_logits(tokens, 5).argmax())
            tokens.append(token)


def test_a_server_that_is_never_idle_records_what_it_needs_often():
    made: dict[int, SimpleNamespace] = {}

    def make(size: int) -> SimpleNamespace:
        made[size] = SimpleNamespace(size=size, is_recorded=False)
        made[size].record = lambda: setattr(made[size], "is_recorded", True)
        return made[size]

    buckets = Buckets([1, 2, 3, 4, 6, 8], make)
    assert buckets.find(3).size == 3, "none stands in where a step records its own"
    for size in (8, 4):
        buckets.record(size)
    buckets.may_stand_in = True
    assert [buckets.find(count).size for count in (1, 2, 4, 5, 6, 7)] == [4, 4, 4, 8, 8, 8] and buckets.find(9) is None
    for _ in range(MOST_STAND_INS - 2):
        assert buckets.find(5).size == 8
    assert buckets.find(5).size == buckets.find(6).size == 6, "recorded by the step, as its caller runs it"
    assert buckets.find(2).size == 4, "each size for itself"
    buckets.record(6)
    assert buckets.find(5).size == 6 and buckets.unrecorded() == [3, 2, 1]


@pytest.mark.parametrize(("sizes", "picked"), [
    ([1, 2, 4, 8, 16, 24, 32, 48, 60], [1, 2, 4, 8, 16, 32, 60]), ([64, 128, 192, 256, 384], [64, 128, 256, 384]),
    ([5], [5]), ([], []),
])
def test_sizes_that_stand_in_for_others(sizes: list[int], picked: list[int]):
    assert pick_sizes(sizes) == picked


def test_large_models_have_small_buckets_only():
    assert step_sizes(8192, 600_000_000, 28) == list(TOKEN_SIZES)
    assert step_sizes(8192, 8_000_000_000, 32) == [64, 128, 192, 256, 384, 512, 768, 1024]
    assert step_sizes(8192, 70_000_000_000, 80) == [64, 128, 192, 256]
    assert step_sizes(8192, 700_000_000_000, 61) == []


def test_the_largest_step_of_a_small_model_has_one():
    assert step_sizes(1000, 1_000_000, 2)[-2:] == [768, 1000]
    assert step_sizes(16, 1_000_000, 2) == []
    assert step_sizes(0, 1_000_000, 2) == []

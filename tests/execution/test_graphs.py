"""Which steps replay a graph, and of which size. What a graph computes is tested in `test_families_through_plans`."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from driver import Driver
from toy import toy_logits, toy_runner

from headrace.base.sampling import SamplingSpec
from headrace.execution.graph_sizes import MAX_SPAN, TOKEN_SIZES, GraphSizes, step_sizes
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


def test_large_models_have_small_buckets_only():
    assert step_sizes(8192, 600_000_000, 28) == list(TOKEN_SIZES)
    assert step_sizes(8192, 8_000_000_000, 32) == [64, 128, 192, 256, 384, 512, 768, 1024]
    assert step_sizes(8192, 70_000_000_000, 80) == [64, 128, 192, 256]
    assert step_sizes(8192, 700_000_000_000, 61) == []


def test_the_largest_step_of_a_small_model_has_one():
    assert step_sizes(1000, 1_000_000, 2)[-2:] == [768, 1000]
    assert step_sizes(16, 1_000_000, 2) == []
    assert step_sizes(0, 1_000_000, 2) == []

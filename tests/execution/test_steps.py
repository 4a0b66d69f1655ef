"""What a step says of its plan; steps of decodes made of the one before are those that would be made anew."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from headrace.base.errors import HeadraceError
from headrace.base.media import MediaPlace
from headrace.base.pooling import PoolingSpec
from headrace.base.sampling import SamplingSpec
from headrace.base.step import RowStart, StepPlan
from headrace.execution.media import MediaState
from headrace.execution.rows import Rows
from headrace.execution.sampling import Sampler
from headrace.execution.step import Step, StepFeature
from headrace.execution.upload import Upload

CPU = torch.device("cpu")
SPECS = [
    SamplingSpec(), SamplingSpec(temperature=0.7, top_p=0.5, seed=3), SamplingSpec(temperature=1.0, min_p=0.1, seed=4),
    SamplingSpec(num_logprobs=2)
]


def started(*lengths: int) -> Rows:
    rows = Rows(len(lengths), CPU)
    for row, (length, spec) in enumerate(zip(lengths, SPECS, strict=False)):
        rows.start(RowStart(row, f"r{row}", [1] * length, length, spec))
        rows.tensors.computed_len[row] = length
    return rows


def plan_of(rows: list[int], begins: list[int]) -> StepPlan:
    return StepPlan(0, len(rows), rows, begins, [1] * len(rows), [1] * len(rows))


def assert_equal(one: Step, other: Step) -> None:
    assert (one.plan, one.order, one.features, one.is_greedy) == (
        other.plan, other.order, other.features, other.is_greedy
    )
    for mine, its in (
        (one.samples, other.samples),
        *((getattr(one.shape, n), getattr(other.shape, n)) for n in one.shape.__slots__),
        *((getattr(one.batch, n), getattr(other.batch, n)) for n in one.batch.__slots__),
    ):
        assert np.array_equal(mine, its)


def test_a_step_behind_another():
    rows = started(4, 9, 2, 9)
    step = Step.of(plan_of([0, 1, 2, 3], [4, 9, 2, 9]), rows)
    assert list(step.shape.rows) == [1, 3, 0, 2] and list(step.shape.ends) == [10, 10, 5, 3]
    assert step.order == [2, 0, 3, 1]
    assert list(step.batch.random) == [0, 3] and list(step.batch.firsts) == [0, 1, 2, 3]
    for begins in ([5, 10, 3, 10], [6, 11, 4, 11], [6, 12, 4, 11]):
        plan = plan_of([0, 1, 2, 3], begins)
        rows.tensors.computed_len[:4] = torch.tensor(begins)
        step = step.follow(plan, rows)
        assert_equal(step, Step.of(plan, rows))
    mixed = StepPlan(0, 3, [0, 1, 2, 3], [7, 13, 5, 12], [1, 1, 1, 9], [1] * 4)
    assert_equal(step.follow(mixed, rows), Step.of(mixed, rows))
    drafted = StepPlan(0, 4, [0, 1, 2, 3], [7, 13, 5, 12], [1, 3, 1, 2], [1, 3, 1, 2])
    step = step.follow(drafted, rows)
    assert_equal(step, Step.of(drafted, rows))
    after = plan_of([0, 1, 2, 3], [8, 16, 6, 14])
    assert_equal(step.follow(after, rows), Step.of(after, rows))
    plan = plan_of([3, 1], [30, 40])
    assert_equal(step.follow(plan, rows), Step.of(plan, rows))
    rows.release(1)
    with pytest.raises(HeadraceError, match="never started"):
        Step.of(plan, rows)


def test_a_decode_with_drafts_is_one_entry_for_each_token():
    rows = started(4, 9, 2, 9)
    plan = StepPlan(0, 2, [2, 0, 3], [5, 6, 0], [1, 3, 4], [1, 3, 1])  # bounds: the rows are at 2 and 4
    step = Step.of(plan, rows)
    assert step.shape.entries.tolist() == [[2, 0, 0, 0, 3], [0, 0, 1, 2, 0]]
    assert step.shape.begins.tolist() == [2, 4, 5, 6, 0] and step.shape.lengths.tolist() == [1, 1, 1, 1, 4]
    assert (step.shape.num_decodes, step.shape.most_drafts, step.order) == (4, 2, None)
    assert step.samples.tolist() == [0, 1, 2, 3, 4] and step.batch.firsts.tolist() == [0, 1, 4]
    step = Step.of(StepPlan(0, 2, [2, 0], [5, 6], [1, 3], [1, 3]), rows)
    assert step.shape.entries.tolist() == [[0, 0, 0, 2], [0, 1, 2, 0]] and step.order == [1, 0]


@pytest.mark.parametrize(("others", "more", "num_resumed"), [
    ([(0, 3, 1, 1), (2, 1, 1, 1)], {}, 2),
    ([(0, 3, 1, 1), (2, 1, 1, 1), (3, 0, 9, 1)], {}, 2),
    ([(0, 3, 1, 1), (3, 0, 9, 1), (2, 1, 1, 1)], {}, 1),
    ([(0, 2, 2, 1), (2, 1, 1, 1)], {}, 0),
    ([(0, 3, 1, 1), (2, 0, 1, 0)], {}, 1),  # a chunk of a longer prompt samples nothing
    ([(2, 0, 1, 1)], {}, 0),  # nothing is in the cache
    ([(0, 3, 1, 1)], {"num_proposals": 2}, 0),
], ids=str)
def test_the_last_token_of_a_cached_prompt_is_a_decode(
    others: list[tuple[int, int, int, int]], more: dict, num_resumed: int
):
    rows = started(4, 9, 2, 9)
    rows.tensors.computed_len[[0, 2]] = 77  # of whoever had these rows before
    columns = [list(column) for column in zip((1, 9, 1, 1), *others, strict=True)]
    step = Step.of(StepPlan(0, 1, *columns, **more), rows)
    assert (step.shape.num_decodes, step.shape.num_resumed) == (1 + num_resumed, num_resumed)
    is_decode = num_resumed == len(others)
    assert (step.order is not None) == is_decode == (StepFeature.PREFILL not in step.features)
    ends = [begin + length for _, begin, length, _ in [(1, 9, 1, 1), *others]]
    assert list(step.shape.ends) == (sorted(ends, reverse=True) if is_decode else ends)
    assert list(step.samples) == [i for i, span in enumerate([(1, 9, 1, 1), *others]) if span[3]]


def test_media_at_the_end_are_no_decode():
    rows = started(4)
    rows.media_end_np[0] = 4
    assert Step.of(StepPlan(0, 0, [0], [3], [1], [1]), rows).shape.num_resumed == 0
    rows.media_end_np[0] = 3
    assert Step.of(StepPlan(0, 0, [0], [3], [1], [1]), rows).shape.num_resumed == 1


def test_a_row_that_had_media_decodes_for_the_next_request():
    rows = started(4)
    state = MediaState(SimpleNamespace(media=None), rows)
    for media, num_resumed in (([MediaPlace("image", bytes(16), [(1, 3)])], 0), ([], 1)):
        start = RowStart(0, "r0", [1] * 4, 4, SamplingSpec(), media=media)
        rows.start(start)
        state.start([start], Upload())
        assert Step.of(StepPlan(0, 0, [0], [3], [1], [1]), rows).shape.num_resumed == num_resumed


def test_sampling_parameters_are_sent_once():
    rows = started(4, 9, 2, 9)
    sampler = Sampler(rows, 4, 50)
    logits = torch.randn(4, 50)
    plans = [plan_of([0, 1, 2, 3], [4 + i, 9 + i, 2 + i, 9 + i]) for i in range(3)]

    def sample(plan: StepPlan, by: Sampler) -> tuple[list[int], set[str]]:
        batch, upload = Step.of(plan, rows).batch, Upload()
        by.pack(batch, upload)
        sent = upload.send(CPU)
        positions = torch.tensor([plan.begins[plan.rows.index(row)] for row in batch.rows])
        return by.sample(logits.clone(), positions, batch, sent).tokens[0].tolist(), set(sent)

    sent = []
    for plan in plans:
        tokens, names = sample(plan, sampler)
        assert tokens == sample(plan, Sampler(rows, 4, 50))[0]
        sent.append("sample_reals" in names)
    assert sent == [True, False, False]
    known = rows.start(RowStart(1, "other", [1] * 9, 9, SamplingSpec(temperature=2.0, seed=11)))
    sampler.start(1, known)
    tokens, names = sample(plans[2], sampler)
    assert "sample_reals" in names and tokens == sample(plans[2], Sampler(rows, 4, 50))[0]


@pytest.mark.parametrize(("start", "features"), [
    ({"sampling": SamplingSpec()}, StepFeature.PREFILL),
    ({"sampling": SamplingSpec(temperature=1.0)}, StepFeature.PREFILL | StepFeature.SAMPLING),
    ({"sampling": SamplingSpec(num_prompt_logprobs=0)}, StepFeature.PREFILL | StepFeature.PROMPT_LOGPROBS),
    (
        {"sampling": SamplingSpec(), "pooling": PoolingSpec(second_start=2)},
        StepFeature.PREFILL | StepFeature.POOLING | StepFeature.TEXT_PAIRS,
    ),
])
def test_features_of_a_prefill(start: dict, features: StepFeature):
    rows = Rows(2, CPU)
    rows.start(RowStart(0, "r", [1] * 4, 4, **start))
    rows.start(RowStart(1, "other", [1] * 4, 4, SamplingSpec(num_prompt_logprobs=0)))
    step = Step.of(StepPlan(0, 0, [0], [0], [4], [int("pooling" not in start)]), rows)
    assert step.features == features and step.order is None


def test_features_of_decodes():
    rows = started(4, 9, 2, 9)
    assert Step.of(plan_of([0], [4]), rows).features == StepFeature(0)
    assert Step.of(plan_of([0, 1], [4, 9]), rows).features == StepFeature.SAMPLING
    rows.start(RowStart(0, "r", [1] * 4, 4, SamplingSpec(num_prompt_logprobs=2)))
    assert Step.of(plan_of([0], [4]), rows).features == StepFeature(0), "the prompt is computed"

"""Steps of decodes made of the one before are those that would be made anew."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.base.errors import HeadraceError
from headrace.base.sampling import SamplingSpec
from headrace.base.step import RowStart, StepPlan
from headrace.execution.decodes import Decodes
from headrace.execution.rows import Rows
from headrace.execution.sampling import Sampler
from headrace.execution.upload import Upload

CPU = torch.device("cpu")
SPECS = [
    SamplingSpec(), SamplingSpec(temperature=0.7, top_p=0.5, seed=3), SamplingSpec(temperature=1.0, min_p=0.1, seed=4),
    SamplingSpec(num_logprobs=2)
]


def started(*lengths: int) -> Rows:
    rows = Rows(len(lengths), CPU)
    for row, (length, spec) in enumerate(zip(lengths, SPECS, strict=True)):
        rows.start(RowStart(row, f"r{row}", [1] * length, length, spec))
    return rows


def plan_of(rows: list[int], begins: list[int]) -> StepPlan:
    return StepPlan(0, len(rows), rows, begins, [1] * len(rows), [1] * len(rows))


def assert_equal(one: Decodes, other: Decodes) -> None:
    assert (one.plan_rows, one.begins, one.places) == (other.plan_rows, other.begins, other.places)
    for mine, its in (
        (one.rows, other.rows), (one.ends, other.ends),
        *((getattr(one.batch, n), getattr(other.batch, n)) for n in one.batch.__slots__)
    ):
        assert np.array_equal(mine, its)


def test_a_step_behind_another():
    rows = started(4, 9, 2, 9)
    step = Decodes.of(plan_of([0, 1, 2, 3], [4, 9, 2, 9]), rows)
    assert list(step.rows) == [1, 3, 0, 2] and list(step.ends) == [10, 10, 5, 3] and step.places == [2, 0, 3, 1]
    assert list(step.batch.output_lens) == [1, 1, 1, 1] and list(step.batch.random) == [0, 3]
    for begins in ([5, 10, 3, 10], [6, 11, 4, 11], [6, 12, 4, 11]):
        plan = plan_of([0, 1, 2, 3], begins)
        step = step.follow(plan, rows)
        assert_equal(step, Decodes.of(plan, rows))
    plan = plan_of([3, 1], [30, 40])
    assert_equal(step.follow(plan, rows), Decodes.of(plan, rows))
    rows.release(1)
    with pytest.raises(HeadraceError, match="never started"):
        Decodes.of(plan, rows)


def test_what_rows_drew_with_last_is_sent_once():
    rows = started(4, 9, 2, 9)
    sampler = Sampler(rows, 4, 50)
    logits = torch.randn(4, 50)
    plans = [plan_of([0, 1, 2, 3], [4 + i, 9 + i, 2 + i, 9 + i]) for i in range(3)]

    def draw(plan: StepPlan, by: Sampler) -> tuple[list[int], set[str]]:
        batch, upload = Decodes.of(plan, rows).batch, Upload()
        by.pack(batch, upload)
        sent = upload.send(CPU)
        return by.draw(logits.clone(), batch, sent).tokens[0].tolist(), set(sent)

    sent = []
    for plan in plans:
        tokens, names = draw(plan, sampler)
        assert tokens == draw(plan, Sampler(rows, 4, 50))[0]
        sent.append("draw_reals" in names)
    assert sent == [True, False, False]
    known = rows.start(RowStart(1, "other", [1] * 9, 9, SamplingSpec(temperature=2.0, seed=11)))
    sampler.start(1, known)
    tokens, names = draw(plans[2], sampler)
    assert "draw_reals" in names and tokens == draw(plans[2], Sampler(rows, 4, 50))[0]

"""Which ranks form what, and which layers a stage gets."""

from __future__ import annotations

import random
from itertools import accumulate, combinations, pairwise

import pytest

from headrace.base.errors import ConfigError
from headrace.parallel.layout import Layout, Stage, divide_layers, read_division, stage_of


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (1, 4), (2, 2), (3, 2), (2, 1)])
def test_every_rank_has_one_place_and_neighbours_agree(tensor: int, pipeline: int):
    layouts = [Layout(rank, tensor, pipeline) for rank in range(tensor * pipeline)]
    assert layouts[0].stage == pipeline - 1, "rank 0 samples, so it has the last layers"
    assert {(layout.stage, layout.tensor_rank) for layout in layouts} == {
        (stage, rank) for stage in range(pipeline) for rank in range(tensor)
    }
    for layout in layouts:
        ranks = layout.tensor_ranks()
        assert ranks[layout.tensor_rank] == layout.rank
        assert all(layouts[rank].stage == layout.stage for rank in ranks)
        assert (layout.previous is None) == (layout.stage == 0)
        assert (layout.next is None) == (layout.stage == pipeline - 1)
        if layout.next is not None:
            behind = layouts[layout.next]
            assert behind.previous == layout.rank
            assert (behind.stage, behind.tensor_rank) == (layout.stage + 1, layout.tensor_rank)


def test_layers_are_divided_as_evenly_as_any_division():
    draw = random.Random(5)
    for _ in range(60):
        weights = [draw.randrange(1, 9) for _ in range(draw.randrange(1, 9))]
        stages, head = draw.randrange(1, min(4, len(weights)) + 1), draw.randrange(12)
        counts = divide_layers(weights, head, stages)
        assert len(counts) == stages and sum(counts) == len(weights) and min(counts) >= 1

        def largest(counts: list[int], weights=weights, head=head) -> int:
            parts = [stage_of(counts, stage).layers(len(weights)) for stage in range(len(counts))]
            sums = [sum(weights[i] for i in part) for part in parts]
            return max(*sums[:-1], sums[-1] + head) if len(sums) > 1 else sums[0] + head

        every = [
            [stop - start for start, stop in zip((0, *cuts), (*cuts, len(weights)), strict=True)]
            for cuts in combinations(range(1, len(weights)), stages - 1)
        ]
        assert largest(counts) == min(map(largest, every))


def test_stages_begin_where_they_may_and_are_as_even_as_that_allows():
    draw = random.Random(6)
    for _ in range(60):
        weights = [draw.randrange(1, 9) for _ in range(draw.randrange(2, 9))]
        begins = [0, *(i for i in range(1, len(weights)) if draw.random() < 0.6)]
        stages, head = draw.randrange(1, min(4, len(begins)) + 1), draw.randrange(12)
        counts = divide_layers(weights, head, stages, begins)
        assert len(counts) == stages and sum(counts) == len(weights)
        bounds = [(0, *cuts, len(weights)) for cuts in combinations(begins[1:], stages - 1)]
        largest = [
            max(sum(weights[i:j]) + head * (j == len(weights)) for i, j in pairwise(ends)) for ends in bounds
        ]
        ends = tuple(accumulate(counts, initial=0))
        assert ends in bounds and largest[bounds.index(ends)] == min(largest)
    with pytest.raises(ConfigError, match="set pipeline_parallel_size to 2 or less"):
        divide_layers([1, 1, 1], 0, 3, [0, 2])


def test_stages_cover_all_layers_once():
    counts = [2, 1, 3]
    stages = [stage_of(counts, stage) for stage in range(3)]
    assert [i for stage in stages for i in stage.layers(6)] == list(range(6))
    assert [stage.is_first for stage in stages] == [True, False, False]
    assert [stage.is_last for stage in stages] == [False, False, True]
    assert stage_of([6], 0) == Stage() and Stage().is_whole


@pytest.mark.parametrize("text", ["4", "2,3", "0,4", "2,x", "2,1,1", "", "-1,5"])
def test_a_stated_division_must_fit(text: str):
    with pytest.raises(ConfigError, match="pipeline_layers must be 2 numbers") as caught:
        read_division(text, 4, 2)
    assert caught.value.param == "pipeline_layers"


def test_a_stated_division_is_taken():
    assert read_division("1, 3", 4, 2) == [1, 3]


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="set pipeline_parallel_size to 2 or less"):
        divide_layers([1, 1], 0, 3)

"""Which expert is where: every expert somewhere, ranks loaded evenly, few moves, the same on every rank."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.config import engine_config
from headrace.base.errors import ConfigError
from headrace.base.parallel import parse_eplb_config
from headrace.parallel.placement import NOBODY, Placement, balancedness, count_copies, place_experts


@st.composite
def cases(draw) -> tuple[list[float], Placement]:
    num_ranks, each = draw(st.integers(1, 8)), draw(st.integers(1, 9))
    num_slots = num_ranks * each
    num_experts = draw(st.integers(max(1, num_slots - min(num_slots - 1, 2 * num_ranks)), num_slots))
    loads = draw(st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts))
    return [float(load) for load in loads], Placement.initial(num_experts, num_slots, num_ranks)


@given(cases(), st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_every_expert_is_somewhere_and_moves_lead_there(case: tuple[list[float], Placement], seed: int):
    loads, before = case
    for _ in range(3):  # from one placement to the next, as loads change
        placed = place_experts(loads, before)
        assert placed == place_experts(list(loads), before), "the same on every rank"
        assert len(placed.slots) == len(before.slots)
        assert set(placed.slots) - {NOBODY} == set(range(len(loads)))
        assert max(placed.load_ranks(loads)) <= max(before.load_ranks(loads)) + 1e-6
        assert sum(placed.load_ranks(loads)) == pytest.approx(sum(loads))
        moved = list(before.slots)
        for start, to in placed.moves_from(before):
            assert before.slots[start] == placed.slots[to] != NOBODY, "from a slot that has it"
            moved[to] = before.slots[start]
        kept = [new for new, old in zip(placed.slots, moved, strict=True) if new != NOBODY and new != old]
        assert not kept, "what did not move was there"
        draw = random.Random(seed)
        loads, before = [float(draw.randrange(1000)) for _ in loads], placed


def test_a_busy_expert_gets_the_copies_and_few_move():
    before = Placement.initial(8, 12, 4)
    assert before.slots == (0, 1, NOBODY, 2, 3, NOBODY, 4, 5, NOBODY, 6, 7, NOBODY)
    loads = [1000.0, 900, 10, 10, 10, 10, 10, 10]
    assert count_copies(loads, 12, 4) == [3, 3, 1, 1, 1, 1, 1, 1]
    placed = place_experts(loads, before)
    assert balancedness(before.load_ranks(loads)) < 0.3 < 0.7 < balancedness(placed.load_ranks(loads))
    assert len(placed.moves_from(before)) <= 7
    assert place_experts(loads, placed) is placed, "nothing to gain"
    assert place_experts([1.0] * 8, before) is before
    assert place_experts([0.0] * 8, before) is before
    assert count_copies([5.0, 1.0], 8, 2) == [2, 2], "no more copies than ranks"


@pytest.mark.parametrize(("ranks", "experts"), [(2, 8), (8, 64), (16, 128), (32, 256)])
def test_skewed_loads_become_even(ranks: int, experts: int):
    """Loads as mixtures have them: few experts take most tokens."""
    draw = random.Random(experts)
    loads = [1000.0 / (1 + draw.randrange(experts)) for _ in range(experts)]
    before = Placement.initial(experts, experts + ranks, ranks)
    assert balancedness(place_experts(loads, before).load_ranks(loads)) > 0.93


@pytest.mark.parametrize(("text", "words"), [
    ("[1]", "eplb_config"), ('{"steps": 3}', "no key 'steps'"), ('{"step_intervall": 3}', "did you mean step_interval"),
    ('{"step_interval": 0}', "step_interval"), ('{"num_redundant_experts": -1}', "num_redundant_experts"),
])
def test_wrong_options_are_explained(text: str, words: str):
    with pytest.raises(ConfigError, match=words) as caught:
        parse_eplb_config(text)
    assert caught.value.param == "eplb_config"


def test_options_say_what_they_need():
    assert parse_eplb_config('{"window_size": 7}').window_size == 7 and parse_eplb_config(None).step_interval == 3000
    with pytest.raises(ConfigError, match="set enable_expert_parallel too"):
        engine_config(model="m", enable_eplb=True)

"""Dense random loads: dozens of requests over tiny pools, so that sharing, eviction and retraction meet all the
time."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.base.errors import OutOfPages
from tests.scheduling.fake_runner import FakeEngine, make_ask, make_engine, make_layout

VOCAB = 31
MAX_MODEL_LEN = 80


def build(rng: random.Random) -> FakeEngine:
    page_size = rng.choice([1, 2, 4, 4, 8])
    window = rng.choice([0, 0, 2, 4, 6, 11, 20])
    pages = -(-MAX_MODEL_LEN // page_size)
    layout = make_layout(
        1 + pages + rng.randrange(2 * pages), page_size=page_size, max_rows=rng.randint(1, 8),
        max_model_len=MAX_MODEL_LEN, window=window,
        window_pages=3 + -(-window // page_size) + rng.randrange(pages), full=not window or rng.random() < 0.75,
    )  # fmt: skip
    return make_engine(
        layout, vocab=VOCAB, prefix_cache=rng.random() < 0.85, max_step_tokens=rng.choice([8, 8, 13, 32, 64]),
        overlap_depth=rng.randint(1, 2), num_stages=rng.choice([1, 1, 2, 3, 4]),
        policy=rng.choice(["fcfs", "priority", "longest-prefix"]), starvation_steps=rng.choice([1, 3, 50]),
        share_prefix_in_batch=rng.random() < 0.8,
    )  # fmt: skip


def draw_ask(rng: random.Random, index: int, stems: list[list[int]]):
    stem = rng.choice(stems)
    prompt = (
        stem[: rng.choice([rng.randint(1, len(stem)), len(stem)])]
        + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))]
    )
    return make_ask(
        f"r{index}", prompt, rng.choice([0, 1, 5, 20, 60]), seed=rng.randrange(3),
        namespace=rng.choice(["", "", "", "x"]), origin=rng.choice([(), ("a", "1"), ("a", "2"), ("b", "3")]),
        priority=rng.randint(0, 2),
        eos_ids=[] if rng.random() < 0.6 else [rng.randrange(VOCAB)], prompt_logprobs=rng.choice([-1] * 9 + [1]),
    )  # fmt: skip


@example(seed=96795441)  # a pipeline stage's whole part of the decodes is retracted, and another could go on
@example(seed=796276219)  # trimmed decodes are promised more while their shared pages stay taken
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_request_ends_as_if_it_had_run_alone(seed: int) -> None:
    rng = random.Random(seed)
    engine = build(rng)
    if rng.random() < 0.5:  # admit as if nobody wrote anything: pages run out in the middle of decoding
        engine.scheduler._admission.forecast.expect_len = lambda request: request.known_len
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randint(4, 50))] for _ in range(3)]
    arrivals = [draw_ask(rng, index, stems) for index in range(40)]
    while arrivals or engine.scheduler.has_work:
        while arrivals and rng.random() < 0.6:
            engine.add(arrivals.pop())
        engine.step_among_faults(rng)
    engine.check_outputs()
    stats = engine.scheduler.stats()
    assert stats.num_used_pages == stats.num_queued == stats.num_running == 0
    assert engine.scheduler.reset_prefix_cache()
    assert stats.requests_total == 40


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("depth", [1, 2])
def test_shared_prompts_are_computed_once(window: int, depth: int) -> None:
    """Sixteen prompts that share 40 of 44 tokens and arrive together: the shared part is computed once."""
    layout = make_layout(400, page_size=4, max_rows=16, max_model_len=64, window=window)
    engine = make_engine(layout, max_step_tokens=64, overlap_depth=depth)
    stem = [i % 50 for i in range(40)]
    for index in range(16):
        engine.add(make_ask(f"r{index}", [*stem, index, index, index, index], 1))
    engine.drain()
    engine.check_outputs()
    assert engine.runner.num_computed == 44 + 15 * 4
    assert engine.scheduler.stats().cached_tokens_total == 15 * 40


def test_output_is_refused_only_when_it_can_never_fit() -> None:
    """Admission's check is exact: the largest request that is taken really runs alone to its end."""
    for window, full in ((0, True), (7, True), (7, False)):
        layout = make_layout(9, page_size=4, max_model_len=64, window=window, window_pages=5, full=full)
        limit = 64 if not full else 8 * 4 + 1
        engine = make_engine(layout, max_step_tokens=64)
        engine.add(make_ask("fits", [1] * 20, limit - 20))
        engine.drain()
        engine.check_outputs()
        if full:
            with pytest.raises(OutOfPages, match="max_tokens"):
                engine.add(make_ask("never", [1] * 20, limit - 19))

"""Stored prefixes give way before pages are used that never were, once enough of them were in use."""

from __future__ import annotations

from tests.scheduling.fake_runner import FakeEngine, make_ask, make_engine, make_layout


def used_pages(engine: FakeEngine) -> int:
    """The highest page number of any plan: pages are first used in order."""
    return max(page for plan in engine.plans for append in plan.appends for page in append.pages)


def serve(soft_pages: int, prompts: list[list[int]], num_pages: int = 100) -> FakeEngine:
    """One request after the other, of 4 tokens a page."""
    engine = make_engine(make_layout(num_pages, soft_pages=soft_pages))
    for i, prompt in enumerate(prompts):
        engine.add(make_ask(str(i), prompt))
        engine.drain()
    engine.check_outputs()
    engine.scheduler.check()
    return engine


def distinct(count: int) -> list[list[int]]:
    return [[1 + i % 40, i // 40, *range(14)] for i in range(count)]


def test_without_a_bound_every_new_prompt_takes_new_pages() -> None:
    assert used_pages(serve(0, distinct(30))) == 99


def test_within_the_bound_nothing_is_evicted() -> None:
    engine = serve(60, distinct(10))
    assert 40 <= used_pages(engine) <= 60 and engine.scheduler.stats().evicted_pages_total == 0


def test_beyond_the_bound_old_prefixes_go_first() -> None:
    engine = serve(40, distinct(60))
    assert used_pages(engine) == 40
    engine.add(make_ask("again", distinct(60)[-1]))
    engine.drain()
    assert engine.finishes["again"].num_cached_tokens == 12


def test_what_is_asked_for_again_and_again_stays() -> None:
    shared = list(range(30, 46))
    engine = serve(30, [prompt for i in range(40) for prompt in ([*shared, i, 7], [i, 49, *range(12)])])
    cached = [engine.finishes[str(2 * i)].num_cached_tokens for i in range(40)]
    assert used_pages(engine) <= 30 and cached[1:] == [16] * 39


def test_running_requests_go_beyond_the_bound() -> None:
    engine = make_engine(make_layout(100, soft_pages=10))
    for i, prompt in enumerate(distinct(4)):
        engine.add(make_ask(str(i), prompt, 12))
    engine.drain()
    engine.check_outputs()
    assert used_pages(engine) > 20 and engine.scheduler.stats().retracted_total == 0

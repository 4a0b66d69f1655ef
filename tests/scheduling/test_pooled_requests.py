"""Requests that are read and not continued: one result each, chunks and prefix hits as usual, whole where nothing is
kept."""

from __future__ import annotations

import random

import msgspec
import pytest
from fake_runner import (
    FakeEngine,
    extend_print,
    make_ask,
    make_engine,
    make_layout,
    pooled_bytes,
    run_alone,
    start_print,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.cache import CacheLayout
from headrace.base.errors import ContextLengthExceeded
from headrace.base.messages import EngineRequest
from headrace.base.pooling import PoolingSpec


def read(name: str, prompt: list[int], *, needs_all: bool = False, **fields) -> EngineRequest:
    return make_ask(name, prompt, 0, pooling=PoolingSpec(needs_all_tokens=needs_all), **fields)


def expected(prompt: list[int], namespace: str = "") -> bytes:
    fingerprint = start_print(namespace)
    for token in prompt:
        fingerprint = extend_print(fingerprint, token)
    return pooled_bytes(fingerprint)


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50), k=count)


def check_results(engine: FakeEngine) -> None:
    for name, ask in engine.asks.items():
        output = engine.finishes[name]
        if ask.pooling is not None:
            assert (
                (output.finish.reason, output.pooled, output.token_ids)
                == ("stop", expected(ask.prompt_token_ids, ask.namespace), [])
            )
        else:
            assert output.pooled is None
            assert (
                (engine.tokens[name], output.finish.reason) == run_alone(ask, engine.vocab, engine.layout.max_model_len)
            )
    engine.scheduler.check()


def test_chunks_end_in_one_result():
    engine = make_engine(make_layout(40), max_step_tokens=8)
    engine.add(read("a", tokens(35)))
    engine.drain()
    check_results(engine)
    assert [plan.lengths for plan in engine.plans] == [[8], [8], [8], [8], [3]]
    assert not any(sample for plan in engine.plans for sample in plan.samples)


def test_a_result_may_come_after_a_prefix_hit_unless_it_needs_every_token():
    engine = make_engine(make_layout(40), max_step_tokens=32)
    prompt = tokens(19)
    for name in ("first", "second"):
        engine.add(read(name, prompt))
        engine.drain()
    engine.add(read("mean", prompt, needs_all=True))
    engine.drain()
    check_results(engine)
    assert [engine.finishes[name].num_cached_tokens for name in ("first", "second", "mean")] == [0, 16, 0]


def test_the_longest_text_fills_the_context():
    engine = make_engine(make_layout(40, max_model_len=24), max_step_tokens=64)
    engine.add(read("fits", tokens(24)))
    with pytest.raises(ContextLengthExceeded):
        engine.add(read("too-long", tokens(25)))
    engine.drain()
    check_results(engine)


def test_nothing_kept_means_computed_whole_and_batched():
    layout = CacheLayout(4, 8, 64, [])
    engine = make_engine(layout, max_step_tokens=64, overlap_depth=2)
    for i, count in enumerate((10, 20, 30, 5, 64, 1, 2)):
        engine.add(read(f"r{i}", tokens(count, i)))
    engine.drain()
    check_results(engine)
    assert [plan.lengths for plan in engine.plans] == [[10, 20, 30], [5], [64], [1, 2]]
    assert engine.scheduler.stats().num_pages == 0


def test_one_that_fails_or_is_aborted_fails_alone():
    engine = make_engine(CacheLayout(4, 8, 64, []), max_step_tokens=64)
    for name in ("a", "b", "c"):
        engine.add(read(name, tokens(6, ord(name))))
    engine.abort("c")
    engine.launch(failed={"b"})
    engine.land()
    assert {n: f.finish.reason for n, f in engine.finishes.items()} == {"a": "stop", "b": "error", "c": "abort"}
    assert engine.finishes["b"].pooled is None
    engine.scheduler.check()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_readers_and_writers_share_steps(data):
    """Any mixture, any budget, few pages: each ends as if it ran alone."""
    keeps = data.draw(st.booleans())
    layout = (
        make_layout(data.draw(st.integers(17, 30)), max_rows=5, max_model_len=48) if keeps
        else CacheLayout(4, 5, 48, [])
    )
    budget = data.draw(st.integers(8, 40)) if keeps else 48
    engine = make_engine(layout, max_step_tokens=budget, overlap_depth=data.draw(st.sampled_from([1, 2])))
    for i in range(data.draw(st.integers(1, 12))):
        prompt = tokens(data.draw(st.integers(1, 40)), data.draw(st.integers(0, 2)))
        is_read = not keeps or data.draw(st.booleans())
        ask = read(f"r{i}", prompt, needs_all=data.draw(st.booleans())) if is_read else make_ask(f"r{i}", prompt, 6)
        engine.add(msgspec.structs.replace(ask, namespace=data.draw(st.sampled_from(["", "x"]))))
        for _ in range(data.draw(st.integers(0, 2))):
            engine.step()
    engine.drain()
    check_results(engine)

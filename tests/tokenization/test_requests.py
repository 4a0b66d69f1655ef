"""Engine requests made of users' parameters, and what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_samples import byte_level, model_facts, pieces

from headrace.base.errors import ContextLengthExceeded, RequestError, UnsupportedFeature
from headrace.base.grammar import Grammar
from headrace.base.messages import EngineRequest, decode_to_engine, encode
from headrace.base.sampling import LogitRules, Penalties, SamplingParams, ThinkingBudget, ThinkingLimit
from headrace.service.client.requests import build_requests, special_stops

FACTS = model_facts(500)


def build(
    prompt: list[int] | None = None, *, request_id: str = "r", tokenizer=None, facts=FACTS, **params: object
) -> list[EngineRequest]:
    return build_requests(request_id, prompt or [5, 6, 7], SamplingParams(**params), facts=facts, tokenizer=tokenizer)


def test_the_plain_request():
    (request,) = build(temperature=0.5, top_k=-1, max_tokens=10, seed=3)
    assert (request.request_id, request.prompt_token_ids.tolist()) == ("r", [5, 6, 7])
    sampling = request.sampling
    assert (
        sampling.temperature, sampling.top_k, sampling.seed, sampling.penalties, sampling.rules
    ) == (0.5, 0, 3, None, None)
    assert (sampling.num_logprobs, sampling.num_prompt_logprobs) == (-1, -1)
    assert (request.stop.max_tokens, request.stop.eos_ids, request.stop.stop_ids) == (10, [2], [])


def test_choices_have_their_own_ids_and_seeds():
    requests = build(n=3, temperature=1.0, seed=2**63 - 2, prompt_logprobs=1, logprobs=0)
    assert [r.request_id for r in requests] == ["r/0", "r/1", "r/2"]
    assert [r.sampling.seed for r in requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [r.sampling.num_prompt_logprobs for r in requests] == [1, -1, -1]
    assert [r.sampling.num_logprobs for r in requests] == [0, 0, 0]
    assert len({build(temperature=1.0)[0].sampling.seed for _ in range(4)}) == 4


def test_output_fills_the_context_by_default():
    assert build(max_tokens=None)[0].stop.max_tokens == 61
    assert build([1] * 63, max_tokens=None)[0].stop.max_tokens == 1


def test_output_may_be_as_short_as_the_context():
    assert [build([1] * n, max_tokens=16, fits_context=True)[0].stop.max_tokens for n in (4, 60, 63)] == [16, 4, 1]


@pytest.mark.parametrize(
    ("prompt", "params"), [([1] * 64, {"max_tokens": None}), ([1] * 60, {"max_tokens": 5}), ([1] * 100, {})]
)
def test_what_does_not_fit_is_refused(prompt: list[int], params: dict):
    # in words that clients look for
    with pytest.raises(ContextLengthExceeded, match="this model's maximum context length is 64 tokens"):
        build(prompt, **params)


@pytest.mark.parametrize(("param", "params"), [
    ("prompt", {"prompt": [1, 500]}), ("prompt", {"prompt": [-1]}), ("prompt", {"prompt": [1, "a"]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": [1.0]}), ("logit_bias", {"logit_bias": {500: 1.0}}),
    ("logit_bias", {"logit_bias": {1: math.nan}}),
    ("allowed_token_ids", {"allowed_token_ids": [3, 600]}), ("allowed_token_ids", {"allowed_token_ids": []}),
    ("stop_token_ids", {"stop_token_ids": [-4]}), ("stop", {"stop": "x"}), ("bad_words", {"bad_words": ["x"]}),
    ("min_tokens", {"min_tokens": 62, "max_tokens": None}), ("temperature", {"temperature": -1.0}), ("n", {"n": 0}),
])
def test_what_is_wrong_is_named(param: str, params: dict):
    with pytest.raises(RequestError) as caught:
        build(**params)
    assert caught.value.param == param


def test_an_empty_prompt_and_a_past_deadline_are_refused():
    with pytest.raises(RequestError, match="at least one token"):
        build_requests("r", [], SamplingParams(), facts=FACTS, tokenizer=None)
    with pytest.raises(RequestError, match="deadline_s"):
        build_requests("r", [1], SamplingParams(), facts=FACTS, tokenizer=None, deadline_s=0.0)
    with pytest.raises(RequestError, match="detokenize"):
        build(stop="x", detokenize=False, tokenizer=byte_level())
    with pytest.raises(RequestError, match="bad_words"):
        build(bad_words=["  "], tokenizer=byte_level())


def test_rules_hold_what_the_user_asked():
    assert (
        build(logit_bias={4: 2}, allowed_token_ids=[4, 5])[0].sampling.rules
        == LogitRules(bias={4: 2.0}, allowed_ids=[4, 5])
    )
    (held,) = build(min_tokens=3, stop_token_ids=[9, 2])
    assert held.sampling.rules == LogitRules(min_tokens=3, held_ids=[2, 9])
    assert (held.stop.min_tokens, held.stop.stop_ids) == (3, [9, 2])
    (ignoring,) = build(min_tokens=3, ignore_eos=True)
    assert (ignoring.sampling.rules, ignoring.stop.eos_ids) == (None, [])
    assert build(repetition_penalty=1.5, frequency_penalty=0.5)[0].sampling.penalties == Penalties(1.5, 0.0, 0.5)


@pytest.mark.parametrize("make", [byte_level, pieces])
def test_bad_words_are_spelled_with_and_without_a_space(make):
    tokenizer = make()
    (request,) = build(bad_words=["ab", " ab"], tokenizer=tokenizer)
    found = request.sampling.rules.bad_words
    bare, spaced = tokenizer.encode("ab", add_special_tokens=False), tokenizer.encode(" ab", add_special_tokens=False)
    assert found == [bare, spaced]


def test_a_special_token_as_stop_string_stops_by_its_id():
    tokenizer = byte_level()
    pad = tokenizer.special_id("<|pad|>")
    (request,) = build(stop=["<|pad|>", "x"], tokenizer=tokenizer)
    assert request.stop.stop_ids == [pad]
    assert special_stops(SamplingParams(stop="<|pad|>", skip_special_tokens=False), tokenizer) == {}


@given(st.lists(st.integers(0, 499), min_size=1, max_size=40), st.integers(1, 4), st.integers(-(2**63), 2**63 - 1))
def test_requests_cross_the_wire(prompt: list[int], n: int, seed: int):
    for request in build_requests(
        "r", prompt, SamplingParams(n=n, seed=seed, min_tokens=2, logit_bias={1: -3.5}), facts=FACTS, tokenizer=None
    ):
        assert decode_to_engine(encode(request)) == request


def test_a_grammar_ends_the_output_itself():
    grammar = Grammar.regex("a*")
    plain, longer, endless = (
        build(grammar=grammar, max_tokens=20, **more)[0]
        for more in ({}, {"min_tokens": 3, "stop_token_ids": [9]}, {"ignore_eos": True})
    )
    assert plain.sampling.grammar == grammar and plain.sampling.rules is None
    assert [(r.stop.eos_ids, r.stop.min_tokens) for r in (plain, longer, endless)] == [([2], 0)] * 3
    assert longer.sampling.rules == LogitRules(min_tokens=3, held_ids=[2, 9])
    assert endless.sampling.rules == LogitRules(min_tokens=20, held_ids=[2])


def test_thinking_budgets_become_token_ids():
    tokenizer = byte_level()
    end, start = tokenizer.special_id("<|pad|>"), tokenizer.special_id("<s>")

    def limit(**budget):
        params = SamplingParams(thinking_budget=ThinkingBudget(max_tokens=5, **budget))
        return build_requests(
            "r", [5], params, facts=model_facts(tokenizer.vocab_size), tokenizer=tokenizer
        )[0].sampling.rules.thinking

    assert (
        limit(end="<|pad|>") == ThinkingLimit(5, end)
        and limit(end="<|pad|>", start="<s>") == ThinkingLimit(6, end, start)
    )
    for budget in ({"end": "<|pad|>a"}, {"end": ""}, {"end": "<|pad|>", "start": "xyz no token"}):
        with pytest.raises(UnsupportedFeature, match="thinking budget"):
            limit(**budget)
    with pytest.raises(RequestError, match="thinking_budget"):
        SamplingParams(thinking_budget=ThinkingBudget(max_tokens=-1, end="x")).validate()

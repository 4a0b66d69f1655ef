"""Sampling parameters to the engine's records: DRY, XTC, logprobs of all and of named tokens; with real tokens."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from headrace.base.errors import RequestError
from headrace.base.messages import Finish, ModelFacts, RequestOutput
from headrace.base.sampling import ALL_LOGPROBS, MAX_LOGPROBS, Exclusion, SamplingParams
from headrace.service.client.assembler import OutputAssembler
from headrace.service.client.prompts import encode_around_gap
from headrace.service.client.requests import build_requests
from headrace.service.tokenization.token_bytes import CHAR_OF_BYTE
from headrace.service.tokenization.tokenizer import Tokenizer, TokenizerFacts

TEXTS = ["\n", ":", "a", "b", " ", "a:", ":\n", "\n\n", "ab", '"', "*", "User"]


def spelled(text: str) -> str:
    return "".join(CHAR_OF_BYTE[byte] for byte in text.encode())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    vocabulary = {spelled(text): number for number, text in enumerate(TEXTS)}
    backend = Backend(models.WordLevel(vocabulary, unk_token=spelled("a")))
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), pre_tokenizers.Split("", "isolated")
    ])
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, TokenizerFacts())


FACTS = ModelFacts(16, 4096, "m", "A", "f", "float32", "cpu", 4096, 16, [15], 1)


def spec_of(tokenizer: Tokenizer | None, facts: ModelFacts = FACTS, prompt: tuple[int, ...] = (2, 3), **fields):
    return build_requests("r", prompt, SamplingParams(**fields), facts=facts, tokenizer=tokenizer)[0].sampling


def marked(breakers: bytes) -> set[str]:
    return {TEXTS[i] for i in range(len(TEXTS)) if breakers[i >> 3] >> (i & 7) & 1}


def test_breakers_are_the_tokens_that_hold_them(tokenizer):
    dry = spec_of(tokenizer, dry_multiplier=0.8).penalties.dry
    assert (dry.multiplier, dry.base, dry.allowed_len, dry.last_n) == (0.8, 1.75, 2, -1)
    assert marked(dry.breakers) == {"\n", ":", "a:", ":\n", "\n\n", '"', "*"} and len(dry.breakers) == 2
    chosen = spec_of(tokenizer, dry_multiplier=1, dry_sequence_breakers=["b", " "], dry_base=2, dry_allowed_length=5)
    assert marked(chosen.penalties.dry.breakers) == {"b", "ab", " "}
    # one that is several tokens ends at the last of them
    assert marked(spec_of(tokenizer, dry_multiplier=1, dry_sequence_breakers=["a b"]).penalties.dry.breakers) == {"b"}
    assert not any(spec_of(tokenizer, dry_multiplier=1, dry_sequence_breakers=[]).penalties.dry.breakers)
    assert not any(spec_of(None, dry_multiplier=1).penalties.dry.breakers)


def test_what_asks_for_nothing_costs_nothing(tokenizer):
    for fields in (
        {}, {"dry_base": 3.0}, {"dry_multiplier": 1, "dry_penalty_last_n": 0}, {"xtc_threshold": 0.2},
        {"xtc_probability": 0.5, "xtc_threshold": 0.6}, {"xtc_probability": 0.5, "temperature": 0},
    ):
        assert spec_of(tokenizer, **fields).penalties is None, fields
    assert spec_of(tokenizer, xtc_probability=0.5).penalties.xtc == Exclusion(0.5, 0.1)


@pytest.mark.parametrize("fields", [
    {"dry_multiplier": -1}, {"dry_base": 0.5}, {"dry_allowed_length": 0}, {"dry_allowed_length": 1000},
    {"dry_penalty_last_n": -2}, {"dry_sequence_breakers": [""]}, {"dry_sequence_breakers": ["a"] * 40},
    {"dry_sequence_breakers": ["a" * 100]}, {"xtc_probability": 1.5}, {"xtc_threshold": -0.1},
    {"logprob_token_ids": [16], "logprobs": 0}, {"logprob_token_ids": [-1], "logprobs": 0},
    {"logprob_token_ids": [1] * 200, "logprobs": 0}, {"logprobs": -2},
    {"prompt_logprobs": 51},
], ids=str)
def test_what_is_wrong_is_named(tokenizer, fields):
    with pytest.raises(RequestError) as caught:
        spec_of(tokenizer, **fields)
    assert caught.value.param == next(iter(fields)) and caught.value.param in caught.value.message


def test_named_logprobs_need_no_others(tokenizer):
    assert spec_of(tokenizer, logprob_token_ids=[3, 1]).num_logprobs == 0
    assert spec_of(tokenizer, logprob_token_ids=[3], logprobs=4).num_logprobs == 4
    assert spec_of(tokenizer).num_logprobs == -1


def test_all_logprobs_are_bounded_by_numbers(tokenizer):
    spec = spec_of(tokenizer, logprobs=-1, prompt_logprobs=-1, logprob_token_ids=[3, 3], max_tokens=8)
    assert (spec.num_logprobs, spec.num_prompt_logprobs, spec.logprob_ids) == (ALL_LOGPROBS, ALL_LOGPROBS, [3])
    wide = ModelFacts(16, 4096, "m", "A", "f", "float32", "cpu", 4096, 50_000, [15], 1)
    most = MAX_LOGPROBS // 50_000
    assert spec_of(None, wide, logprobs=-1, max_tokens=most).num_logprobs == ALL_LOGPROBS
    for fields in ({"logprobs": -1, "max_tokens": most + 1}, {"logprobs": -1, "max_tokens": most, "n": 2}):
        with pytest.raises(RequestError, match="lower max_tokens"):
            spec_of(None, wide, **fields)
    with pytest.raises(RequestError, match="shorten the prompt"):
        spec_of(None, wide, tuple([1] * (most + 1)), prompt_logprobs=-1)


@pytest.mark.parametrize("stop_id, fields, expected", [
    (15, {}, (None, 15)), (5, {"stop_token_ids": [5]}, (5, 5)), (None, {}, (None, None)),
])
def test_the_matched_stop_is_also_the_models_own(tokenizer, stop_id, fields, expected):
    params = SamplingParams(**fields)
    requests = build_requests("r", [2], params, facts=FACTS, tokenizer=tokenizer)
    reason = "length" if stop_id is None else "stop"
    delta = OutputAssembler(requests, params, tokenizer).feed(RequestOutput("r", [3, 15], Finish(reason, stop_id)))
    assert delta is not None and (delta.stop_reason, delta.matched_stop) == expected


def test_a_pattern_ends_the_text_and_is_named(tokenizer):
    params = SamplingParams(stop_regex=["zz", r"b\n"], stop="*")
    requests = build_requests("r", [2], params, facts=FACTS, tokenizer=tokenizer)
    assembler = OutputAssembler(requests, params, tokenizer)
    deltas = [assembler.feed(RequestOutput("r", [token])) for token in (2, 3, 3, 0, 2)]
    assert "".join(delta.text for delta in deltas if delta) == "ab"
    assert deltas[3].stop_reason == deltas[3].matched_stop == r"b\n" and deltas[3].finish_reason == "stop"
    assert assembler.can_end_early and [abort.request_id for abort in assembler.to_abort()] == ["r"]
    for wrong, facts in (({"stop_regex": "(?=a)"}, FACTS), ({"stop_regex": "a*"}, FACTS)):
        with pytest.raises(RequestError, match="stop_regex"):
            build_requests("r", [2], SamplingParams(**wrong), facts=facts, tokenizer=tokenizer)
    with pytest.raises(RequestError, match="without a tokenizer"):
        build_requests("r", [2], SamplingParams(stop_regex="a"), facts=FACTS, tokenizer=None)


@pytest.mark.parametrize("marks, expected", [
    (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "<fim_prefix>a<fim_suffix>b<fim_middle>"),
    (["<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"],
     "<\uff5cfim\u2581begin\uff5c>a<\uff5cfim\u2581hole\uff5c>b<\uff5cfim\u2581end\uff5c>"),
    (["[PREFIX]", "[SUFFIX]"], "[SUFFIX]b[PREFIX]a"), (["<fim_prefix>", "<fim_middle>"], None),
])
def test_the_marks_of_a_gap_are_those_of_the_vocabulary(marks, expected):
    names = ["a", "b", *marks]
    backend = Backend(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="a"))
    backend.add_special_tokens(marks)
    known = Tokenizer(backend, TokenizerFacts())
    if expected is None:
        with pytest.raises(RequestError, match="no fill-in-the-middle tokens"):
            encode_around_gap("a", "b", known, 100)
    else:
        assert "".join(names[i] for i in encode_around_gap("a", "b", known, 100)) == expected

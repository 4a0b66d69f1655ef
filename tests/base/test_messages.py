"""Messages survive the wire; foreign bytes are refused; errors keep their type."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base import errors
from headrace.base.messages import (
    Abort,
    Call,
    EngineRequest,
    ErrorInfo,
    Finish,
    Outputs,
    RequestOutput,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from headrace.base.sampling import LogitRules, Penalties, SamplingParams, SamplingSpec, StopSpec

ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(ids, st.integers(-(2**63), 2**63 - 1), st.floats(0, 2), st.none() | st.floats(0.1, 10))
def test_requests_survive_the_wire(tokens, seed, temperature, deadline):
    rules = LogitRules(bias={3: -1.5}, allowed_ids=tokens, bad_words=[tokens], min_tokens=2, held_ids=[1])
    sampling = SamplingSpec(temperature=temperature, seed=seed, penalties=Penalties(1.1, 0.2, 0.3), rules=rules)
    request = EngineRequest(
        "id", tokens, sampling, StopSpec(max_tokens=4, eos_ids=[2]), namespace="salt", deadline_s=deadline
    )
    assert decode_to_engine(encode(request)) == request


def test_unions_are_told_apart():
    for message in (Abort("a", "stop"), Call(3, "stats", {"x": 1})):
        assert decode_to_engine(encode(message)) == message
    outputs = Outputs(
        [RequestOutput("a", [1, 2], Finish("error", error=ErrorInfo("queue_full", "full", retry_after=2.0)))]
    )
    assert decode_from_engine(encode(outputs)) == outputs


@given(st.binary(max_size=200))
def test_foreign_bytes_never_do_harm(data: bytes):
    for decode in (decode_to_engine, decode_from_engine):
        try:
            decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue


def test_errors_keep_their_type_across_processes():
    def leaves(cls):
        return [cls] + [x for sub in cls.__subclasses__() for x in leaves(sub)]

    for cls in leaves(errors.HeadraceError):
        again = ErrorInfo.of(cls("text", param="field", retry_after=1.5)).to_error()
        assert (
            again.kind, again.status, again.message, again.param, again.retry_after
        ) == (cls.kind, cls("").status, "text", "field", 1.5)
    assert ErrorInfo.of(KeyError("x")).kind == "internal_error"


@pytest.mark.parametrize(("field", "value"), [
    ("temperature", -0.1), ("temperature", float("nan")), ("top_p", -0.1), ("top_p", 1.1), ("min_p", 2), ("top_k", -2),
    ("n", 0), ("n", 10**6), ("repetition_penalty", 0.0),
    ("presence_penalty", 2.1), ("max_tokens", 0), ("min_tokens", -1), ("logprobs", 51), ("prompt_logprobs", -2),
    ("stop", ["a"] * 33), ("stop", [""]), ("seed", 2**63),
    ("logit_bias", {1: 101.0}), ("allowed_token_ids", []), ("bad_words", ["x"] * 129), ("temperature", "hot"),
    ("max_tokens", True),
])
def test_sampling_bounds_name_the_field(field: str, value):
    with pytest.raises(errors.RequestError) as caught:
        SamplingParams(**{field: value}).validate()
    assert caught.value.param == field


def test_defaults_are_valid():
    params = SamplingParams()
    assert params.validate() is params
    with pytest.raises(errors.RequestError, match="min_tokens"):
        SamplingParams(max_tokens=2, min_tokens=3).validate()

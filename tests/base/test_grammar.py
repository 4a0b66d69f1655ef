"""Grammars by their source: one spelling for equal ones, and what is refused before anything is compiled."""

from __future__ import annotations

import json

import pytest

from headrace import Grammar
from headrace.base.errors import RequestError
from headrace.base.grammar import MAX_CHOICES, MAX_GRAMMAR_BYTES
from headrace.base.messages import EngineRequest, decode_to_engine, encode
from headrace.base.sampling import SamplingParams, SamplingSpec, StopSpec

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "ü"}}}


def test_equal_sources_are_equal_grammars():
    assert (
        Grammar.json_schema(SCHEMA) == Grammar.json_schema(json.dumps(SCHEMA, indent=4))
        == Grammar.json_schema(json.dumps(SCHEMA, ensure_ascii=False))
    )
    assert Grammar.choice(["x", "y", "x"]) == Grammar.choice(("x", "y"))
    assert json.loads(Grammar.json_schema(SCHEMA).text) == SCHEMA
    assert list(json.loads(Grammar.json_schema(SCHEMA).text)["properties"]) == ["b", "a"], (
        "properties are written in the schema's order"
    )
    assert Grammar.regex("a") != Grammar.ebnf("a")


def test_grammars_cross_the_process_border():
    request = EngineRequest(
        "r", [1], SamplingSpec(grammar=Grammar.structural_tag({"type": "structural_tag"})), StopSpec(max_tokens=1)
    )
    assert decode_to_engine(encode(request)) == request


def _nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize("make", [
    lambda: Grammar.json_schema("{", param="field"),
    lambda: Grammar.json_schema(3, param="field"),
    lambda: Grammar.json_schema("[]", param="field"),
    lambda: Grammar.json_schema(" null", param="field"),
    lambda: Grammar.json_schema({"const": object()}, param="field"),
    lambda: Grammar.json_schema(_nested(100_000), param="field"),
    lambda: Grammar.json_schema('{"items":' * 100_000 + "{}" + "}" * 100_000, param="field"),
    lambda: Grammar.json_schema({"const": "x" * MAX_GRAMMAR_BYTES}, param="field"),
    lambda: Grammar.regex("", param="field"),
    lambda: Grammar.regex("\ud800", param="field"),
    lambda: Grammar.regex("a" * (MAX_GRAMMAR_BYTES + 1), param="field"),
    lambda: Grammar.ebnf(None, param="field"),
    lambda: Grammar.choice([], param="field"),
    lambda: Grammar.choice([""], param="field"),
    lambda: Grammar.choice([1], param="field"),
    lambda: Grammar.choice(map(str, range(MAX_CHOICES + 1)), param="field"),
    lambda: Grammar.structural_tag([], param="field"),
])  # fmt: skip
def test_what_is_wrong_is_named(make):
    with pytest.raises(RequestError, match="field") as info:
        make()
    assert info.value.param == "field"


def test_sampling_takes_a_grammar_only():
    assert SamplingParams(grammar=Grammar.json_object()).validate().grammar == Grammar("json_object")
    with pytest.raises(RequestError, match="grammar"):
        SamplingParams(grammar={"type": "object"}).validate()

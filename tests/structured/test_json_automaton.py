"""States of JSON: outputs in one state have the same bitmask and forced text, whatever led there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from walks import check_states, library

from headrace.base.errors import RequestError
from headrace.base.grammar import Grammar

S, INT, N = {"type": "string"}, {"type": "integer"}, {"type": "number"}


def strict(*optional: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": [name for name in properties if name not in optional],
        "additionalProperties": False
    }


SCHEMAS: dict[str, Any] = {
    "strings": {"type": "array", "items": S},
    "records": {
        "type": "array", "items": strict("b", a=S, b=INT, c={"enum": ["a", "ab", 12, None, True]}), "minItems": 2,
        "maxItems": 20
    },
    "numbers": {"type": "array", "items": {"type": ["number", "null", "boolean"]}},
    "integers": {"type": "array", "items": INT, "maxItems": 40},
    "anything": {},
    "an object": {"type": "object"},
    "many": {"type": "array", "minItems": 30},
    "a dictionary": {"type": "object", "additionalProperties": {"anyOf": [S, {"type": "array", "items": N}]}},
    "others beside names": {
        "type": "object", "properties": {"ab": INT, 'a"b': N, "é": S}, "required": ["ab"],
        "additionalProperties": {"type": "boolean"}
    },
    "a list in itself": {
        "$defs": {"n": strict(v=S, next={"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]})}, "$ref": "#/$defs/n"
    },
    "patterns": {"type": "array", "items": {"type": "string", "pattern": "^[ab]{2}[a-z ]*$", "maxLength": 9}},
    "a pattern of branches": {"type": "array", "items": {"type": "string", "pattern": "^(ab|1|a\\.b?)+$"}},
    "lengths": {
        "type": "array",
        "items": strict(a={"type": "string", "minLength": 2, "maxLength": 4}, b={"type": "string", "minLength": 3})
    },
    "bounds": {"type": "array", "items": {"type": "integer", "minimum": -7, "maximum": 120}},
    "formats": {"type": "array", "items": {"type": "string", "format": "date"}},
    "half a pattern": {"type": "array", "items": {"type": "string", "pattern": "ab"}},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_bitmasks_of_states_are_those_of_the_library(name: str):
    num_asked, num_known = check_states(Grammar.json_schema(SCHEMAS[name]), len(name))
    assert num_known > num_asked / (20 if name in ("half a pattern", "formats") else 4), (
        f"{num_known} of {num_asked} bitmasks were known"
    )


names = st.sampled_from(["a", "ab", 'b"1', "anyOf", "é", "a/b"])
texts = st.sampled_from(
    [
        S, S, {**S, "pattern": "^a[ab1]*$"}, {**S, "pattern": "^(a|12)+$", "minLength": 3}, {**S, "maxLength": 3},
        {**S, "enum": ["a", "a,b", "é\n"]}, {**S, "format": "time"}
    ]
)
numbers = st.sampled_from([INT, N, {**INT, "minimum": 3}, {**N, "maximum": 10.5}, {"enum": [1, 12, -1.5]}])
schemas = st.recursive(
    texts | numbers | st.sampled_from(
        [{}, True, {"type": "boolean"}, {"type": ["null", "string"]}, {"enum": ["a", 1, None, False]}, {"const": "12"}]
    ),
    lambda inner: st.builds(
        lambda p,
        r: {"type": "object", "properties": p, "required": sorted(r & p.keys()), "additionalProperties": False},
        st.dictionaries(names, inner, max_size=3), st.sets(names)
    )
    | st.builds(
        lambda p, o: {"type": "object", "properties": p, "additionalProperties": o},
        st.dictionaries(names, inner, max_size=2), inner
    )
    | st.builds(
        lambda i, low, more: {"type": "array", "items": i, "minItems": low, "maxItems": low + more}, inner,
        st.integers(0, 4), st.integers(1, 6)
    )
    | st.builds(lambda i: {"type": "array", "items": i}, inner)
    | st.builds(lambda b: {"anyOf": b}, st.lists(inner, min_size=1, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(schemas, st.integers(0, 999))
def test_bitmasks_of_states_of_any_schema(schema: Any, seed: int):
    grammar = Grammar.json_schema({"type": "array", "items": schema})
    try:
        compiled = library().compile(grammar)
    except RequestError:
        return
    if compiled.states is not None:
        check_states(grammar, seed, count=3, length=40, compiled=compiled)

"""Where outputs stand in JSON: two of them in one state have one mask and one forced text, whatever led there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from walks import EOS, NUM_WORDS, STRUCTURE, TOKENS, library

from headrace.base.errors import RequestError
from headrace.base.grammar import Grammar
from headrace.execution.structured.constraint import Constraint
from headrace.execution.structured.exact import inexactness
from headrace.execution.structured.json_states import count_blanks
from headrace.execution.structured.reach import Reach
from headrace.execution.structured.reading import read_automaton

pytest.importorskip("xgrammar")
pytest.importorskip("llguidance")

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


def mask_of(lib: Any, matcher: Any) -> np.ndarray:
    mask = np.zeros((1, NUM_WORDS), dtype=np.int32)
    lib.fill([matcher], mask)
    return mask[0]


def check_walks(
    name: str, grammar: Grammar, seed: int, *, count: int = 8, length: int = 60, begin: bytes = b""
) -> tuple[int, int]:
    """Walk at random by a matcher that is told everything, and by states, from ``begin`` on every other time; how many
    masks were asked for, how many known."""
    lib = library(name)
    compiled, draw = lib.compile(grammar), np.random.default_rng(seed)
    assert compiled.states is not None
    compiled.plain = None
    known: dict[Any, tuple[np.ndarray, str]] = {}
    forced: dict[Any, tuple[bytes, str]] = {}
    num_asked = num_known = 0
    for attempt in range(count):
        told, ours, written = compiled.start(), Constraint(0, compiled), begin if attempt % 2 else b""
        for byte in written:
            told.accept([byte])
            ours.accept(byte, is_end=False)
        weights = np.where(STRUCTURE, draw.choice([1.0, 8.0, 40.0]), 1.0)
        weights[128:256] *= 0.2
        for _ in range(length):
            expected, text = mask_of(lib, told), written.decode("utf-8", "replace")
            num_asked += 1
            if ours.mask_key is not None:
                num_known += ours.mask_key in known
                mask, before = known.setdefault(ours.mask_key, (expected, text))
                assert np.array_equal(mask, expected), f"{before!r} and {text!r} are not alike"
                run, before = forced.setdefault(ours.state, (told.read_forced(), text))
                assert run == told.read_forced(), f"after {before!r} and {text!r} different text is forced"
            ids = np.flatnonzero(np.unpackbits(expected.view(np.uint8), bitorder="little")[: len(TOKENS)])
            ids = ids[ids != EOS]
            if not len(ids):
                break
            token = int(draw.choice(ids, p=weights[ids] / weights[ids].sum()))
            written += TOKENS[token]
            told.accept([token])
            ours.accept(token, is_end=False)
            assert told.error is None and ours.error is None
    return num_asked, num_known


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("by", ["xgrammar", "llguidance"])
def test_masks_of_states_are_those_of_the_library(by: str, name: str):
    schema = SCHEMAS[name]
    if by == "xgrammar" and inexactness(Grammar.json_schema(schema)) is not None:
        pytest.skip("not for this library")
    num_asked, num_known = check_walks(by, Grammar.json_schema(schema), len(name))
    assert num_known > num_asked / (20 if name in ("half a pattern", "formats") else 4), (
        f"{num_known} of {num_asked} masks were known"
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
def test_masks_of_states_of_any_schema(schema: Any, seed: int):
    grammar = Grammar.json_schema({"type": "array", "items": schema})
    if read_automaton(grammar, Reach(TOKENS), count_blanks) is None:
        return
    for name in ("xgrammar", "llguidance"):
        if name == "llguidance" or inexactness(grammar) is None:
            try:
                library(name).compile(grammar)
            except RequestError:
                continue
            check_walks(name, grammar, seed, count=3, length=40)


def tagged(*tags: tuple[str, Any, str], triggers: tuple[str, ...] = ("<a",), **more: Any) -> Grammar:
    listed = [
        {"type": "tag", "begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": end}
        for begin,
        schema, end in tags
    ]
    return Grammar.structural_tag(
        {
            "type": "structural_tag",
            "format": {"type": "triggered_tags", "triggers": list(triggers), "tags": listed, **more}
        }
    )


CALL = strict(a=S, b={"type": "array", "items": INT})
TAGS = {
    "one": (tagged(("<a>", CALL, "</a>")), b"so <<a>"),
    "arguments": (tagged(('<a>{"b": ', CALL, "}")), b'<a>{"b": {"a'),
    "two": (
        tagged(
            ("<a>1", CALL, "12"), ("<a>ab", {"type": "object"}, "}]"), ("12", strict(x={"enum": ["a", "b"]}), "true"),
            triggers=("<a>", "12")
        ),
        b"1ab<a>ab"
    ),
}


@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize("by", ["xgrammar", "llguidance"])
def test_masks_of_tags(by: str, name: str):
    grammar, begin = TAGS[name]
    for seed in range(3):
        num_asked, num_known = check_walks(by, grammar, seed, begin=begin)
        assert num_known > num_asked / 4, f"{num_known} of {num_asked} masks were known"


@pytest.mark.parametrize("grammar", [
    tagged(("<a>", INT, "</a>")), tagged(("<a>", {}, "</a>")), tagged(("<a>", CALL, " </a>")),
    tagged(("<a>", CALL, "")), tagged(("<a", CALL, "x"), ("<ab", CALL, "y")),
    tagged(("<a>é", CALL, "</a>")), tagged(("<a>", CALL, "</a>"), stop_after_first=True),
    tagged(("<ab>", CALL, "x"), ("b>", CALL, "y"), triggers=("<ab>", "b>")),
])  # fmt: skip
def test_tags_that_are_not_read(grammar: Grammar):
    assert read_automaton(grammar, Reach(TOKENS), count_blanks) is None

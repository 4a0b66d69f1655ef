"""Plain text costs nothing: masks that are kept while it is written are those that the library would tell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from walks import EOS, NUM_WORDS, TOKENS, library

from headrace.base.grammar import Grammar, Vocabulary
from headrace.execution.structured import plain as plain_module
from headrace.execution.structured.constraint import Constraint, HeldTokens
from headrace.execution.structured.exact import inexactness
from headrace.execution.structured.plain import find_plain, read_breaks

pytest.importorskip("xgrammar")

S = {"type": "string"}


def strict(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def tags(*contents: Any, end: str = "</f>", **more: Any) -> Grammar:
    listed = [{"type": "tag", "begin": f"<f{i}>", "content": content, "end": end} for i, content in enumerate(contents)]
    return Grammar.structural_tag(
        {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": listed, **more}}
    )


KNOWN = {
    "strings": Grammar.json_schema({"type": "array", "items": S}),
    "fields": Grammar.json_schema(
        strict(
            name=S, kind={"enum": ["a", "ab", "12"]}, note={"anyOf": [S, {"type": "null"}]},
            more={"type": "array", "items": strict(x=S)}
        )
    ),
    "any object": Grammar.json_object(),
    "any array": Grammar.json_schema({"type": "array"}),
    "a dictionary": Grammar.json_schema(
        {"type": "object", "additionalProperties": {"anyOf": [S, {"type": "array", "items": S}]}}
    ),
    "a reference": Grammar.json_schema(
        {"$defs": {"n": strict(v=S, next={"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]})}, "$ref": "#/$defs/n"}
    ),
    "tags": tags({"type": "json_schema", "json_schema": strict(a=S)}, {"type": "any_text"}),
    "a tag alone": Grammar.structural_tag(
        {
            "type": "structural_tag",
            "format": {"type": "tag", "begin": "12", "content": {"type": "any_text"}, "end": ["ab!", "12."]}
        }
    ),
}
AMBIGUOUS = {
    "branches": Grammar.json_schema({"anyOf": [strict(k=S), strict(k={"const": "x"}, v={"type": "null"})]}),
    "branches under a name that is a keyword": Grammar.json_schema(strict(default={"anyOf": [S, {"enum": ["x"]}]})),
    "branches of a dictionary": Grammar.json_schema(
        {"type": "object", "additionalProperties": {"anyOf": [S, {"enum": ["x"]}]}}
    ),
    "branches of anything": Grammar.json_schema({"anyOf": [{}, {"enum": ["x"]}]}),
    "branches in a definition": Grammar.json_schema(
        {"$defs": {"b": {"anyOf": [S, {"$ref": "#/$defs/c"}]}, "c": {"enum": ["x", None]}}, "$ref": "#/$defs/b"}
    ),
    "a choice of formats": Grammar.structural_tag(
        {
            "type": "structural_tag",
            "format": {"type": "or", "elements": [{"type": "const_string", "value": "yes"}, {"type": "any_text"}]}
        }
    ),
    "begins of begins": tags(),
    "a tag's schema": tags({"type": "json_schema", "json_schema": {"anyOf": [S, {"enum": ["x"]}]}}),
    "a regular expression": Grammar.regex("[a-z]+"),
}
AMBIGUOUS[
    "begins of begins"
] = Grammar.structural_tag({"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [
    {"type": "tag", "begin": "<f", "content": {"type": "json_schema", "json_schema": S}, "end": ""},
    {"type": "tag", "begin": "<fa", "content": {"type": "any_text"}, "end": "b"},
]}})


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plain_module, "MIN_TOKENS", 60)


END = np.zeros(NUM_WORDS, dtype=np.int32)
END[EOS // 32] = np.int32(1 << EOS % 32)


def plain_of(grammar: Grammar):
    breaks = read_breaks(grammar)
    return None if breaks is None else find_plain(Vocabulary(TOKENS, frozenset([EOS, EOS + 1])), len(TOKENS), breaks)


def mask_of(lib: Any, matcher: Any) -> np.ndarray:
    mask = np.zeros((1, NUM_WORDS), dtype=np.int32)
    lib.fill([matcher], mask)
    return mask[0]


def count_kept(grammar: Grammar, seed: int, num_walks: int) -> int:
    """Walk at random, with a matcher that is told everything beside; how many masks were kept."""
    lib, plain = library("xgrammar"), plain_of(grammar)
    compiled = lib.compile(grammar)
    assert plain is not None
    draw, num_kept = np.random.default_rng(seed), 0
    compiled.plain, compiled.states = plain, None
    for attempt in range(num_walks):
        held = HeldTokens(attempt % 3 * 15, (EOS,))
        constraint, told = Constraint(0, compiled, held=held), compiled.start()
        for count in range(60):
            expected = mask_of(lib, told)
            if count < held.count and (expected & ~END).any():
                expected &= ~END
            if constraint.is_steady:
                num_kept += 1
            else:
                mask = mask_of(lib, constraint.matcher)
                constraint.notice(allows_plain=constraint.settle(mask))
            assert np.array_equal(mask, expected)
            ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(TOKENS)])
            ids = ids[(ids != EOS) & ~((ids >= 128) & (ids < 256) & (draw.random() < 0.9))]
            if not len(ids):
                break
            weights = np.where(plain.is_plain[ids], 1.0, draw.choice([1.0, 8.0]))
            token = int(draw.choice(ids, p=weights / weights.sum()))
            constraint.accept(token, is_end=False)
            told.accept([token])
            assert told.error is None
    return num_kept


@pytest.mark.parametrize("name", KNOWN)
def test_kept_masks_are_those_of_a_matcher_that_was_told_everything(name: str):
    assert count_kept(KNOWN[name], len(name), 12) > 20


names = st.sampled_from(["a", "ab", "b 1", "anyOf", "default", "enum", "items"])
schemas = st.recursive(
    st.sampled_from(
        [
            S, S, {}, {"type": "integer"}, {"type": "boolean"}, {"enum": ["a", "ab", None]}, {"const": "12"},
            {"type": "object"}, {"type": "array"}
        ]
    ),
    lambda inner: st.builds(lambda p: strict(**p), st.dictionaries(names, inner, min_size=1, max_size=3))
    | st.builds(lambda p: {**strict(**p), "required": []}, st.dictionaries(names, inner, min_size=1, max_size=2))
    | st.builds(lambda i: {"type": "array", "items": i, "minItems": 1}, inner)
    | st.builds(lambda i: {"type": "object", "additionalProperties": i}, inner)
    | st.builds(lambda b: {"anyOf": b}, st.lists(inner, min_size=1, max_size=3)),
    max_leaves=5,
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(schemas, st.integers(0, 99))
def test_kept_masks_of_any_schema(schema: dict[str, Any], seed: int):
    grammar = Grammar.json_schema(schema)
    if inexactness(grammar) is None and read_breaks(grammar) is not None:
        count_kept(grammar, seed, 2)


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_where_a_text_may_decide_what_follows_nothing_is_kept(name: str):
    assert read_breaks(AMBIGUOUS[name]) is None


def test_plain_tokens_are_whole_and_have_no_meaning_in_json():
    tokens = [
        b"ab", b'"', b"a\\", b"\n", b" x", "é".encode(), "é".encode()[:1], b"", b"<", b"a<b", b"<eos>", b"\x7f",
        *(b"%d" % i for i in range(200, 300))
    ]
    plain = find_plain(Vocabulary(tokens, frozenset([10])), len(tokens) + 5, b"<")
    assert (
        plain is not None and plain.needs_root
        and [tokens[i] for i in np.flatnonzero(plain.is_plain)[:3]] == [b"ab", b" x", "é".encode()]
    )
    assert find_plain(Vocabulary([b"1" * i for i in range(500)], frozenset()), 500, b"") is None, (
        "all of them could be one name"
    )

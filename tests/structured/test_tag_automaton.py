"""States of structural tags, in the shapes in which tool calls are forced and allowed: outputs in one state have the
same bitmask and forced text, whatever led there."""

from __future__ import annotations

from typing import Any

import pytest
from test_tags import Inventor
from walks import check_states, library

from headrace.base.errors import RequestError
from headrace.base.grammar import Grammar

S, INT = {"type": "string"}, {"type": "integer"}


def strict(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False
    }


def of(format_: Any) -> Grammar:
    return Grammar.structural_tag({"type": "structural_tag", "format": format_})


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def json(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


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
ANY = {"type": "any_text"}
F, G = (
    sequence(text('{"name": "'), text(name), text('", "arguments": '), json(CALL), text("}\n</a>")) for name in "fg"
)
TAG = {"type": "tag", "begin": "<a>", "content": sequence(text("\n"), either(F, G)), "end": ""}
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
    "one alone": (tagged(("<a>", CALL, "</a>"), stop_after_first=True), b"so <<a>"),
    "at least one": (tagged(("<a>", CALL, "</a>"), at_least_one=True), b'so <a>{"a": "", "b": []}</a>1'),
    "without an end": (tagged(("<a>", CALL, "")), b'<a>{"a": "", "b": []}<'),
    "an end that begins a trigger": (tagged(("<ab", CALL, "<"), triggers=("<ab",)), b'<ab{"a": "", "b": []}<ab'),
    "an end that begins with a space": (tagged(("<a>", CALL, " </a>")), b'<a>{"a": "", "b": []}'),
    "names of names": (
        of(sequence(either(*map(text, ("f", "fg", "fgh"))), either(*map(text, ("1", "g2", "gh3"))), json(CALL))),
        b"fg"
    ),
    "allowed calls": (of({"type": "triggered_tags", "triggers": ["<a>"], "tags": [TAG]}), b'a <<a>\n{"name": "f'),
    "forced calls": (
        of(sequence(text("<a>\n"), either(F, G), {"type": "star", "content": sequence(text("\n<a>\n"), either(F, G))})),
        b'<a>\n{"name": "g", "arguments": {"a": "", "b": [1]}}\n</a>\n<a'
    ),
    "separated": (
        of({
            "type": "tags_with_separator", "separator": "\n", "at_least_one": True,
            "tags": [{"type": "tag", "begin": "<a>", "content": json(CALL), "end": "</a>"}],
        }),
        b'<a>{"a": "", "b": [1]}</a>'
    ),
    "parameters": (
        of(sequence(*({"type": "tag", "begin": f"<{n}>", "content": ANY, "end": [f"</{n}>", "</a>"]} for n in "xy"))),
        b"<x>1</</x>"
    ),
    "reasoning": (
        of(sequence({"type": "tag", "begin": "", "content": ANY, "end": "</t>"}, text("\n"), json(CALL))), b"so </t"
    ),
    "an answer instead": (of(either(sequence(text("<a>"), json(CALL), text("</a>")), json(CALL), text("<ab"))), b"<a"),
}


@pytest.mark.parametrize("name", TAGS)
def test_bitmasks_of_tags(name: str):
    grammar, begin = TAGS[name]
    for seed in range(3):
        num_asked, num_known = check_states(grammar, seed, begin=begin)
        assert name == "names of names" or num_known > num_asked / 5, f"{num_known} of {num_asked} bitmasks were known"


def test_bitmasks_of_any_format():
    num_known = 0
    for seed in range(80):
        grammar = of(Inventor(seed).any())
        try:
            compiled = library().compile(grammar)
        except RequestError:
            continue
        if compiled.states is not None:
            num_known += check_states(grammar, seed, count=4, length=25, compiled=compiled)[1]
    assert num_known > 1000


@pytest.mark.parametrize("grammar", [
    tagged(("<a>", INT, "</a>")), tagged(("<a>", {}, "</a>")), of({"type": "regex", "pattern": "a"}),
    of({"type": "triggered_tags", "triggers": ["<|call|>"], "tags": [
        {"type": "tag", "begin": "<|call|>", "content": json(CALL), "end": "x"}]}),
])  # fmt: skip
def test_tags_that_are_not_read(grammar: Grammar):
    assert library().compile(grammar).states is None

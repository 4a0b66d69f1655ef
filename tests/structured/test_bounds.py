"""The documented bounds hold, and what exceeds them is refused when it is compiled, not in the middle of an output."""

from __future__ import annotations

import json
import random
import string
from typing import Any

import pytest
from walks import EOS, allowed, library

from headrace.base.errors import RequestError
from headrace.base.grammar import MAX_CHOICES, Grammar
from headrace.execution.structured.schema import MAX_NODES, check_schema

INTEGER = {"type": "integer"}


def words(count: int, length: int = 8) -> list[str]:
    draw = random.Random(count)
    return ["".join(draw.choices(string.ascii_lowercase, k=length)) for _ in range(count)]


def strict(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def write(grammar: Grammar, text: str, *, every: int = 1) -> None:
    """Compile the grammar and write a text that it allows, with a bitmask at every so many bytes."""
    compiled = library().compile(grammar)
    matcher, written = compiled.start(), text.encode()
    for index, byte in enumerate(written):
        if index % every == 0:
            ids = allowed(library(), matcher)
            assert matcher.error is None and byte in ids, f"after {written[:index][-60:]!r}: {matcher.error}"
        matcher.accept([byte])
        assert matcher.error is None, f"after {written[:index][-60:]!r}: {matcher.error}"
    assert EOS in allowed(library(), matcher)


@pytest.mark.parametrize("count", [1999, 2000, 2001, 3000, MAX_CHOICES])
def test_many_choices(count: int):
    choices = words(count)
    for choice in (choices[0], choices[count // 2], choices[-1]):
        write(Grammar.choice(choices), choice)
        write(Grammar.json_schema({"enum": choices}), json.dumps(choice))
        write(Grammar.json_schema(strict({"kind": {"enum": choices}}, ["kind"])), json.dumps({"kind": choice}))


def test_choices_of_256_kib_and_choices_within_others():
    long = words(MAX_CHOICES, 58)
    write(Grammar.choice(long), long[99])
    nested = ["ab"[: i % 2 + 1] * (i // 2 + 1) for i in range(600)]
    for choice in ("a", "ab", nested[-1], nested[300]):
        write(Grammar.choice(nested), choice)
    for choice in ("", "a", "ab"):
        write(Grammar.choice(["", "a", "ab"]), choice)
    assert EOS not in allowed(library(), library().compile(Grammar.choice(["a", "ab"])).start())


NAMES = words(1500)
MANY: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "constants": ([{"const": name} for name in NAMES], NAMES[700]),
    "tagged objects": (
        [strict({"t": {"const": name}, "v": INTEGER, "n": {"type": "null"}}, ["t", "v", "n"]) for name in NAMES],
        {"t": NAMES[700], "v": 3, "n": None},
    ),
    "objects of one name": ([strict({name: INTEGER}, [name]) for name in NAMES], {NAMES[700]: 1}),
    "objects with a free rest": (
        [{"type": "object", "properties": {name: INTEGER}, "required": [name]} for name in NAMES], {NAMES[9]: 1, "u": 2}
    ),
    "optional parts": ([strict({"kind": {"const": n}, "note": {"type": "string"}}, ["kind"]) for n in NAMES],
                       {"kind": NAMES[1499]}),
    "arrays": ([{"type": "array", "items": {"const": name}} for name in NAMES], [NAMES[700]] * 3),
    "patterns": ([{"type": "string", "pattern": f"^a+{name}$"} for name in NAMES], "aaa" + NAMES[700]),
    "ranges": ([{"type": "integer", "minimum": 10 * i, "maximum": 10 * i + 5} for i in range(1500)], 14_992),
}


@pytest.mark.parametrize("parts", MANY)
def test_any_of_1500(parts: str):
    branches, value = MANY[parts]
    write(Grammar.json_schema({"anyOf": branches}), json.dumps(value))
    write(
        Grammar.json_schema(strict({"in": {"type": "array", "items": {"anyOf": branches}}}, ["in"])),
        json.dumps({"in": [value, value]})
    )


@pytest.mark.parametrize(("grammar", "text"), [
    (Grammar.regex("[a-z]{10000}"), "a" * 10_000),
    (Grammar.regex("(ab|cd){1,10000}"), "ab" * 10_000),
    (Grammar.ebnf('root ::= ("ab" | "c"){10000}'), "ab" * 10_000),
    (Grammar.json_schema({"type": "string", "minLength": 10_000}), json.dumps("x" * 10_000)),
    (Grammar.json_schema({"type": "array", "items": INTEGER, "minItems": 10_000}), json.dumps([1] * 10_000)),
])
def test_ten_thousand_repetitions(grammar: Grammar, text: str):
    write(grammar, text, every=1 if grammar.kind == "json_schema" and '"string"' in grammar.text else 97)


def test_subschemas_are_counted_as_documented():
    def schema(count: int) -> dict[str, Any]:  # itself, and a subschema for each name
        return strict({f"p{i}": INTEGER for i in range(count - 2)}, [])

    check_schema(schema(MAX_NODES), "json_schema")  # with additionalProperties
    with pytest.raises(RequestError, match=f"{MAX_NODES} subschemas"):
        check_schema(schema(MAX_NODES + 1), "json_schema")


@pytest.mark.parametrize("schema", [
    strict({name: INTEGER for name in words(3000)}, []),
    {"anyOf": [{"type": "object", "properties": {"a": {}, name: INTEGER}, "required": ["a"]} for name in NAMES]},
    {"anyOf": [{"type": "object", "properties": {name: INTEGER}} for name in NAMES]},
    {"anyOf": [{"type": "string", "minLength": i, "maxLength": i} for i in range(1500)]},
], ids=["optional names", "free names beside two", "free names", "lengths"])
@pytest.mark.parametrize("place", ["first", "inner", "late"])
def test_what_leaves_too_many_ways_is_refused_when_it_is_compiled(schema: dict[str, Any], place: str):
    if place == "inner":
        schema = strict({"in": {"type": "array", "items": schema, "minItems": 1}}, ["in"])
    elif place == "late":
        first = {"type": "array", "items": {"enum": ["a", 1, None]}}
        schema = strict({"first": first, "note": {"type": "string"}, "in": schema}, ["first", "note", "in"])
    with pytest.raises(RequestError, match=r"json_schema cannot be used as a grammar: .*fewer alternatives"):
        library().compile(Grammar.json_schema(schema))

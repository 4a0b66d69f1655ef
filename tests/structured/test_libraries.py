"""Grammar libraries against independent oracles: what random choices write is valid, what is valid can be written, and
what cannot be enforced is refused by name."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from walks import accepts, library, spellings, walks

from headrace.base.errors import RequestError
from headrace.base.grammar import Grammar
from headrace.execution.structured.library import choose_library
from headrace.service.coordination import describe_failure

I, S, B, N, Z = ({"type": t} for t in ("integer", "string", "boolean", "number", "null"))  # noqa: E741


def obj(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties) if required is None else required,
        **more
    }


def strict(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    return obj(properties, required, additionalProperties=False)


NODE = strict({"v": I, "next": {"anyOf": [{"$ref": "#/$defs/n"}, Z]}})

PLAIN: list[tuple[Any, list[Any], list[Any]]] = [
    (
        strict({"a": S, "b": {"type": "array", "items": strict({"c": I, "d": {"enum": ["x", "y z"]}})}}),
        [{"a": "ü\n", "b": [{"c": -1, "d": "y z"}]}], [{"a": "x"}, {"a": "", "b": [{}]}]
    ),
    (strict({"a": I, "b": S, "c": B}, []), [{}, {"b": "x"}, {"a": 1, "c": True}], [{"d": 1}, {"a": 1.5}]),
    (strict({"a": I, "aa": S, "aaa": N}, ["aa"]), [{"aa": ""}, {"a": 3, "aa": "", "aaa": -1.5e3}], [{"a": 3}]),
    (
        strict({"a": {"type": "array", "items": S, "minItems": 2, "maxItems": 3}}),
        [{"a": ["", "x"]}, {"a": ["", "", ""]}], [{"a": []}, {"a": [""] * 4}]
    ),
    ({"type": "array", "items": {"anyOf": [I, Z]}, "minItems": 1}, [[1], [None, 2]], [[], ["x"]]),
    ({"enum": ["a", "b c", None, True]}, ["a", "b c", None, True], ["c", False]),
    ({"const": "x y"}, ["x y"], ["xy"]),
    (
        {"anyOf": [strict({"x": I}), strict({"y": S}), Z]}, [{"x": 1}, {"y": ""}, None],
        [{}, {"x": ""}, {"x": 1, "y": ""}]
    ),
    (
        {"$defs": {"n": NODE}, "$ref": "#/$defs/n"}, [{"v": 1, "next": None}, {"v": 1, "next": {"v": 2, "next": None}}],
        [{"v": 1}]
    ),
    ({"title": "T", **strict({"a": {**S, "description": "d"}})}, [{"a": "q\"\\"}], [{}]),
    ({}, [{"a": [1]}, "x", None], []),
    (True, [[], 1.5], []),
    ({"type": "object"}, [{}, {"a": [1, {"b": None}]}], [[], "x"]),
    ({"type": "object", "properties": {}, "additionalProperties": True}, [{}, {"a": ""}], [None]),
    ({"type": "array", "minItems": 1}, [[[]], [1, "x", {}]], [[], {}]),
    (
        strict({"a": {}, "b": {"type": "array", "items": True}}), [{"a": {"c": 1}, "b": [None]}],
        [{"a": 1}, {"a": 1, "b": {}}]
    ),
    ({"type": "object", "additionalProperties": {"anyOf": [S, Z]}}, [{}, {"a": "", "b": None}], [{"a": 1}, ["x"]]),
    (
        {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": I}}, [{"a": {"b": 1}}],
        [{"a": 1}, {"a": {"b": ""}}]
    ),
]
"""Schema, instances it allows, and instances it does not."""

HARDER: list[tuple[Any, list[Any], list[Any]]] = [
    ({"enum": ["a", 1, 2.5, {"x": [1]}, []]}, ["a", 1, {"x": [1]}], [2, {}]),
    ({"const": {"a": [1, "x"], "b": None}}, [{"a": [1, "x"], "b": None}], [{"a": [1, "x"]}]),
    ({"type": "array", "prefixItems": [I, S], "items": False}, [[1, "x"], [1]], [["x"], [1, "x", 1]]),
    ({"type": "string", "pattern": "^[a-c]{2,4}$"}, ["ab", "cccc"], ["a", "abd"]),
    ({"type": "string", "pattern": "ab"}, ["ab", "xxabyy"], ["a b"]),
    ({"type": "string", "pattern": "^a"}, ["a", "abc"], ["ba"]),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, ["abc"], ["abcd", ""]),
    ({"type": "string", "pattern": "a|b", "minLength": 2}, ["xa", "bb"], ["a", "xx"]),
    ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "😀😀"], ["a", "abcde", "😀"]),
    ({"type": "integer", "minimum": -3, "maximum": 12}, [-3, 0, 12], [-4, 13, 1.5]),
    ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 5}, [1, 4], [0, 5]),
    ({"type": "number", "minimum": 0.5, "maximum": 2.25}, [0.5, 1, 2.25], [0.4, 2.26, -1]),
    ({"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1}, [0, 0.99, -0.5], [-1, 1, 2]),
    ({"type": "integer", "multipleOf": 7}, [0, 14, -7], [8]),
    ({"anyOf": [obj({"a": I}), obj({"a": S, "b": I})]}, [{"a": 1}, {"a": "x", "b": 1}], [{"a": "x"}]),
    ({"oneOf": [S, I]}, ["x", 1], [None]),
    (
        {"oneOf": [strict({"k": {"const": "a"}, "v": I}), strict({"k": {"const": "b"}, "v": S})]}, [{"k": "a", "v": 1}],
        [{"k": "b", "v": 1}]
    ),
    ({"allOf": [obj({"a": I}), obj({"b": S})]}, [{"a": 1, "b": "x"}], [{"a": 1}, {"b": ""}]),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, [3, 5], [2, 6]),
    (
        {
            "type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}}}, "required": ["c"],
            "additionalProperties": False
        },
        [{"c": [{"c": []}]}], [{"c": [{}]}]
    ),
    (obj({"a": I}, []), [{}, {"a": 1}, {"b": None}, {"a": 1, "b": "x"}], [{"a": "x"}]),
    (obj({"a": I}, [], additionalProperties=S), [{"a": 1, "b": "x"}], [{"b": 1}, {"a": ""}]),
    (
        {"type": "object", "patternProperties": {"^x": I}, "additionalProperties": False}, [{"xa": 1}, {}],
        [{"xa": ""}, {"y": 1}]
    ),
    (
        {"type": "object", "properties": {"a": I}, "patternProperties": {"^b": S}, "additionalProperties": False},
        [{"a": 1, "bx": ""}], [{"bx": 1}]
    ),
    ({"type": "object", "maxProperties": 1, "additionalProperties": I}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    ({"type": ["string", "null"]}, ["", None], [1]),
    ({"type": ["integer", "string"], "minimum": 4, "maxLength": 1}, [4, "x"], [3, "xx"]),
    ({"enum": [1, 2, 3], "minimum": 2}, [2, 3], [1]),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer", "minimum": 0}}, "maximum": 3}, [0, 3], [-1, 4]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
    ({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["127.0.0.256", "1.2.3"]),
    (
        {"type": "string", "format": "date"}, ["2024-02-29", "2000-02-29", "1999-12-31"],
        ["2023-02-29", "1900-02-29", "2024-04-31", "2024-00-01", "2024-1-1"]
    ),
    ({"type": "string", "format": "email"}, ["a@b.org"], ["a"]),
    ({"type": "string", "format": "password"}, ["", "a"], [1]),
    ({"type": "string", "pattern": '^[^"]*$'}, ["", "a\n\\"], ['"', 'a"b']),
    ({"type": "string", "pattern": r"^[^\\]+$"}, ['"', "é"], ["\\", ""]),
    ({"type": "string", "pattern": "^[^ -~]$"}, ["\n", "é"], ['"', "\\", "a"]),
    ({"type": "string", "pattern": r"^[\x00-\x1f]$"}, ["\t", "\n"], ['"', "\\", " "]),
    ({"type": "string", "pattern": r"^\x00?a[^[]$"}, ["ab", "a]", 'a"'], ["a", "a["]),
    ({"type": "string", "pattern": r"^[[a&&b!--]$"}, ["[", "a", "b", "&", "!", "-", ",", '"'], ["c", "."]),
    ({"type": "object", "patternProperties": {'^[^"]$': I}, "additionalProperties": False}, [{"a": 1}], [{'"': 1}]),
    (
        {"enum": [9000000000000000, -0.1, 1.5e-7, 123456789.12345]}, [9000000000000000, -0.1, 123456789.12345],
        [9000000000000001, 123456789.1234]
    ),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [0.001, 1], [0, -0.1, 1.001]),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [0, 2**63 - 1], [-1]),
    (
        obj(
            {
                "format": {"type": "array", "items": {"type": "string", "format": "path"}},
                "f": {"const": {"format": "path"}},
            },
            ["format", "f"], additionalProperties=False
        ),
        [{"format": ["/a"], "f": {"format": "path"}}],
        [{"format": ["/a"], "f": {}}, {"format": [1], "f": {"format": "path"}}]
    ),
]


# Python's notation may get operators in classes
@pytest.mark.filterwarnings("ignore:Possible set", "ignore:Possible nested set")
@pytest.mark.parametrize(("schema", "right", "wrong"), PLAIN + HARDER)
def test_schemas_are_enforced(schema: Any, right: list[Any], wrong: list[Any]):
    grammar = Grammar.json_schema(schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    outputs = list(walks(grammar, 10, limit=100))
    assert outputs or schema in ({}, True), "no walk came to its end"
    for text in outputs:
        validator.validate(json.loads(text))
    for value in right:
        validator.validate(value)
        assert all(accepts(grammar, text) for text in spellings(value)), value
    for value in wrong:
        assert not validator.is_valid(value)
        assert not any(accepts(grammar, text) for text in spellings(value)), value


@pytest.mark.parametrize(("schema", "right", "wrong"), [
    (
        {"type": "string", "format": "date-time"}, ["2024-02-29T12:00:00Z", "1999-12-31t23:59:59.5+01:00"],
        ["2023-02-29T12:00:00Z", "2024-02-29T24:00:00Z", "2024-02-29T12:00:00", "2024-02-29"]
    ),
    (
        {"type": ["string", "null"], "format": "time"}, ["12:00:00Z", "00:00:00.123-23:59", None],
        ["12:00:60Z", "12:00Z", "12:00:00+24:00"]
    ),
    (
        {"type": "string", "format": "date", "pattern": "^2", "maxLength": 10}, ["2024-02-29"],
        ["1996-02-29", "2023-02-29"]
    ),
    ({"enum": ["2024-01-01", "x"], "format": "date"}, ["2024-01-01"], ["x"]),
])  # fmt: skip
def test_times_are_times(schema: Any, right: list[Any], wrong: list[Any]):
    grammar = Grammar.json_schema(schema)
    assert [
        accepts(grammar, json.dumps(value)) for value in (*right, *wrong)
    ] == [True] * len(right) + [False] * len(wrong)


names = st.sampled_from(["a", "ab", 'b"1', "é"])
schemas = st.recursive(
    st.sampled_from([
        S, I, N, B, Z, {}, {"enum": ["a", 1, None]}, {"const": "12"}, {"type": ["null", "string"]},
        {"type": "string", "pattern": "^a[ab1]*$"}, {"type": "string", "minLength": 1, "maxLength": 3},
        {"type": "integer", "minimum": 3}, {"type": "number", "maximum": 10.5}, {"type": "string", "format": "time"},
    ]),
    lambda inner: st.builds(
        lambda p, r: strict(p, sorted(r & p.keys())), st.dictionaries(names, inner, max_size=3), st.sets(names)
    )
    | st.builds(lambda p, o: obj(p, [], additionalProperties=o), st.dictionaries(names, inner, max_size=2), inner)
    | st.builds(lambda i, low: {"type": "array", "items": i, "minItems": low, "maxItems": 4}, inner, st.integers(0, 3))
    | st.builds(lambda b: {"anyOf": b}, st.lists(inner, min_size=1, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(schemas)
def test_any_schema_is_enforced_or_refused(schema: Any):
    validator = jsonschema.Draft202012Validator(schema)
    try:
        library().compile(Grammar.json_schema(schema))
    except RequestError:
        return
    for text in walks(Grammar.json_schema(schema), 3, limit=60):
        validator.validate(json.loads(text))


def test_any_object():
    for text in walks(Grammar.json_object(), 15):
        assert isinstance(json.loads(text), dict)
    assert (
        accepts(Grammar.json_object(), '{"a": [1, {"b": null}]}')
        and not accepts(Grammar.json_object(), "[1]")
    )
    assert not accepts(Grammar.json_object(), "{" + " " * 100 + "}"), "no blanks without end"


def test_a_library_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch):
    assert choose_library(Grammar.regex("a"))[0] == "llguidance"
    monkeypatch.setenv("HEADRACE_DISABLE_PLUGINS", "llguidance")
    with pytest.raises(RequestError, match=r"llguidance: .*pip install llguidance"):
        choose_library(Grammar.regex("a"))


@pytest.mark.parametrize(("keyword", "schema"), [
    ("uniqueItems", {"type": "array", "uniqueItems": True}), ("contains", {"type": "array", "contains": I}),
    ("if", {"if": S, "then": {"maxLength": 1}}),
    ("not", strict({"a": {"not": S}})), ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("propertyNames", {"type": "object", "propertyNames": {"maxLength": 1}}),
    ("minProperties", {"type": "object", "minProperties": 1}),
    ("oneOf", {"oneOf": [I, N]}), ("unevaluatedProperties", obj({"a": I}, unevaluatedProperties=False)),
    ("format", {"type": "string", "format": "shoe-size"}),
    ("multipleOf", {"type": "integer", "multipleOf": 10**7}),
    ("x-guidance", {"type": "object", "x-guidance": {"lenient": True}}),
    ("ref", {"$ref": "#"}), ("http", {"$ref": "http://127.0.0.1/x"}), ("Unsatisfiable", {"allOf": [S, I]}),
    ("look", {"type": "string", "pattern": "^(?=a)b$"}),
    ("not whole", {"type": "string", "pattern": "a\\"}), ("not whole", {"type": "string", "pattern": "a)|(b"}),
    ("not whole", {"type": "object", "patternProperties": {"[a": {}}}),
    (
        "\\$ref.*itself",
        {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "type": "array",
            "items": {"$ref": "#/$defs/a"}
        }
    ),
    ("\\$ref.*itself", strict({"a": {"$ref": "#/properties/a"}}, [])),
    ("const.*-9223372036854775808", {"type": "integer", "const": -(2**63)}),
    ("minimum", {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}),
    ("imum", {"type": "integer", "minimum": -1e20, "maximum": -1e19}),
    ("enum.*1234567890123456789", {"enum": ["a", {"id": [1234567890123456789]}]}),
    ("const.*15 digits", {"const": 123456789.12345679}), ("const.*control", {"const": "a\0"}),
    ("enum.*control", {"enum": ["a", ["\x1b["]]}),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}),
    ("exclusiveMaximum", {"exclusiveMaximum": -1, "minimum": -1.5}),
    ("exclusiveMinimum", {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 1, "allOf": [{"exclusiveMaximum": 1.9}]}),
    ("empty", {"type": "string", "pattern": r"^a\x01b$"}),
    ("large", json.loads('{"items":' * 70 + "{}" + "}" * 70)), ("allows no output", False),
    (
        "ref",
        {
            "$defs": {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1500)},
            "$ref": "#/$defs/d0"
        }
    ),
])  # fmt: skip
def test_what_is_not_enforced_is_refused_by_name(keyword: str, schema: Any):
    grammar = Grammar.json_schema(schema)
    with pytest.raises(RequestError, match=f"(?i){keyword}") as info:
        library().compile(grammar)
    assert info.value.param == "json_schema" and "%llguidance" not in str(info.value)


@pytest.mark.parametrize("grammar", [
    Grammar.regex("a{1,99999999}"), Grammar.regex("(" * 10_000), Grammar.regex("a" * 100_000), Grammar.regex("[[[["),
    Grammar.regex(r"(a)\1"),
    Grammar.ebnf('root ::= "a"{1,99999999}'), Grammar.ebnf("root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    Grammar.ebnf("nonsense"),
    Grammar.ebnf("\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(2000))),
    Grammar.ebnf('start: %json {"uniqueItems": true}'), Grammar.ebnf('root ::= missing'),
    Grammar.ebnf("root ::= root"), Grammar.structural_tag({}),
    Grammar.structural_tag({"type": "structural_tag", "format": {"type": "nonsense"}}),
    Grammar.structural_tag({"type": "structural_tag", "format": {"type": "regex", "pattern": "a{1,99999999}"}}),
    Grammar.structural_tag(
        {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"uniqueItems": True}}}
    ),
])  # fmt: skip
def test_bombs_and_nonsense_are_refused(grammar: Grammar):
    with pytest.raises(Exception) as info:
        library().compile(grammar)
    assert isinstance(describe_failure(info.value), RequestError)


@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-f]{3}-[0-9]+", r"(yes|no)(, (yes|no))*", r"\d{4}-\d{2}", "a/b|c\nd", r"[^\n]{1,5}", "(a|b)*c",
        r"\{[0-9]\}", "é+|😀"
    ]
)
def test_regex_outputs_match_as_a_whole(pattern: str):
    outputs = list(walks(Grammar.regex(pattern), 12, limit=60))
    assert outputs
    for text in outputs:
        assert "\ufffd" in text or re.fullmatch(pattern, text), text


def test_choices():
    choices = ["red", "green blue", 'q"uo\\te', "new\nline", "re", "日本"]
    assert set(walks(Grammar.choice(choices), 30)) <= set(choices)
    assert all(accepts(Grammar.choice(choices), choice) for choice in choices)
    assert (
        not accepts(Grammar.choice(choices), "r") and accepts(Grammar.choice(["", "x"]), "")
    )


@pytest.mark.parametrize("text", [
    'root ::= "(" root ")" | "x"', 'start: "(" start ")" | "x"', '?start: "(" start ")" | "x"',
    'root ::= start\nstart ::= "(" root ")" | "x"', "root ::= pair\npair ::= [(] root [)] | \"x\" # comment",
])  # fmt: skip
def test_context_free_grammars_in_both_notations(text: str):
    for output in walks(Grammar.ebnf(text), 20):
        depth = output.count("(")
        assert output == "(" * depth + "x" + ")" * depth


@pytest.mark.parametrize("text", ['root ::= "a"{,2}', "root ::= [\\-]", "nonsense", '?start: missing', "start ::= 'a'"])
def test_what_is_wrong_with_a_grammar_is_told_of_it(text: str):
    with pytest.raises(RequestError, match="the ebnf cannot be used as a grammar") as info:
        library().compile(Grammar.ebnf(text))
    assert info.value.param == "ebnf"


ARGUMENTS = strict({"x": I})


def tags(**more: Any) -> Grammar:
    listed = [
        {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": ARGUMENTS}, "end": "</f>"},
        {"type": "tag", "begin": "<f=b>", "content": {"type": "any_text"}, "end": ["</f>", "</g>"]},
    ]
    return Grammar.structural_tag(
        {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": listed, **more}}
    )


CALLS = re.compile(
    r"""((?!<f)(.|\n))*((<f=a>\{\s*"x"\s*:\s*-?\d+\s*\}</f>|<f=b>((?!</[fg]>)(.|\n))*</[fg]>)((?!<f)(.|\n))*)*"""
)


def test_tags_in_free_text():
    for text in walks(tags(), 12, limit=80):
        assert CALLS.fullmatch(text), text
    pieces = ["<f", "<f=a>", '{"x": 1}', "</f>", "<f=b>", "hm ", "<", "</g>", "\n"]
    draw, found = random.Random(5), set()
    for _ in range(60):
        text = "".join(draw.choices(pieces, k=draw.randrange(7)))
        found.add(accepts(tags(), text))
        assert accepts(tags(), text) is bool(CALLS.fullmatch(text)), text
    assert found == {True, False}


def test_tags_that_must_come_and_special_tokens():
    call = 'a <f=a>{"x": 1}</f>'
    assert (
        accepts(tags(at_least_one=True), call + " b")
        and not accepts(tags(at_least_one=True), "a b")
    )
    assert (
        accepts(tags(stop_after_first=True), call)
        and not accepts(tags(stop_after_first=True), call + "b")
    )
    special = {
        "type": "tag", "begin": "<|call|>f:", "content": {"type": "json_schema", "json_schema": ARGUMENTS},
        "end": "<|call|>"
    }
    grammar = Grammar.structural_tag(
        {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<|call|>"], "tags": [special]}}
    )
    assert accepts(grammar, 'So: <|call|>f:{"x": 2}<|call|> Done.'
    ) and accepts(grammar, "no")
    assert not accepts(grammar, "<|call|>g") and not accepts(grammar, '<|call|>f:{"x": 2}')


def test_older_structural_tags():
    grammar = Grammar.structural_tag(
        {
            "type": "structural_tag", "structures": [{"begin": "<f=a>", "schema": ARGUMENTS, "end": "</f>"}],
            "triggers": ["<f="]
        }
    )
    assert accepts(grammar, 'x <f=a>{"x": 1}</f> y') and not accepts(grammar, "x <f=b>")


def test_nested_formats():
    def text(value: str) -> dict:
        return {"type": "const_string", "value": value}

    inner = {
        "type": "sequence",
        "elements": [text("a/"), {"type": "or", "elements": [text("\n"), {"type": "regex", "pattern": "[0-9]/?"}]}]
    }
    format_ = {
        "type": "sequence",
        "elements": [
            {"type": "plus", "content": inner}, {"type": "optional", "content": text("!")}, {"type": "any_text"}
        ]
    }
    grammar = Grammar.structural_tag({"type": "structural_tag", "format": format_})
    assert all(
        accepts(grammar, ok) for ok in ("a/\n", "a/1/a/2", "a/1!rest\nof it")
    ) and not accepts(grammar, "a/")
    for middle in (
        {"type": "any_text"},
        {
            "type": "triggered_tags", "triggers": ["<f"],
            "tags": [{"type": "tag", "begin": "<f>", "content": text("x"), "end": ""}]
        }
    ):
        with pytest.raises(RequestError, match="last"):
            library().compile(
                Grammar.structural_tag(
                    {"type": "structural_tag", "format": {"type": "sequence", "elements": [middle, text("!")]}}
                )
            )

"""Grammars of forced calls: what they let through is what the parser reads as calls of the tools, in every format."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
from samples import PAIRS, parser, run, summary

from headrace.base.errors import RequestError
from headrace.base.grammar import Grammar, Vocabulary
from headrace.execution.structured.llguidance import GuidanceLibrary
from headrace.service.parsing.choice import Formats
from headrace.service.parsing.forcing import (
    after_reasoning,
    confine_output,
    delay_grammar,
    enforces_lark,
    force_calls,
    write_call,
)
from headrace.service.parsing.inputs import schema_of_input
from headrace.service.parsing.known_formats import REASONING_FORMATS, TOOL_FORMATS
from headrace.service.parsing.parser import OutputParser
from headrace.service.parsing.schemas import ToolSchemas, loosen

WEATHER = {
    "type": "object", "required": ["city"],
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"], "type": "string"},
        "metric": {"type": "boolean"},
        "where": {"$ref": "#/$defs/place"},
    },
    "$defs": {
        "place": {
            "type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False
        }
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "noop", "parameters": {"type": "object", "properties": {}}}},
    {
        "type": "function",
        "function": {
            "name": "opt",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}}
        }
    },
]
SPECIAL = ["</s>", "｜DSML｜", *(f"<|{t}|>" for t in ("channel", "message", "end", "start", "constrain", "call"))]
TOKENS = [bytes([i]) for i in range(256)] + [t.encode() for t in SPECIAL]
EOS = 256


def encode(text: str) -> list[int]:
    ids = []
    while text:
        special = next((i for i, t in enumerate(SPECIAL) if text.startswith(t)), None)
        ids += list(text[0].encode()) if special is None else [256 + special]
        text = text[1 if special is None else len(SPECIAL[special]) :]
    return ids


@functools.cache
def library() -> GuidanceLibrary:
    return GuidanceLibrary(Vocabulary(TOKENS, frozenset(range(256, len(TOKENS)))), len(TOKENS), [EOS])


def allows(tag: dict, text: str) -> bool:
    """Whether the grammar derives the text as a whole."""
    matcher = library().compile(Grammar.structural_tag(tag)).start()
    matcher.accept(encode(text))
    if matcher.error:
        return False
    mask = np.zeros((1, -(-len(TOKENS) // 32)), dtype=np.int32)
    library().fill([matcher], mask)
    return bool(mask[0, EOS // 32] >> (EOS % 32) & 1)


def written(name: str, *calls: tuple[str, dict]) -> str:
    writing = TOOL_FORMATS.load(name).writing
    texts = [
        write_call(writing, n, a, lambda v: json.dumps(v, ensure_ascii=False)).replace("$index", "0") for n, a in calls
    ]
    return writing.begin + (writing.between or "").join(texts) + writing.end


RIGHT = {"city": "Pa<ris> [\"\\ 日", "days": -3, "unit": "F", "metric": True, "where": {"x": 1.5}}


@pytest.mark.parametrize("name", TOOL_FORMATS.names())
def test_forced_calls_are_what_the_parser_reads(name):
    tag = force_calls(TOOLS, TOOL_FORMATS.load(name))
    for calls in (
        [("noop", {})], [("get_weather", RIGHT)], [("get_weather", {"city": "x", "metric": False})], [("opt", {})],
        [("opt", {"b": None})], [("opt", {"a": 1, "b": None})]
    ):
        text = written(name, *calls)
        assert allows(tag, text), text
        _, content, found = summary(run(parser(name), [text]))
        assert content == "" and [(n, json.loads(a), c) for n, a, c in found] == [(*c, True) for c in calls]
    wrong = [
        [("evil", {})], [("get_weather", {})], [("get_weather", {"city": "x", "unit": "K"})],
        [("get_weather", {"city": "x", "days": "a\nb"})],
        [("get_weather", {"city": "x", "where": {"y": 1}})], [("get_weather", {"city": "x", "other": 1})],
        [("opt", {"a": 1.5})], [("noop", {"a": "x"})],
    ]
    for calls in wrong:
        assert not allows(tag, written(name, *calls)), calls
    for text in ("", "Hello", written(name, ("noop", {})) + " and more", written(name, ("noop", {}))[:-1]):
        assert not allows(tag, text)


@pytest.mark.parametrize("name", TOOL_FORMATS.names())
def test_inputs_of_custom_tools(name):
    """A regular expression binds the text, which the parser tells as it is."""
    schema = schema_of_input(r'\*\*\* [a-z]+\n("[0-9]")?|x|q(.|\n)*')
    tools = [{"type": "function", "function": {"name": "patch", "parameters": schema, "strict": True}}]
    tag = force_calls(tools, TOOL_FORMATS.load(name))
    for text in ('*** a\n"7"', "x", "q\nany <b>"):
        call = written(name, ("patch", {"input": text}))
        assert allows(tag, call)
        own = OutputParser(
            tools=TOOL_FORMATS.load(name), schemas=ToolSchemas([("patch", schema)]), custom=frozenset({"patch"})
        )
        assert summary(run(own, call))[1:] == ("", [("patch", text, True)])
    for text in ("*** A\n", "y", "xx", '*** a\n"7'):
        assert not allows(tag, written(name, ("patch", {"input": text}))), text


@pytest.mark.parametrize("name", TOOL_FORMATS.names())
def test_inputs_by_an_expression_with_anchors(name):
    """They say that it matches the whole text, which it does anyway."""
    schema = schema_of_input(r"^(?P<number>[0-9]+)|a\$$")
    tag = force_calls(
        [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}], TOOL_FORMATS.load(name)
    )
    for text, is_allowed in (("12", True), ("a$", True), ("a", False), ("^1", False), ("1$", False)):
        assert allows(tag, written(name, ("f", {"input": text}))) is is_allowed, text
    if (writing := TOOL_FORMATS.load(name).writing).pair and not writing.quotes:
        schema = schema_of_input("a|b)|(c")  # would take a text for a whole call
        function = {"name": "f", "parameters": schema, "strict": True}
        with pytest.raises(RequestError, match="is not whole"):
            allows(force_calls([{"type": "function", "function": function}], TOOL_FORMATS.load(name)), "")


@pytest.mark.parametrize("name", TOOL_FORMATS.names())
def test_inputs_that_follow_a_grammar(name):
    lark = 'start: "*** " /[a-z]+/ LF (/"[^"]*"/ LF)* "end"\n%import common.LF'
    function = {"name": "patch", "parameters": schema_of_input(), "strict": True, "lark": lark}
    own = TOOL_FORMATS.load(name)
    forced, free = (force_calls([{"type": "function", "function": function}], own, is_forced=f) for f in (True, False))
    right, wrong = ('*** a\n"\\7 日"\nend', "*** a\nend"), ("*** A\nend", "*** a\n7\nend")
    for text in (*right, *wrong):
        call, is_allowed = written(name, ("patch", {"input": text})), text in right or not enforces_lark(own.writing)
        assert allows(forced, call) is allows(free, call) is is_allowed, text


@pytest.mark.parametrize("name", TOOL_FORMATS.names())
def test_several_calls(name):
    several = written(name, ("get_weather", {"city": "x"}), ("noop", {}), ("noop", {}))
    can_repeat = TOOL_FORMATS.load(name).writing.between is not None
    assert allows(force_calls(TOOLS, TOOL_FORMATS.load(name)), several) is can_repeat
    assert not allows(force_calls(TOOLS, TOOL_FORMATS.load(name), is_parallel=False), several)
    if can_repeat:
        assert len(summary(run(parser(name), [several]))[2]) == 3


@pytest.mark.parametrize("name", TOOL_FORMATS.names())
def test_calls_after_reasoning(name):
    reasoning = REASONING_FORMATS.load(PAIRS[name])
    start, end = reasoning.writing or (reasoning.starts[0], reasoning.ends[0])
    call = written(name, ("noop", {}))
    tag = force_calls(TOOLS, TOOL_FORMATS.load(name), reasoning)
    open_tag = force_calls(TOOLS, TOOL_FORMATS.load(name), reasoning, is_open=True)
    space = "" if reasoning.channels or call.startswith("\n") else "\n\n"
    thought = f"Hm, {{\n1 < 2}}\n{end}{space}{call}"
    assert allows(tag, call) and allows(tag, start + thought) and allows(open_tag, thought)
    assert (
        not allows(open_tag, "Hm") and not allows(tag, start + thought + "x")
        and not allows(tag, f"{start}Hm{end}Hello")
    )
    found = summary(run(parser(name, PAIRS[name]), [start + thought]))
    assert found[0].startswith("Hm") and (found[1], [n for n, _, _ in found[2]]) == ("", ["noop"])


@pytest.mark.parametrize("name", TOOL_FORMATS.names())
def test_strict_calls_where_text_may_stand(name):
    strict = [{"type": "function", "function": {**t["function"], "strict": True}} for t in TOOLS[:2]]
    strict[0]["function"]["parameters"] = {**WEATHER, "additionalProperties": False}
    tag = force_calls(strict, TOOL_FORMATS.load(name), is_forced=False)
    answer = TOOL_FORMATS.load(name).writing.answer
    assert (
        allows(tag, answer + "Hello < {there} [you].\n") and allows(tag, written(name, ("get_weather", {"city": "x"})))
    )
    assert (
        not allows(tag, written(name, ("evil", {})))
        and not allows(tag, written(name, ("get_weather", {"city": "x", "other": 1})))
    )
    if name not in ("llama3_json", "pythonic", "gemma", "gpt_oss"):
        assert (
            allows(tag, "So:\n" + written(name, ("noop", {})))
            and not allows(tag, "So:\n" + written(name, ("evil", {})))
        )


@pytest.mark.parametrize("name", TOOL_FORMATS.names())
def test_an_answer_of_a_given_form_or_calls(name):
    formats = Formats(TOOL_FORMATS.load(name), REASONING_FORMATS.load(PAIRS[name]))
    asked = Grammar.json_schema(
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    )
    tag = json.loads(confine_output(formats, asked, TOOLS, "").text)
    reasoning, call = formats.reasoning, written(name, ("noop", {}))
    start, end = reasoning.writing or (reasoning.starts[0], reasoning.ends[0])
    is_marked = name not in ("llama3_json", "pythonic", "gemma")
    for lead in [f"{start}Hm{end}"] + [""] * (not reasoning.is_open):
        answer = lead + formats.tools.writing.answer + '{"a": 4}'
        assert allows(tag, answer) and allows(tag, lead + call) is is_marked
        assert summary(run(parser(name, PAIRS[name]), [answer])) == (lead and "Hm", '{"a": 4}', [])
    for text in ("Hello", '{"b": 4}', '{"a": "x"}', call + '{"a": 4}', '{"a": 4}' + call):
        assert not allows(tag, formats.tools.writing.answer + text)
    delayed = json.loads(confine_output(formats, asked, [], "").text)
    assert allows(delayed, f"{start}Hm{end}{reasoning.answer}" + '{"a": 4}') and not allows(delayed, call)
    assert (
        confine_output(formats, asked, TOOLS, "", is_forced=True)
        == confine_output(formats, None, TOOLS, "", is_forced=True)
    )
    with pytest.raises(RequestError, match="each fixes the whole output"):
        confine_output(formats, Grammar.regex("a"), TOOLS, "", is_forced=True)


def test_a_format_after_reasoning():
    body = {
        "type": "json_schema",
        "json_schema": {
            "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False
        }
    }
    tag = {"type": "structural_tag", "format": after_reasoning(body, REASONING_FORMATS.load("qwen3"), is_open=False)}
    for text in ('{"a": 1}', '<think>\nx{</think>\n\n{"a": 1}', '<think></think>{"a": 1}'):
        assert allows(tag, text)
    for text in ("<think>x</think>", "<think>x", "x", '<think>x</think>{"a": "b"}'):
        assert not allows(tag, text)


@pytest.mark.parametrize("grammar, right, wrong", [
    (Grammar.json_object(), '{"a": [1]}', "[1]"), (Grammar.json_schema({"type": "integer"}), "12", '"x"'),
    (Grammar.regex("a+"), "aa", "ab"), (Grammar.choice(["yes", "no"]), "no", "nope"),
    (Grammar.structural_tag({"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}), "x", "y"),
], ids=lambda v: getattr(v, "kind", ""))
def test_structured_output_begins_after_the_reasoning(grammar, right, wrong):
    reasoning = REASONING_FORMATS.load("qwen3")
    for is_open, start in ((True, ""), (False, "<think>")):
        delayed = json.loads(delay_grammar(grammar, reasoning, is_open=is_open).text)
        assert (
            allows(delayed, f"{start}Hm, maybe.\n</think>\n\n{right}")
            and not allows(delayed, f"{start}Hm.</think>{wrong}")
        )
        assert allows(delayed, right) is not is_open
    assert delay_grammar(grammar, None, is_open=False) == grammar
    assert delay_grammar(Grammar.ebnf('start: "a"'), reasoning, is_open=True) == Grammar.ebnf('start: "a"')


def test_schemas_that_need_not_be_exact_lose_what_cannot_be_enforced():
    schema = {
        "type": "object", "title": "T",
        "properties": {
            "a": {"oneOf": [{"type": "string", "pattern": "(?=x)"}, {"not": {}}]}, "b": {"$ref": "http://x"}, "c": True
        },
        "uniqueItems": True, "if": {}, "required": ["a"], "$defs": {"d": {"format": "date"}},
    }
    assert loosen(schema) == {
        "type": "object", "required": ["a"], "properties": {"a": {"anyOf": [{"type": "string"}, {}]}, "b": {}, "c": {}},
        "$defs": {"d": {}}, "additionalProperties": False,
    }
    empty = {"type": "object", "properties": {}}
    assert loosen({**empty, "required": []}) == {**empty, "required": [], "additionalProperties": False}
    assert "additionalProperties" not in loosen({**empty, "minProperties": 1})
    number = {"type": "integer", "minimum": 1, "exclusiveMaximum": 9}
    kept = [
        number, {"type": "string", "maxLength": 5}, {"type": "array", "minItems": 2, "items": {}},
        {"type": "number", "minimum": 0.5}
    ]
    assert [loosen(s) for s in kept] == kept
    for lost in (
        {"minimum": 3, "maximum": 3}, {"minimum": 5, "maximum": 1}, {"minimum": "x"}, {"minimum": True},
        {"maximum": 10**12}
    ):
        assert loosen({"type": "integer", **lost}) == {"type": "integer"}
    assert (
        loosen({"type": "string", "minLength": -1}) == {"type": "string"}
        and loosen({"enum": [1], "minimum": 3}) == {"enum": [1]}
    )
    for lost in ({"enum": [2**60 + 1, 1]}, {"const": [{"a": "\0"}]}, {"minimum": 0.12345678901234567}):
        assert loosen({"type": "number", **lost}) == {"type": "number"}
    deep: dict = {}
    for _ in range(500):
        deep = {"type": "array", "items": deep}
    loosen(deep)

"""Each format's examples: what is said of calls, reasoning and text, and when."""

from __future__ import annotations

import json

import pytest
from samples import (
    ANSWER,
    NESTED,
    PARIS,
    REASONED,
    THOUGHT,
    TWO_CALLS,
    VARIANTS,
    parser,
    run,
    summary,
)

from headrace.service.parsing.choice import choose_formats
from headrace.service.parsing.events import CallArguments, CallStart
from headrace.service.parsing.known_formats import REASONING_FORMATS, TOOL_FORMATS

BARE = ("llama3_json",)


def test_every_format_has_examples():
    assert set(TWO_CALLS) == set(TOOL_FORMATS.names()) and set(REASONED) == set(REASONING_FORMATS.names())


@pytest.mark.parametrize("name, text", [*TWO_CALLS.items(), *VARIANTS])
def test_two_calls(name, text):
    for around in ("", "\n", "  \n"):
        reasoning, content, calls = summary(run(parser(name), [around + text + around]))
        assert (reasoning, content) == ("", "" if name not in BARE else content.strip())
        assert [(n, json.loads(a), c) for n, a, c in calls] == [("get_weather", PARIS, True), ("noop", {}, True)]


@pytest.mark.parametrize("name, text", [(n, t) for n, t in TWO_CALLS.items() if n not in BARE])
def test_text_around_calls(name, text):
    before = "Let me see.\n\n"
    if name == "gpt_oss":
        before = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
    _, content, calls = summary(run(parser(name), [before + text + "\n\nDone."]))
    assert [n for n, _, _ in calls] == ["get_weather", "noop"]
    assert content.split() == ["Let", "me", "see.", "Done."] or content == "Let me see.Done."


@pytest.mark.parametrize(
    "name", ["hermes", "llama3_json", "mistral", "deepseek_v3", "deepseek_v31", "kimi_k2", "gpt_oss", "granite",
        "hunyuan_a13b"
    ]
)
@pytest.mark.parametrize("form", [{}, {"ensure_ascii": False}, {"indent": 2}, {"separators": (",", ":")}], ids=str)
def test_nested_json_arguments_are_passed_on_as_written(name, form):
    arguments = json.dumps(NESTED, **form)
    text = TWO_CALLS[name].replace('{"city": "Paris", "days": 3}', arguments)
    _, content, calls = summary(run(parser(name), [text]))
    assert content == "" and calls[0] == ("get_weather", arguments, True) and len(calls) == 2


@pytest.mark.parametrize("name, text", [
    ("pythonic", "[get_weather(**)]"),
    (
        "qwen3_coder",
        "<tool_call><function=get_weather>\n<parameter=where>\n{where}\n</parameter>\n<parameter=city>\n{city}\n</parameter><parameter=tags>{tags}</parameter>\n<parameter=metric>\nTrue\n</parameter>\n</function></tool_call>"
    ),
    (
        "glm45",
        "<tool_call>get_weather\n<arg_key>where</arg_key>\n<arg_value>{where}</arg_value><arg_key>city</arg_key><arg_value>{city}</arg_value><arg_key>tags</arg_key><arg_value>{tags}</arg_value><arg_key>metric</arg_key><arg_value>true</arg_value></tool_call>"
    ),
    ("deepseek_v4", '<｜DSML｜tool_calls><｜DSML｜invoke name="get_weather">'
                    '<｜DSML｜parameter name="where" string="false">{where}</｜DSML｜parameter>'
                    '<｜DSML｜parameter name="city" string="true">{city}</｜DSML｜parameter>'
                    '<｜DSML｜parameter name="tags" string="false">{tags}</｜DSML｜parameter>'
                    '<｜DSML｜parameter name="metric" string="false">true</｜DSML｜parameter>'
                    '</｜DSML｜invoke></｜DSML｜tool_calls>'),
], ids=lambda v: v[:12])
def test_nested_values_of_untyped_formats(name, text):
    if name == "pythonic":
        text = text.replace("**", ", ".join(f"{k}={v!r}" for k, v in NESTED.items()))
    for key, value in NESTED.items():
        text = text.replace(f"{{{key}}}", value if key == "city" else json.dumps(value))
    _, content, calls = summary(run(parser(name), [text]))
    assert content == "" and calls[0][2]
    assert json.loads(calls[0][1]) == NESTED


@pytest.mark.parametrize("name", REASONED)
def test_reasoning_is_set_apart(name):
    assert summary(run(parser(None, name), [REASONED[name]])) == (THOUGHT, ANSWER, []) or name == "deepseek_r1"
    is_open = name != "gpt_oss"
    opened = (
        REASONED[name] if not is_open else REASONED[name].split("think>", 1)[-1] if name in ("qwen3",)
        else REASONED[name]
    )
    assert summary(run(parser(None, name, is_open=is_open), [opened])) == (THOUGHT, ANSWER, [])


@pytest.mark.parametrize("name", REASONED)
def test_an_answer_without_reasoning_is_left_alone(name):
    for text in (ANSWER, "", "  x \n", "a <think> b </think> c", "```\n<think>\n```"):
        assert summary(run(parser(None, name), [text])) == ("", text, [])


@pytest.mark.parametrize("name", [n for n in REASONED if n != "gpt_oss"])
def test_reasoning_cut_short(name):
    begun = REASONED[name][: REASONED[name].index("think.")]
    assert summary(run(parser(None, name, is_open=True), [begun])) == ("Let me ", "", [])


@pytest.mark.parametrize("tools, reasoning", [
    ("hermes", "qwen3"), ("deepseek_v3", "deepseek_r1"), ("deepseek_v31", "deepseek_v3"),
    ("deepseek_v4", "deepseek_v4"), ("glm45", "glm45"),
    ("kimi_k2", "kimi_k2"), ("mistral", "mistral"), ("gpt_oss", "gpt_oss"), ("granite", "granite"),
    ("hunyuan_a13b", "hunyuan_a13b"),
    ("qwen3_coder", "qwen3"), ("pythonic", "qwen3"),
    ("llama3_json", "deepseek_r1"),
])
def test_reasoning_then_calls(tools, reasoning):
    before = REASONED[reasoning].split(ANSWER)[0]
    if tools == "gpt_oss":
        before = before.split("<|start|>")[0] + "<|start|>assistant"
    is_open = reasoning == "deepseek_r1"
    thought, content, calls = summary(run(parser(tools, reasoning, is_open=is_open), [before + TWO_CALLS[tools]]))
    assert (thought, content, [n for n, _, _ in calls]) == (THOUGHT, "", ["get_weather", "noop"])


def test_what_hunyuan_writes_around_its_answers():
    """Tags around an answer, also one that is a call, and a word before one beside tools; none where they are not."""
    name = "hunyuan_a13b"
    calls = f"<think>\n{THOUGHT}\n</think>\n<answer>\n{TWO_CALLS[name]}\n</answer>"
    thought, content, found = summary(run(parser(name, name), list(calls)))
    assert (thought, content, [n for n, _, _ in found]) == (THOUGHT, "", ["get_weather", "noop"])
    for text in (f"<answer>\n助手：{ANSWER}\n</answer>", f"助手：{ANSWER}", ANSWER):
        assert summary(run(parser(name, name), list(text))) == ("", ANSWER, [])
    kept = f"{ANSWER} <answer> 助手："
    assert summary(run(parser(name, name), [kept])) == ("", kept, [])


def test_hunyuan_is_recognised_by_its_template():
    """By lines of the template in its makers' files: tokens that end a turn, and the form of calls."""
    template = (
        """{{ '<|startoftext|>' + content_tmp + '<|extra_4|>' + '用户：' + content + '<|extra_0|>' }}"""
        """<tool_calls>[{\\"name\\": \\"func_name1\\", ...]</tool_calls>{{ '<think>\\n\\n</think>\\n' }}"""
    )
    formats = choose_formats(templates=[template])
    assert formats.tools.name == formats.reasoning.name == "hunyuan_a13b"
    assert choose_formats(tool_parser="hunyuan").tools.name == "hunyuan_a13b"


def test_calls_inside_reasoning():
    call = TWO_CALLS["hermes"]
    assert summary(run(parser("hermes", "qwen3"), [f"<think>Like {call}?</think>No."])) == (f"Like {call}?", "No.", [])
    section = TWO_CALLS["kimi_k2"]
    thought, content, calls = summary(run(parser("kimi_k2", "kimi_k2"), [f"<think>Now.{section}"]))
    assert (thought, content, len(calls)) == ("Now.", "", 2)


def test_reasoning_left_in_the_text():
    text = f"<think>\n{THOUGHT} {TWO_CALLS['hermes']}\n</think>\n\n{ANSWER}\n{TWO_CALLS['hermes']}"
    thought, content, calls = summary(run(parser("hermes", "qwen3", separates=False), [text]))
    assert (thought, content, len(calls)) == ("", f"<think>\n{THOUGHT} {TWO_CALLS['hermes']}\n</think>\n\n{ANSWER}", 2)


def test_only_the_first_call_when_calls_are_not_parallel():
    for name, text in TWO_CALLS.items():
        _, content, calls = summary(run(parser(name, max_calls=1), [text]))
        assert (content, [n for n, _, _ in calls]) == ("", ["get_weather"])


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "person", "name": "noop"}', '{"type": {"a": 1}, "name": "noop"}', '{"type": "function"}',
        '{"kind": "function", "name": "noop"}'
    ]
)
def test_json_that_is_no_call_is_an_answer(text):
    assert summary(run(parser("llama3_json"), list(text))) == ("", text, [])


def test_ids():
    def ids(name, text):
        return [e.call_id for e in run(parser(name), [text]) if isinstance(e, CallStart)]

    assert ids("kimi_k2", TWO_CALLS["kimi_k2"]) == ["functions.get_weather:0", "functions.noop:1"]
    assert ids("mistral", VARIANTS[5][1])[0] == "a1b2c3d4e"
    assert ids("mistral", '[TOOL_CALLS][{"name": "noop", "id": "abcdefghi"}]') == ["abcdefghi"]
    sampled = ids("mistral", TWO_CALLS["mistral"]) + ids("hermes", TWO_CALLS["hermes"])
    assert len(set(sampled)) == 4 and [len(i) for i in sampled] == [9, 9, 29, 29]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic", "kimi_k2", "deepseek_v4", "gpt_oss"])
def test_arguments_go_out_as_they_come(name):
    """Of a long string value at most a marker's length waits, and the call is announced before it."""
    engine, text, seen, started_at, lag = parser(name), TWO_CALLS[name].replace("Paris", "x" * 500), 0, None, 0
    for at, char in enumerate(text):
        for event in engine.push(char):
            if isinstance(event, CallStart) and started_at is None:
                started_at = at
            if isinstance(event, CallArguments) and event.index == 0:
                seen += event.text.count("x")
        lag = max(lag, min(text[: at + 1].count("x"), 500) - seen) if started_at is not None else lag
    assert started_at < text.index("xxx") and seen == 500 and lag <= 1


def test_an_untyped_value_becomes_what_the_schema_says():
    def value(key: str, text: str):
        call = f"<tool_call>get_weather<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"
        ((_, arguments, is_complete),) = summary(run(parser("glm45"), [call]))[2]
        assert is_complete
        return json.loads(arguments)[key]

    for key, text, expected in [
        ("city", "3", "3"), ("city", " a\n", " a\n"), ("city", "null", "null"), ("city", "{}", "{}"), ("days", "3", 3),
        ("days", " 3 ", 3), ("days", "3.0", 3),
        ("days", "three", "three"), ("days", "3.5", "3.5"), ("days", "99999999999999999999", 99999999999999999999),
        ("scale", "1e3", 1000.0), ("scale", "2", 2), ("metric", "True", True),
        ("metric", "FALSE", False), ("metric", "yes", "yes"), ("tags", '["a"]', ["a"]),
        ("tags", "['a', None]", ["a", None]), ("tags", "a, b", "a, b"),
        ("where", "{'x': 1}", {"x": 1}), ("where", '{"x": {"y": [true]}}', {"x": {"y": [True]}}),
        ("note", "null", None), ("note", "None", None), ("note", "3", "3"),
        ("any", "3", 3), ("any", "[1]", [1]), ("any", "text", "text"), ("other", "true", True),
        ("other", "0123", "0123"), ("scale", "1e999", "1e999"),
        ("where", "[" * 5000, "[" * 5000), ("any", '"q"', '"q"'),
    ]:
        assert value(key, text) == expected and type(value(key, text)) is type(expected), (key, text)


def test_slips_in_json_are_put_right():
    for written, meant in [
        ('"a\nb\tc"', "a\nb\tc"), (r'"\d+\."', r"\d+\."), ("True", True), ("None", None), (r'"\u12"', r"\u12"),
        (r'"\ud83d\ude00"', "😀")
    ]:
        ((_, arguments, is_complete),) = summary(
            run(parser("hermes"), [f'<tool_call>{{"name": "f", "arguments": {{"x": {written}}}}}</tool_call>'])
        )[2]
        assert is_complete and json.loads(arguments) == {"x": meant}


def test_python_literals():
    for written, meant in [
        (r"'it\'s \x41é\n\q'", "it's Aé\n\\q"), ('"""a "b"\nc"""', 'a "b"\nc'), ("-1.5e3", -1500.0), (".5", 0.5),
        ("5.", 5.0), ("+7", 7), ("(1, 'x',)", [1, "x"]), ("[]", []), ("()", []), ("{}", {}),
        ("{1: None, 'a': [True, false, null]}", {"1": None, "a": [True, False, None]}), ("''", ""),
        (r"'\ud83d\ude00 \U0001F600 \N'", "😀 😀 \\N"), ('"\\\n"', ""), ("[[[[]]]]", [[[[]]]]),
    ]:
        ((_, arguments, is_complete),) = summary(run(parser("pythonic"), [f"[get_weather(any={written})]"]))[2]
        assert is_complete and json.loads(arguments) == {"any": meant}, written
    assert summary(run(parser("pythonic"), ["[get_weather( any = 1 , )]"]))[2] == [("get_weather", '{"any": 1}', True)]

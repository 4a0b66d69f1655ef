"""What models write, per format, and what it means."""

from __future__ import annotations

from headrace.service.parsing.events import CallArguments, CallEnd, CallStart, Event, TextDelta, merge_events
from headrace.service.parsing.known_formats import REASONING_FORMATS, TOOL_FORMATS
from headrace.service.parsing.parser import OutputParser
from headrace.service.parsing.schemas import ToolSchemas

WEATHER = {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "where": {"type": "object"}, "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "scale": {"type": "number"},
    "any": {},
}}
SCHEMAS = ToolSchemas(
    [
        ("get_weather", WEATHER), ("get-time", {"type": "object", "properties": {}}), ("noop", None),
        ("opt", {"properties": {"a": {}, "b": {}}})
    ]
)


def parser(tools: str | None, reasoning: str | None = None, **options) -> OutputParser:
    return OutputParser(
        tools=TOOL_FORMATS.load(tools) if tools else None,
        reasoning=REASONING_FORMATS.load(reasoning) if reasoning else None,
        schemas=SCHEMAS, **options,
    )


def run(engine: OutputParser, pieces) -> list[Event]:
    """All events of a text given in pieces, neighbours merged."""
    events: list[Event] = []
    for piece in pieces:
        events += engine.push(piece)
    return merge_events(events + engine.finish())


def plain(events: list[Event]) -> list[tuple]:
    """Events without ids, which are sampled."""
    return [("start", e.index, e.name) if isinstance(e, CallStart) else e for e in events]


def summary(events: list[Event]) -> tuple[str, str, list[tuple[str, str, bool]]]:
    """``(reasoning, content, [(name, arguments, is_complete)])``."""
    texts = {True: "", False: ""}
    calls: list[list] = []
    for event in events:
        match event:
            case TextDelta(text, is_reasoning):
                texts[is_reasoning] += text
            case CallStart(index, _, name):
                assert index == len(calls)
                calls.append([name, "", None])
            case CallArguments(index, text):
                assert index == len(calls) - 1 and calls[index][2] is None
                calls[index][1] += text
            case CallEnd(index, is_complete):
                assert index == len(calls) - 1 and calls[index][2] is None
                calls[index][2] = is_complete
    return texts[True], texts[False], [tuple(c) for c in calls]


PARIS = {"city": "Paris", "days": 3}
NESTED = {
    "city": 'He said "hi"\\\n{[<tool_call>]}\t', "where": {"a": [1, 2.5, {"b": None}], "c": {}},
    "tags": ["é", "日本", "😀", "</"], "metric": True
}


def dsml(outer: str) -> str:
    return (
        f"<｜DSML｜{outer}>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" "
        "string=\"true\">Paris</｜DSML｜parameter>\n"
        "<｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
        f"<｜DSML｜invoke name=\"noop\">\n\n</｜DSML｜invoke>\n</｜DSML｜{outer}>"
    )


BEGIN, CALL, SEP, END, ENDS = (
    f"<｜{t}｜>" for t in ("tool▁calls▁begin", "tool▁call▁begin", "tool▁sep", "tool▁call▁end", "tool▁calls▁end")
)

# format: a text with the two calls get_weather(city="Paris", days=3) and noop()
TWO_CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": '
        '3}}\n</tool_call>\n<tool_call>\n{"name": "noop", "arguments": {}}\n</tool_call>'
    ),
    "llama3_json": (
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}; {"name": "noop", "parameters": {}}'
    ),
    "mistral": (
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name": "noop", '
        '"arguments": {}}]'
    ),
    "pythonic": '[get_weather(city="Paris", days=3), noop()]',
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=noop>\n</function>\n</tool_call>"
    ),
    "deepseek_v3": (
        f'{BEGIN}{CALL}function{SEP}get_weather\n```json\n{{"city": "Paris", "days": '
        f'3}}\n```{END}\n{CALL}function{SEP}noop\n```json\n{{}}\n```{END}{ENDS}'
    ),
    "deepseek_v31": f'{BEGIN}{CALL}get_weather{SEP}{{"city": "Paris", "days": 3}}{END}{CALL}noop{SEP}{{}}{END}{ENDS}',
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "glm45": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>noop\n</tool_call>"
    ),
    "kimi_k2": '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0'
    '<|tool_call_argument_begin|>{"city": "Paris", "days": 3}<|tool_call_end|>'
               "<|tool_call_begin|>functions.noop:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "gpt_oss": '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>'
    '{"city": "Paris", "days": 3}<|call|>'
               "<|start|>assistant to=functions.noop<|channel|>commentary json<|message|>{}<|call|>",
    "gemma": '```tool_code\nget_weather(city="Paris", days=3)\nnoop()\n```',
    "hunyuan_a13b": (
        '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name": "noop", '
        '"arguments": {}}]</tool_calls>'
    ),
    "granite": (
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name": "noop", '
        '"arguments": {}}]'
    ),
}

# other spellings of the same two calls
VARIANTS = [
    (
        "hermes",
        '<tool_call>{"arguments": {"city": "Paris", "days": 3}, "name": "get_weather"}</tool_call><tool_call>{"name": '
        '"noop"}</tool_call>'
    ),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": '
        '3}"}</tool_call>\n<tool_call>{"name": "noop", "arguments": null}'
    ),
    (
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}};{"name": "noop", '
        '"parameters": {}}'
    ),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}\n{"name": "noop", "parameters": {}}'
    ),
    ("mistral", '[TOOL_CALLS]get_weather{"city": "Paris", "days": 3}[TOOL_CALLS]noop{}'),
    ("mistral", '[TOOL_CALLS] get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]noop[ARGS]{}'),
    ("pythonic", "<|python_start|>[get_weather(city='Paris', days=3), noop()]<|python_end|>"),
    ("pythonic", "[get_weather('Paris', 3), noop()]"),
    (
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>3</parameter>\n</function>\n<function=noop></function>"
    ),
    (
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>noop</tool_call>"
    ),
    (
        "gemma",
        '```json\n{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}\n{"name": "noop", "parameters": '
        '{}}\n```'
    ),
    ("gemma", '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}; {"name": "noop"}'),
    (
        "granite",
        '<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name": "noop", "arguments": '
        '{}}]</tool_call>'
    ),
    (
        "llama3_json",
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris", "days": 3}}; {"type": "function", '
        '"name": "noop", "parameters": {}}'
    ),
]

THOUGHT, ANSWER = "Let me think.\n\nYes: 1 < 2", "The answer is 42."
REASONED = {
    "deepseek_r1": f"{THOUGHT}\n</think>\n\n{ANSWER}",
    "deepseek_v3": f"<think>{THOUGHT}</think>{ANSWER}",
    "deepseek_v4": f"<think>{THOUGHT}</think>{ANSWER}",
    "qwen3": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}",
    "glm45": f"\n<think>{THOUGHT}</think>\n{ANSWER}",
    "kimi_k2": f"<think>{THOUGHT}</think>{ANSWER}",
    "kimi": f"◁think▷{THOUGHT}◁/think▷{ANSWER}",
    "mistral": f"[THINK]{THOUGHT}[/THINK]{ANSWER}",
    "hunyuan_a13b": f"<think>\n{THOUGHT}\n</think>\n<answer>\n{ANSWER}\n</answer>",
    "granite": f"Here is my thought process:\n{THOUGHT}\n\nHere is my response: {ANSWER}",
    "gpt_oss": (
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{ANSWER}<|return|>"
    ),
}

# a reasoning format for each tool format, as their models pair them
PAIRS = {
    "hermes": "qwen3", "llama3_json": "deepseek_r1", "mistral": "mistral", "pythonic": "qwen3", "qwen3_coder": "qwen3",
    "deepseek_v3": "deepseek_r1",
    "deepseek_v31": "deepseek_v3", "deepseek_v32": "deepseek_v3", "deepseek_v4": "deepseek_v4", "glm45": "glm45",
    "kimi_k2": "kimi_k2",
    "gpt_oss": "gpt_oss", "gemma": "kimi", "granite": "granite",
    "hunyuan_a13b": "hunyuan_a13b",
}

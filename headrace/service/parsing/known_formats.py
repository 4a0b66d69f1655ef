"""The known formats of tool calls and reasoning, one value each, and the registries that find them by name.

Names of model lines belong here: a format is called after those who write it. Sources: the models' chat templates and
their makers' examples.
"""

from __future__ import annotations

import re
from typing import Any

from headrace.base.registry import Registry
from headrace.service.parsing.format import (
    Arguments,
    Call,
    CallId,
    Channels,
    Either,
    Flag,
    Header,
    Key,
    Maybe,
    Name,
    Pairs,
    Pattern,
    PythonCall,
    ReasoningFormat,
    Repeat,
    ToolFormat,
    Value,
    Writing,
)

_HEADER = Header(
    end="<|message|>", call=re.compile(r"\bto=functions\.(?P<name>[\w.-]+)"), reasoning=re.compile(r"\banalysis\b")
)

# <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
# <|message|>{"a": 1}<|call|>; the prompt ends with <|start|>assistant
HARMONY = Channels(
    openings=(("<|channel|>", _HEADER), ("<|start|>", _HEADER)),
    ends=("<|end|>", "<|return|>", "<|call|>"),
    bare=(("to=functions.", _HEADER),),
)


_THINK: dict[str, Any] = {"starts": ("<think>",), "ends": ("</think>",)}

# The first reasoning models leave the start out when the template does.
DEEPSEEK_R1_REASONING = ReasoningFormat(
    name="deepseek_r1", **_THINK, is_open=True, signs=(("<｜Assistant｜>", "</think>"),)
)
DEEPSEEK_V3_REASONING = ReasoningFormat(
    name="deepseek_v3", **_THINK, signs=(("<｜Assistant｜>", "</think>", "thinking"),)
)
DEEPSEEK_V4_REASONING = ReasoningFormat(name="deepseek_v4", **_THINK, signs=(("<｜Assistant｜>", "</think>", "DSML"),))
QWEN3_REASONING = ReasoningFormat(name="qwen3", **_THINK, signs=(("</think>",),))
GLM45_REASONING = ReasoningFormat(name="glm45", **_THINK, ends_at_calls=True, signs=(("</think>", "<arg_key>"),))
KIMI_K2_REASONING = ReasoningFormat(
    name="kimi_k2", **_THINK, ends_at_calls=True, signs=(("</think>", "<|tool_calls_section_begin|>"),)
)
KIMI_REASONING = ReasoningFormat(name="kimi", starts=("◁think▷",), ends=("◁/think▷",), signs=(("◁think▷",),))
MISTRAL_REASONING = ReasoningFormat(
    name="mistral", starts=("[THINK]",), ends=("[/THINK]",), signs=(("[THINK]", "[/THINK]"),)
)
GRANITE_REASONING = ReasoningFormat(
    name="granite",
    starts=("Here is my thought process:", "Here's my thought process:"),
    ends=("Here is my response:", "Here's my response:"),
    signs=(("Here is my thought process:",), ("Here's my thought process:",)),
)
HUNYUAN_A13B_REASONING = ReasoningFormat(
    name="hunyuan_a13b", **_THINK, answer_starts=("<answer>", "助手："), answer_ends=("</answer>",),
    signs=(("</think>", "<|extra_0|>"),),
)
GPT_OSS_REASONING = ReasoningFormat(
    name="gpt_oss",
    channels=HARMONY,
    writing=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    answer="<|channel|>final<|message|>",
    signs=(("<|channel|>", "<|message|>", "analysis"),),
)


JSON_LIST = ("[", Repeat(Call(), between=(",",)), "]")
PYTHON_LIST = ("[", Repeat(PythonCall(), between=(",",)), "]")

# <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
HERMES = ToolFormat(
    name="hermes",
    patterns=(("<tool_call>", Call(), "</tool_call>"),),
    writing=Writing(call='<tool_call>\n{"name": "$name", "arguments": $arguments}\n</tool_call>'),
    signs=(("<tool_call>",),),
)

# {"name": "f", "parameters": {"a": 1}}; {...}
LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    patterns=(("<|python_tag|>", Repeat(Call(), between=(";", ""))),),
    bare=(Repeat(Call(), between=(";", "")),),
    writing=Writing(call='{"name": "$name", "parameters": $arguments}', between="; "),
    signs=(("<|python_tag|>",), ('"parameters": dictionary of argument name',)),
)

# [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "123456789"}], later [TOOL_CALLS]f{"a": 1}, with or without
# [CALL_ID]123456789 and [ARGS] between
MISTRAL = ToolFormat(
    name="mistral",
    patterns=(
        ("[TOOL_CALLS]", Either((JSON_LIST, (Name(), Maybe(("[CALL_ID]", CallId())), Maybe("[ARGS]"), Arguments())))),
    ),
    writing=Writing(begin="[TOOL_CALLS][", call='{"name": "$name", "arguments": $arguments}', between=", ", end="]"),
    id_length=9,
    signs=(("[TOOL_CALLS]",),),
)

# <tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>
HUNYUAN_A13B = ToolFormat(
    name="hunyuan_a13b",
    patterns=(("<tool_calls>", JSON_LIST, "</tool_calls>"),),
    writing=Writing(
        begin="<tool_calls>[", call='{"name": "$name", "arguments": $arguments}', between=", ", end="]</tool_calls>"
    ),
    signs=(("<tool_calls>", "<|extra_0|>"),),
)

# [f(a=1), g(b="x")]
PYTHONIC = ToolFormat(
    name="pythonic",
    patterns=(
        ("<|python_start|>", PYTHON_LIST, "<|python_end|>"),
        ("<|tool_call_start|>", PYTHON_LIST, "<|tool_call_end|>"),
    ),
    bare=(PYTHON_LIST,),
    on_lines=True,
    writing=Writing(
        begin="[", call="$name($arguments)", between=", ", end="]", pair="$key=$value", comma=", ", quotes=True
    ),
    signs=(("<|python_start|>",), ("<|tool_call_start|>",)),
)

# <tool_call><function=f><parameter=a>1</parameter></function></tool_call>, each tag on its own line
_FUNCTION = (
    "<function=", Name(), ">",
    Pairs(("<parameter=", Key(), ">", Value("</parameter>", has_lines=True)), "</function>"),
)
QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    patterns=(("<tool_call>", Repeat(_FUNCTION), "</tool_call>"), (_FUNCTION, Maybe("</tool_call>"))),
    writing=Writing(
        call="<tool_call>\n<function=$name>\n$arguments</function>\n</tool_call>",
        pair="<parameter=$key>\n$value\n</parameter>\n",
    ),
    signs=(("<function=", "<parameter="),),
)


def _deepseek_section(*call: Pattern) -> Pattern:
    calls = Repeat(("<｜tool▁call▁begin｜>", *call, "<｜tool▁call▁end｜>"))
    return ("<｜tool▁calls▁begin｜>", calls, "<｜tool▁calls▁end｜>")


# ...function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```...
DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    patterns=(_deepseek_section("function", "<｜tool▁sep｜>", Name(), "```json", Arguments(), "```"),),
    writing=Writing(
        begin="<｜tool▁calls▁begin｜>", end="<｜tool▁calls▁end｜>",
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n$arguments\n```<｜tool▁call▁end｜>",
    ),
    signs=(("<｜tool▁calls▁begin｜>", "```json"),),
)

# ...f<｜tool▁sep｜>{"a": 1}...
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    patterns=(_deepseek_section(Name(), "<｜tool▁sep｜>", Arguments()),),
    writing=Writing(
        begin="<｜tool▁calls▁begin｜>", call="<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>",
        between="",
        end="<｜tool▁calls▁end｜>",
    ),
    signs=(("<｜tool▁calls▁begin｜>",),),
)


def _dsml_section(outer: str) -> Pattern:
    """Elements of names that begin with a token of their own; a value says whether it is text."""
    pair = ('<｜DSML｜parameter name="', Key(), '"', 'string="', Flag(), '">', Value("</｜DSML｜parameter>"))
    invoke = ('<｜DSML｜invoke name="', Name(), '">', Pairs(pair, "</｜DSML｜invoke>"))
    return (f"<｜DSML｜{outer}>", Repeat(invoke), f"</｜DSML｜{outer}>")


def _dsml_writing(outer: str) -> Writing:
    pair = '<｜DSML｜parameter name="$key" string="%s">$value</｜DSML｜parameter>\n'
    return Writing(
        begin=f"\n\n<｜DSML｜{outer}>\n", between="",
        call='<｜DSML｜invoke name="$name">\n$arguments</｜DSML｜invoke>\n',
        end=f"</｜DSML｜{outer}>", pair=pair % "true", json_pair=pair % "false", token="｜DSML｜",
    )


DEEPSEEK_V32 = ToolFormat(
    name="deepseek_v32", patterns=(_dsml_section("function_calls"),), writing=_dsml_writing("function_calls"),
    signs=(("DSML｜function_calls",), ("DSML", "function_calls>")),
)
DEEPSEEK_V4 = ToolFormat(
    name="deepseek_v4", patterns=(_dsml_section("tool_calls"),), writing=_dsml_writing("tool_calls"),
    signs=(("DSML｜tool_calls",), ("DSML", "tool_calls>")),
)

# <tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>
GLM45 = ToolFormat(
    name="glm45",
    patterns=(
        (
            "<tool_call>", Name(),
            Pairs(("<arg_key>", Key(), "</arg_key>", "<arg_value>", Value("</arg_value>")), "</tool_call>")
        ),
    ),
    writing=Writing(
        call="<tool_call>$name\n$arguments</tool_call>", pair="<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n"
    ),
    signs=(("<arg_key>", "<arg_value>"),),
)

# ...functions.f:0<|tool_call_argument_begin|>{"a": 1}...; its template shows the ids again, so they are kept
KIMI_K2 = ToolFormat(
    name="kimi_k2",
    patterns=((
        "<|tool_calls_section_begin|>",
        Repeat((
            "<|tool_call_begin|>", Name(re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?"), is_id=True),
            "<|tool_call_argument_begin|>", Arguments(), "<|tool_call_end|>",
        )),
        "<|tool_calls_section_end|>",
    ),),
    writing=Writing(
        begin="<|tool_calls_section_begin|>", between="", end="<|tool_calls_section_end|>",
        call="<|tool_call_begin|>functions.$name:$index<|tool_call_argument_begin|>$arguments<|tool_call_end|>",
    ),
    signs=(("<|tool_calls_section_begin|>",),),
)

GPT_OSS = ToolFormat(
    name="gpt_oss",
    channels=HARMONY,
    writing=Writing(
        call="<|channel|>commentary to=functions.$name <|constrain|>json<|message|>$arguments", between=None,
        answer="<|channel|>final<|message|>",
    ),
    signs=(("<|channel|>", "<|message|>"),),
)

# ```tool_code\nf(a=1)\n```, or a JSON object {"name": "f", "parameters": {"a": 1}}, fenced or not
_PYTHON = Either((PYTHON_LIST, Repeat(PythonCall(), between=("", ",", ";"))))
_JSON = Either((JSON_LIST, Repeat(Call(), between=("", ",", ";"))))
GEMMA = ToolFormat(
    name="gemma",
    patterns=(("```tool_code", _PYTHON, "```"), ("```tool_call", _JSON, "```"), ("```json", _JSON, "```")),
    bare=(Repeat(Call(), between=(";", "")), PYTHON_LIST),
    is_known_only=True,
    writing=Writing(call='{"name": "$name", "parameters": $arguments}'),
    signs=(("tool_code",),),
)

# <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]
GRANITE = ToolFormat(
    name="granite",
    patterns=(("<|tool_call|>", JSON_LIST), ("<tool_call>", Either((JSON_LIST, Call())), Maybe("</tool_call>"))),
    writing=Writing(begin="<|tool_call|>[", call='{"name": "$name", "arguments": $arguments}', between=", ", end="]"),
    signs=(("<|tool_call|>",),),
)


TOOL_FORMATS: Registry[ToolFormat] = Registry("tool parser")
REASONING_FORMATS: Registry[ReasoningFormat] = Registry("reasoning parser")

# In the order in which a chat template is searched for their signs: the particular before the general.
TOOL_NAMES = (
    "gpt_oss", "deepseek_v4", "deepseek_v32", "deepseek_v3", "deepseek_v31", "kimi_k2", "glm45", "qwen3_coder",
    "granite", "mistral", "hunyuan_a13b", "pythonic",
    "llama3_json", "gemma", "hermes",
)
REASONING_NAMES = (
    "gpt_oss", "kimi", "mistral", "granite", "hunyuan_a13b", "deepseek_v4", "deepseek_v3", "deepseek_r1",
    "kimi_k2", "glm45", "qwen3"
)

for _at, _name in enumerate(reversed(TOOL_NAMES)):
    TOOL_FORMATS.add(_name, f"{__name__}:{_name.upper()}", priority=_at)
for _at, _name in enumerate(reversed(REASONING_NAMES)):
    REASONING_FORMATS.add(_name, f"{__name__}:{_name.upper()}_REASONING", priority=_at)

ALIASES = {
    "qwen": "hermes", "qwen25": "hermes", "llama3": "llama3_json", "llama4_pythonic": "pythonic",
    "qwen3coder": "qwen3_coder", "hunyuan": "hunyuan_a13b",
    "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "glm": "glm45", "glm47": "glm45", "openai": "gpt_oss", "gptoss": "gpt_oss",
}
"""What other servers call some of them; hyphens and underscores are the same."""

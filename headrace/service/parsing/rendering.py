"""Renders conversations with tools to prompts: by the chat template if it shows tools, else explained in the system
message."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.base.errors import RequestError
from headrace.service.parsing.choice import Formats
from headrace.service.parsing.forcing import write_call
from headrace.service.parsing.format import Writing
from headrace.service.tokenization import Tokenizer
from headrace.service.tokenization.chat_template import shape_calls

INTRODUCTION = (
    "You may call tools to help with the user's request. These are the tools, with the JSON schemas of their arguments:"
)
INSTRUCTION = "To call a tool, write nothing but this, once for each call, with the tool's name and arguments:"
RESERVED = frozenset({
    "messages", "tools", "template", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "conversation", "self", "tokenizer", "formats",
})
"""Template variables that ``chat_template_kwargs`` may not set: they have other ways, or are arguments here."""
RESULTS = "<tool_response>\n{}\n</tool_response>"


def check_variables(given: Mapping[Any, object]) -> None:
    """Raise `RequestError` for a variable of ``chat_template_kwargs`` that may not be set."""
    wrong = next((name for name in given if not isinstance(name, str) or name in RESERVED), None)
    if wrong is not None:
        raise RequestError(f"chat_template_kwargs cannot set {wrong!r}", param="chat_template_kwargs")


def explain_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], writing: Writing
) -> list[dict[str, Any]]:
    """The conversation for a template without tools: tools in the system message, calls as assistant text, results as
    user messages. ``tool_calls`` must be in OpenAI's form, with objects as arguments."""
    example = writing.begin + write_call(writing, "NAME", {"ARGUMENT": "VALUE"}, _dump) + writing.end
    functions = "\n".join(_dump(tool["function"]) for tool in tools)
    text = f"{INTRODUCTION}\n{functions}\n\n{INSTRUCTION}\n{example.strip()}"
    shown = spell_calls(messages, writing)
    if shown and shown[0].get("role") == "system":
        return [{**shown[0], "content": f"{shown[0].get('content') or ''}\n\n{text}".strip()}, *shown[1:]]
    return [{"role": "system", "content": text}, *shown]


def spell_calls(messages: Sequence[Mapping[str, Any]], writing: Writing) -> list[dict[str, Any]]:
    """The conversation with calls and results as text. Consecutive results become one user message, as many templates
    require roles to alternate."""
    shown: list[dict[str, Any]] = []
    was_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        if is_result:
            result = _wrap_result(message.get("content") or "")
            if was_result:
                shown[-1] = {**shown[-1], "content": _join(shown[-1]["content"], result)}
            else:
                shown.append({"role": "user", "content": result})
        elif message.get("tool_calls"):
            shown.append(_spell(message, writing))
        else:
            shown.append(dict(message))
        was_result = is_result
    return shown


Content = str | list[dict[str, str]]


def _wrap_result(content: Content) -> Content:
    if isinstance(content, str):
        return RESULTS.format(content)
    before, _, after = RESULTS.partition("{}")
    return [{"type": "text", "text": before}, *content, {"type": "text", "text": after}]


def _join(first: Content, second: Content) -> Content:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}"
    first, second = (
        [{"type": "text", "text": each}] if isinstance(each, str) else each for each in (first, second)
    )
    return [*first, {"type": "text", "text": "\n"}, *second]


def _spell(message: Mapping[str, Any], writing: Writing) -> dict[str, Any]:
    calls = [call["function"] for call in message["tool_calls"]]
    texts = [write_call(writing, call["name"], call["arguments"], _dump) for call in calls]
    written = writing.begin + (writing.between or "\n").join(texts) + writing.end
    kept = {k: v for k, v in message.items() if k != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, (message.get("content"), written.strip())))}


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def check_form(tools: Sequence[Any]) -> None:
    """Raise `RequestError` unless each is ``{"type": "function", "function": {"name": ..., "parameters": {...}}}``."""
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(function, dict) or not isinstance(function.get("name"), str)
            or not isinstance(function.get("parameters") or {}, dict)
        ):
            raise RequestError(
                f"tools[{index}] must have a function with a name, and an object as its parameters",
                param=f"tools[{index}]"
            )


def render_with_tools(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], formats: Formats, *,
    tools: Sequence[dict[str, Any]] | None = None,
    template: str | None = None, **options: Any,
) -> str:
    """As `Tokenizer.render_chat`. A ``template`` of the caller's own is trusted to show the tools. Raises
    `RequestError` for tools that are not in OpenAI's form."""
    check_form(tools or ())
    writing = formats.tools.writing if formats.tools is not None else None
    has_calls = any(m.get("tool_calls") or m.get("role") == "tool" for m in messages)
    if writing is None or template is not None or not (tools or has_calls) or tokenizer.takes_tools:
        return tokenizer.render_chat(messages, tools=list(tools) if tools else None, template=template, **options)
    shaped = [{**m, "tool_calls": shape_calls(m["tool_calls"])} if m.get("tool_calls") else m for m in messages]
    shown = explain_tools(shaped, tools, writing) if tools else spell_calls(shaped, writing)
    return tokenizer.render_chat(shown, **options)

"""Conversations with tools to prompts: by the chat template where it shows tools, else explained in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.base.errors import RequestError
from headrace.service.parsing.choice import Formats
from headrace.service.parsing.explaining import explain_tools, tell_calls
from headrace.service.tokenization import Tokenizer
from headrace.service.tokenization.call_arguments import shape_calls


def check_form(tools: Sequence[Any]) -> None:
    """Raise `RequestError` unless each is ``{"type": "function", "function": {"name": ..., "parameters": {...}}}``."""
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not is_named or not isinstance(function.get("parameters") or {}, dict):
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
    told = explain_tools(shaped, tools, writing) if tools else tell_calls(shaped, writing)
    return tokenizer.render_chat(told, **options)

"""Tools of a request, checked: what the types cannot say of names, schemas and choices.

From chat messages to the prompt's text, by the model's own template."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec

from headrace.base.errors import RequestError, UnsupportedFeature
from headrace.service.client.requests import refuse_generation
from headrace.service.parsing.rendering import render_with_tools
from headrace.service.tokenization import LONG_TEXT
from headrace.service.tokenization.chat_template import read_arguments
from headrace.serving.http.generation.context import AppContext
from headrace.serving.http.protocol.fields import INTERNALS, MEDIA, TOOLS
from headrace.serving.http.protocol.native import TokenizeRequest
from headrace.serving.http.protocol.openai import ChatMessage, ChatRequest
from headrace.serving.http.protocol.tools import AllowedTools, CallRecord, NamedTool, ReasoningFields, Tool

MAX_SCHEMA_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 64
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def offered_tools(request: Any) -> list[dict[str, Any]]:
    """The tools that the model may call, in OpenAI's form, checked; none for ``tool_choice`` "none". Raises
    `RequestError` naming the field."""
    tools = request.tools or []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}].function"
        _check_tool(tool, where)
        if tool.function.name in names:
            raise RequestError(f"{where}.name {tool.function.name!r} is used twice", param=f"{where}.name")
        names.add(tool.function.name)
    choice = getattr(request, "tool_choice", None)
    if choice == "required" and not tools:
        raise RequestError("tool_choice 'required' needs tools", param="tool_choice")
    for name in sorted(chosen_names(choice) - names):
        raise RequestError(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    return [] if choice == "none" else [_as_dict(tool) for tool in tools]


def chosen_names(choice: Any) -> set[str]:
    """The tools that a ``tool_choice`` names; none where it leaves the choice open."""
    named = (
        choice.allowed_tools.tools if isinstance(choice, AllowedTools) else [choice] if isinstance(choice, NamedTool)
        else []
    )
    return {tool.function.name for tool in named}


def _as_dict(tool: Tool) -> dict[str, Any]:
    """The tool as templates know it: fields in the order models were trained on."""
    given = tool.function
    function = {
        "name": given.name, "description": given.description or "",
        "parameters": given.parameters or {"type": "object", "properties": {}}
    }
    return {"type": "function", "function": function if given.strict is None else {**function, "strict": given.strict}}


def _check_tool(tool: Tool, where: str) -> None:
    function = tool.function
    _check_text(function.description or "", f"{where}.description")
    schema = function.parameters
    if not schema:
        return
    param = f"{where}.parameters"
    if schema.get("type", "object") != "object":
        raise RequestError(f"{param}.type must be 'object': arguments have names", param=param)
    if not isinstance(schema.get("properties", {}), dict) or not isinstance(schema.get("required", []), list):
        raise RequestError(f"{param} must be a JSON schema: properties is an object, required a list", param=param)
    if len(msgspec.json.encode(schema)) > MAX_SCHEMA_BYTES:
        raise RequestError(f"{param} is larger than {MAX_SCHEMA_BYTES} bytes", param=param)
    pending = [(schema, 1)]
    while pending:
        node, depth = pending.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise RequestError(f"{param} is nested more than {MAX_SCHEMA_DEPTH} deep", param=param)
        if isinstance(node, dict):
            for key in node:
                _check_text(key, param)
            pending.extend((value, depth + 1) for value in node.values() if isinstance(value, dict | list))
        else:
            pending.extend((value, depth + 1) for value in node if isinstance(value, dict | list))


def _check_text(text: str, param: str) -> None:
    if _CONTROLS.search(text):
        raise RequestError(f"{param} must not hold control characters", param=param)


RESERVED = frozenset({
    "messages", "tools", "template", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "conversation", "self",
    "tokenizer", "formats",
})
NOT_SERVED = {"audio": MEDIA, "function_call": TOOLS, "refusal": INTERNALS, "annotations": INTERNALS}
ROLE_OF_TEMPLATE = {"developer": "system"}


def _call_dict(call: CallRecord, where: str) -> dict[str, Any]:
    arguments = read_arguments(call.function.arguments, f"{where}.function.arguments")
    identity = {} if call.id is None else {"id": call.id}
    return {**identity, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _message_dict(message: ChatMessage, where: str) -> dict[str, Any]:
    for name, reason in NOT_SERVED.items():
        if getattr(message, name):
            raise UnsupportedFeature(f"{where}.{name} is not supported: {reason}", param=f"{where}.{name}")
    if message.role == "function":
        raise UnsupportedFeature(f"{where}.role 'function' is not supported: {TOOLS}", param=f"{where}.role")
    for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, name) and message.role != role:
            raise RequestError(f"{where}.{name} belongs to messages of the role {role!r}", param=f"{where}.{name}")
    content = message.content
    if content is None and message.role != "assistant":
        raise RequestError(f"{where}.content is required", param=f"{where}.content")
    text = "\n".join(part.text for part in content) if isinstance(content, list) else content or ""
    calls = [_call_dict(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())]
    thought = message.reasoning_content or message.reasoning
    optional = {
        "name": message.name, "reasoning_content": thought, "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id
    }
    return {
        "role": ROLE_OF_TEMPLATE.get(message.role, message.role), "content": text
    } | {k: v for k, v in optional.items() if v is not None}


def template_options(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """What is passed on to the template besides the messages: the client's own options over the reasoning switches."""
    options = request.chat_template_kwargs or {}
    reserved = sorted(RESERVED & options.keys())
    if reserved:
        raise RequestError(f"chat_template_kwargs cannot set {reserved[0]!r}", param="chat_template_kwargs")
    if not isinstance(request, ReasoningFields):
        return options
    return {**_reasoning_switches(request), **options}


def _reasoning_switches(request: ReasoningFields) -> dict[str, Any]:
    """``reasoning_effort`` as it is; whether to think at all under both names that templates know."""
    effort = request.reasoning_effort
    asked = [
        None if effort is None else effort != "none", request.enable_thinking,
        None if request.thinking is None else request.thinking.type == "enabled",
    ]
    given = {value for value in asked if value is not None}
    if len(given) > 1:
        raise RequestError(
            "reasoning_effort, enable_thinking and thinking contradict each other", param="enable_thinking"
        )
    switches = dict.fromkeys(("enable_thinking", "thinking"), given.pop()) if given else {}
    return switches if effort in (None, "none") else {**switches, "reasoning_effort": effort}


async def render_conversation(context: AppContext, request: ChatRequest | TokenizeRequest) -> str:
    """The prompt's text. Raises `RequestError` for messages the model's template cannot take."""
    refuse_generation(context.facts())
    messages = [_message_dict(m, f"messages[{i}]") for i, m in enumerate(request.messages or [])]
    options, tools = template_options(request), offered_tools(request)
    is_continued = bool(request.continue_final_message)
    if is_continued and request.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    if is_continued and (messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]):
        raise RequestError(
            "continue_final_message needs the last message to be the assistant's, without tool calls",
            param="continue_final_message"
        )
    tokenizer = context.tokenizer()
    if not tokenizer.has_chat_template:
        raise RequestError(
            "this model has no chat template; use /v1/completions, or start the server with --chat-template",
            param="messages"
        )
    begins_answer = not is_continued if request.add_generation_prompt is None else request.add_generation_prompt
    formats = context.formats()

    def render() -> str:
        return render_with_tools(
            tokenizer, messages, formats, tools=tools, add_generation_prompt=begins_answer,
            continue_final_message=is_continued, **options,
        )

    if sum(len(m["content"]) for m in messages) > LONG_TEXT:
        return await asyncio.to_thread(render)
    return render()


async def count_prompt(context: AppContext, request: ChatRequest) -> int:
    """Tokens of the prompt that a conversation makes."""
    text = await render_conversation(context, request)
    return await asyncio.to_thread(
        lambda: sum(map(len, context.tokenizer().encode_pieces(text, add_special_tokens=False)))
    )

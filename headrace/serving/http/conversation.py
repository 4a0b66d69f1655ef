"""From chat messages to the prompt's text, by the model's own template."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.base.errors import RequestError, UnsupportedFeature
from headrace.service.parsing.rendering import render_with_tools
from headrace.service.tokenization import LONG_TEXT
from headrace.service.tokenization.call_arguments import read_arguments
from headrace.service.tokenization.requests import refuse_generation
from headrace.serving.http.context import AppContext
from headrace.serving.http.protocol.chat import ChatMessage, ChatRequest
from headrace.serving.http.protocol.deferred import INTERNALS, MEDIA, TOOLS
from headrace.serving.http.protocol.tokens import TokenizeRequest
from headrace.serving.http.protocol.tools import CallRecord, ReasoningFields
from headrace.serving.http.tools import offered_tools

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

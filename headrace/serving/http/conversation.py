"""From chat messages to the prompt's text, by the model's own template."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.base.errors import RequestError, UnsupportedFeature
from headrace.service.tokenization.reading import refuse_generation
from headrace.serving.http.context import AppContext
from headrace.serving.http.generation import LONG_TEXT
from headrace.serving.http.protocol.chat import ChatMessage, ChatRequest
from headrace.serving.http.protocol.deferred import INTERNALS, MEDIA, TOOLS
from headrace.serving.http.protocol.tokens import TokenizeRequest

RESERVED = frozenset({
    "messages", "tools", "template", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "conversation", "self",
})
NOT_SERVED = {"audio": MEDIA, "function_call": TOOLS, "tool_calls": TOOLS, "tool_call_id": TOOLS, "refusal": INTERNALS, "annotations": INTERNALS}
ROLE_OF_TEMPLATE = {"developer": "system"}


def _message_dict(message: ChatMessage, where: str) -> dict[str, Any]:
    for name, reason in NOT_SERVED.items():
        if getattr(message, name):
            raise UnsupportedFeature(f"{where}.{name} is not supported: {reason}", param=f"{where}.{name}")
    if message.role in ("tool", "function"):
        raise UnsupportedFeature(f"{where}.role {message.role!r} is not supported: {TOOLS}", param=f"{where}.role")
    content = message.content
    if content is None and message.role != "assistant":
        raise RequestError(f"{where}.content is required", param=f"{where}.content")
    text = "\n".join(part.text for part in content) if isinstance(content, list) else content or ""
    optional = {"name": message.name, "reasoning_content": message.reasoning_content}
    return {"role": ROLE_OF_TEMPLATE.get(message.role, message.role), "content": text} | {k: v for k, v in optional.items() if v is not None}


async def render_conversation(context: AppContext, request: ChatRequest | TokenizeRequest) -> str:
    """The prompt's text. Raises `RequestError` for messages the model's template cannot take."""
    refuse_generation(context.facts())
    messages = [_message_dict(m, f"messages[{i}]") for i, m in enumerate(request.messages or [])]
    options = request.chat_template_kwargs or {}
    reserved = sorted(RESERVED & options.keys())
    if reserved:
        raise RequestError(f"chat_template_kwargs cannot set {reserved[0]!r}", param="chat_template_kwargs")
    is_continued = bool(request.continue_final_message)
    if is_continued and request.add_generation_prompt:
        raise RequestError("continue_final_message and add_generation_prompt exclude each other", param="continue_final_message")
    if is_continued and messages[-1]["role"] != "assistant":
        raise RequestError("continue_final_message needs the last message to be the assistant's", param="continue_final_message")
    tokenizer = context.tokenizer()
    if not tokenizer.has_chat_template:
        raise RequestError("this model has no chat template; use /v1/completions, or start the server with --chat-template", param="messages")
    begins_answer = not is_continued if request.add_generation_prompt is None else request.add_generation_prompt

    def render() -> str:
        return tokenizer.render_chat(messages, add_generation_prompt=begins_answer, continue_final_message=is_continued, **options)

    if sum(len(m["content"]) for m in messages) > LONG_TEXT:
        return await asyncio.to_thread(render)
    return render()

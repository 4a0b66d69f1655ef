"""Ollama's requests as chat requests."""

from __future__ import annotations

from headrace.base.errors import RequestError, UnsupportedFeature
from headrace.serving.http.protocol.chat import ChatMessage, ChatRequest
from headrace.serving.http.protocol.deferred import MEDIA
from headrace.serving.http.protocol.ollama import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
)
from headrace.serving.http.protocol.structure import JsonSchemaFormat, ResponseFormat
from headrace.serving.http.protocol.tools import CallRecord, FunctionCall

LATEST = ":latest"
SAME = ("stop", "seed", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")


def plain_name(model: str) -> str:
    """The model's name without the tag that clients put on names that have none."""
    return model.removesuffix(LATEST)


def _chat_message(message: OllamaMessage, where: str) -> ChatMessage:
    if message.images:
        raise UnsupportedFeature(f"{where}.images is not supported: {MEDIA}", param=f"{where}.images")
    calls = [
        CallRecord(
            id=c.id, type="function", function=FunctionCall(name=c.function.name, arguments=c.function.arguments)
        )
        for c in message.tool_calls or ()
    ]
    return ChatMessage(
        role=message.role, content=message.content if message.content is not None or calls else "",
        reasoning_content=message.thinking or None,
        tool_calls=calls or None, tool_call_id=message.tool_call_id, name=message.tool_name,
    )


def _read_options(chat: ChatRequest, options: OllamaOptions, max_model_len: int) -> None:
    if options.num_ctx is not None and options.num_ctx > max_model_len:
        raise RequestError(
            f"options.num_ctx must be at most {max_model_len}, the server's context; leave it out",
            param="options.num_ctx"
        )
    for name in SAME:
        setattr(chat, name, getattr(options, name))
    chat.repetition_penalty = options.repeat_penalty
    if options.num_predict is not None and options.num_predict > 0:
        chat.max_completion_tokens = options.num_predict


def _finish(chat: ChatRequest, body: OllamaRequest, max_model_len: int) -> ChatRequest:
    chat.model, chat.stream = plain_name(body.model), body.stream is not False
    if body.options is not None:
        _read_options(chat, body.options, max_model_len)
    chat.logprobs, chat.top_logprobs = body.logprobs, body.top_logprobs
    if body.format == "json":
        chat.response_format = ResponseFormat(type="json_object")
    elif isinstance(body.format, dict):
        chat.response_format = ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=body.format))
    if isinstance(body.think, str):
        chat.reasoning_effort = body.think
    else:
        chat.enable_thinking = body.think
    return chat


def read_chat(body: OllamaChatRequest, max_model_len: int) -> ChatRequest | None:
    """The chat request of ``body``; None when there is nothing to answer."""
    if not body.messages:
        return None
    messages = [_chat_message(m, f"messages[{i}]") for i, m in enumerate(body.messages)]
    return _finish(ChatRequest(messages=messages, tools=body.tools or None), body, max_model_len)


def read_generate(body: OllamaGenerateRequest, max_model_len: int) -> ChatRequest | None:
    """The chat request of ``body``; None when there is nothing to answer."""
    if not body.prompt:
        return None
    system = [ChatMessage(role="system", content=body.system)] if body.system else []
    return _finish(ChatRequest(messages=[*system, ChatMessage(role="user", content=body.prompt)]), body, max_model_len)

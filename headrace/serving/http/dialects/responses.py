"""Requests of ``/v1/responses`` as chat requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from headrace.base.errors import RequestError
from headrace.serving.http.protocol.chat import ChatMessage, ChatRequest
from headrace.serving.http.protocol.responses import (
    AllowedFunctions,
    InputItem,
    InputPart,
    NamedFunction,
    ResponsesRequest,
    TextFormat,
)
from headrace.serving.http.protocol.structure import JsonSchemaFormat, ResponseFormat
from headrace.serving.http.protocol.tools import (
    AllowedSet,
    AllowedTools,
    CallRecord,
    FunctionCall,
    FunctionName,
    FunctionTool,
    NamedTool,
    Tool,
    ToolChoice,
)

T = TypeVar("T")

LOGPROBS = "message.output_text.logprobs"


def _needed(value: T | None, param: str) -> T:
    if value is None:
        raise RequestError(f"{param} is required", param=param)
    return value


def _text(content: str | list[InputPart], param: str) -> str:
    if isinstance(content, str):
        return content
    texts = [_needed(p.refusal if p.type == "refusal" else p.text, f"{param}[{i}].text") for i, p in enumerate(content)]
    return "\n".join(texts)


class MessageList:
    """Items put together to messages: reasoning, text and calls of the assistant that follow each other are one."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []

    def add(self, item: InputItem, where: str) -> None:
        """Take the next item."""
        match item.type:
            case "message":
                self._add_message(item, where)
            case "reasoning":
                self._assistant(is_new=True).reasoning_content = (
                    _text(item.content or item.summary or "", f"{where}.content") or None
                )
            case "function_call":
                self._add_call(item, where)
            case "function_call_output":
                output = _text(_needed(item.output, f"{where}.output"), f"{where}.output")
                self.messages.append(
                    ChatMessage(role="tool", tool_call_id=_needed(item.call_id, f"{where}.call_id"), content=output)
                )

    def _assistant(self, *, is_new: bool) -> ChatMessage:
        if is_new or not self.messages or self.messages[-1].role != "assistant":
            self.messages.append(ChatMessage(role="assistant"))
        return self.messages[-1]

    def _add_message(self, item: InputItem, where: str) -> None:
        role, text = (
            _needed(item.role, f"{where}.role"), _text(_needed(item.content, f"{where}.content"), f"{where}.content")
        )
        if role != "assistant":
            self.messages.append(ChatMessage(role=role, content=text))
            return
        last = self._assistant(is_new=False)
        if last.content is not None or last.tool_calls:
            last = self._assistant(is_new=True)
        last.content = text

    def _add_call(self, item: InputItem, where: str) -> None:
        function = FunctionCall(
            name=_needed(item.name, f"{where}.name"), arguments=_needed(item.arguments, f"{where}.arguments")
        )
        call = CallRecord(id=_needed(item.call_id, f"{where}.call_id"), type="function", function=function)
        message = self._assistant(is_new=False)
        message.tool_calls = [*(message.tool_calls or ()), call]


def _read_format(asked: TextFormat) -> ResponseFormat:
    if asked.type != "json_schema":
        return ResponseFormat(type=asked.type)
    schema = _needed(asked.schema, "text.format.schema")
    return ResponseFormat(
        type="json_schema", json_schema=JsonSchemaFormat(schema=schema, name=asked.name, strict=asked.strict)
    )


def _read_choice(
    choice: ToolChoice | NamedFunction | AllowedFunctions | None
) -> ToolChoice | NamedTool | AllowedTools | None:
    if isinstance(choice, NamedFunction):
        return _name(choice)
    if isinstance(choice, AllowedFunctions):
        return AllowedTools(
            allowed_tools=AllowedSet(mode=choice.mode, tools=[_name(function) for function in choice.tools])
        )
    return choice


def _name(function: NamedFunction) -> NamedTool:
    return NamedTool(function=FunctionName(name=function.name))


def input_items(body: ResponsesRequest) -> list[InputItem]:
    """What a request says, as items."""
    return [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def read_response(body: ResponsesRequest, history: Sequence[InputItem] = ()) -> ChatRequest:
    """The chat request of ``body``, said after ``history``. Raises `RequestError` for items that miss a field."""
    items = MessageList()
    if body.instructions:
        items.messages.append(ChatMessage(role="system", content=body.instructions))
    for item in history:
        items.add(item, "previous_response_id")
    for index, item in enumerate(input_items(body)):
        items.add(item, f"input[{index}]")
    chat = ChatRequest(
        messages=items.messages, model=body.model, stream=body.stream, max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature, top_p=body.top_p, parallel_tool_calls=body.parallel_tool_calls,
    )
    if body.tools:
        chat.tools = [Tool(type="function", function=FunctionTool(
            name=t.name, description=t.description, parameters=t.parameters, strict=t.strict,
        )) for t in body.tools]
    chat.tool_choice = _read_choice(body.tool_choice)
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        chat.logprobs, chat.top_logprobs = True, body.top_logprobs
    if body.reasoning is not None:
        chat.reasoning_effort = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        chat.response_format = _read_format(body.text.format)
    return chat

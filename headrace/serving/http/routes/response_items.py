"""The items of ``/v1/responses`` converted to the messages of a `ChatRequest`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from headrace.base.errors import RequestError, UnsupportedFeature
from headrace.serving.http.protocol import responses as wire
from headrace.serving.http.protocol.fields import MAX_TOOL_NAME, JsonSchemaFormat, ResponseFormat
from headrace.serving.http.protocol.media import ContentPart, ImageUrl, PlacedImage, TextPart
from headrace.serving.http.protocol.openai import ChatMessage, ChatRequest
from headrace.serving.http.protocol.tools import (
    AllowedSet,
    AllowedTools,
    AnyTool,
    CallRecord,
    CustomCall,
    CustomDetails,
    CustomTool,
    FunctionCall,
    FunctionName,
    FunctionTool,
    GrammarInput,
    NamedCustomTool,
    NamedTool,
    Tool,
    ToolChoice,
)

T = TypeVar("T")
LOGPROBS = "message.output_text.logprobs"


def _required(value: T | None, param: str) -> T:
    if value is None:
        raise RequestError(f"{param} is required", param=param)
    return value


def _text(content: str | list[wire.InputPart], param: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(
        _required(part.refusal if part.type == "refusal" else part.text, f"{param}[{i}].text")
        for i, part in enumerate(content)
    )


def _content(content: str | list[wire.InputPart] | None, param: str) -> str | list[ContentPart]:
    """The content of a message or of a result: a text, or parts if there are images among them."""
    if content is None:
        raise RequestError(f"{param} is required", param=param)
    if isinstance(content, str) or not any(part.type == "input_image" for part in content):
        return _text(content, param)
    return [
        _image(part, f"{param}[{i}]") if part.type == "input_image"
        else TextPart(text=_required(part.refusal if part.type == "refusal" else part.text, f"{param}[{i}].text"))
        for i, part in enumerate(content)
    ]


def _image(part: wire.InputPart, where: str) -> PlacedImage:
    if part.file_id is not None:
        raise UnsupportedFeature(
            f"{where}.file_id: files are not stored; send the image as image_url", param=f"{where}.file_id"
        )
    url = _required(part.image_url, f"{where}.image_url")
    return PlacedImage(image_url=ImageUrl(url=url, detail=part.detail), param=f"{where}.image_url")


class MessageList:
    """Joins items to messages: consecutive reasoning, text and calls of the assistant become one message."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []

    def add(self, item: wire.InputItem, where: str) -> None:
        """Add the next item."""
        match item.type:
            case "message":
                self._add_message(item, where)
            case "reasoning":
                text = _text(item.content or item.summary or "", f"{where}.content")
                # Reasoning comes before the text and calls of its message, so it begins a new one.
                self._assistant(is_new=True).reasoning_content = text or None
            case "function_call" | "custom_tool_call":
                self._add_call(item, where)
            case "function_call_output" | "custom_tool_call_output":
                output = _content(item.output, f"{where}.output")
                call_id = _required(item.call_id, f"{where}.call_id")
                self.messages.append(ChatMessage(role="tool", tool_call_id=call_id, content=output))

    def _assistant(self, *, is_new: bool) -> ChatMessage:
        if is_new or not self.messages or self.messages[-1].role != "assistant":
            self.messages.append(ChatMessage(role="assistant"))
        return self.messages[-1]

    def _add_message(self, item: wire.InputItem, where: str) -> None:
        if item.role is None:
            raise RequestError(f"{where}.role is required", param=f"{where}.role")
        content = _content(item.content, f"{where}.content")
        if item.role != "assistant":
            self.messages.append(ChatMessage(role=item.role, content=content))
            return
        last = self._assistant(is_new=False)
        # text after text or calls is the next message of the assistant
        if last.content is not None or last.tool_calls:
            last = self._assistant(is_new=True)
        last.content = content

    def _add_call(self, item: wire.InputItem, where: str) -> None:
        name = _required(item.name, f"{where}.name")
        if item.namespace is not None:
            name = wire.ToolNamespace(name=item.namespace, tools=[]).joined(name)
        call = CallRecord(id=_required(item.call_id, f"{where}.call_id"))
        if item.type == "custom_tool_call":
            call.custom = CustomCall(name=name, input=_required(item.input, f"{where}.input"))
        else:
            call.function = FunctionCall(name=name, arguments=_required(item.arguments, f"{where}.arguments"))
        message = self._assistant(is_new=False)
        message.tool_calls = [*(message.tool_calls or ()), call]


def _convert_format(given: wire.TextFormat) -> ResponseFormat:
    if given.type != "json_schema":
        return ResponseFormat(type=given.type)
    if given.schema is None:
        raise RequestError("text.format.schema is required", param="text.format.schema")
    schema = JsonSchemaFormat(schema=given.schema, name=given.name, strict=given.strict)
    return ResponseFormat(type="json_schema", json_schema=schema)


def _convert_choice(
    choice: ToolChoice | wire.NamedFunction | wire.NamedCustom | wire.AllowedFunctions | None
) -> ToolChoice | NamedTool | NamedCustomTool | AllowedTools | None:
    if isinstance(choice, wire.NamedFunction | wire.NamedCustom):
        return _named_tool(choice)
    if isinstance(choice, wire.AllowedFunctions):
        tools = [_named_tool(tool) for tool in choice.tools]
        return AllowedTools(allowed_tools=AllowedSet(mode=choice.mode, tools=tools))
    return choice


def _named_tool(tool: wire.NamedFunction | wire.NamedCustom) -> NamedTool | NamedCustomTool:
    name = FunctionName(name=tool.name)
    return NamedTool(function=name) if isinstance(tool, wire.NamedFunction) else NamedCustomTool(custom=name)


def named_tools(tools: Iterable[wire.OfferedTool] | None) -> dict[str, tuple[wire.NamespaceTool, str | None]]:
    """Functions and custom tools by the names that the model sees, each with its namespace if it has one; the
    description of a namespace begins that of its first tool. Raises `RequestError` for a name that is used twice or too
    long."""
    found: dict[str, tuple[wire.NamespaceTool, str | None]] = {}
    for index, offered in enumerate(tools or ()):
        for name, tool, namespace in _list_tools(offered):
            if name in found or len(name) > MAX_TOOL_NAME:
                reason = "is used twice" if name in found else f"has more than {MAX_TOOL_NAME} characters"
                raise RequestError(f"tools[{index}].name: {name!r} {reason}", param=f"tools[{index}].name")
            found[name] = (tool, namespace)
    return found


def _list_tools(offered: wire.OfferedTool) -> list[tuple[str, wire.NamespaceTool, str | None]]:
    """The tools of an entry: name that the model sees, tool, namespace."""
    assert not isinstance(offered, wire.WebSearch)
    if not isinstance(offered, wire.ToolNamespace):
        return [(offered.name, offered, None)]
    tools = list(offered.tools)
    if offered.description and tools:
        text = f"{offered.description}\n{tools[0].description or ''}"
        tools[0] = msgspec.structs.replace(tools[0], description=text)
    return [(offered.joined(tool.name), tool, offered.name) for tool in tools]


def _chat_tool(name: str, tool: wire.NamespaceTool) -> AnyTool:
    if isinstance(tool, wire.ResponseTool):
        return Tool(function=FunctionTool(
            name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict
        ))
    form = GrammarInput(grammar=tool.format) if isinstance(tool.format, wire.InputGrammar) else tool.format
    return CustomTool(custom=CustomDetails(name=name, description=tool.description, format=form))


def input_items(body: wire.ResponsesRequest) -> list[wire.InputItem]:
    """The items of a request; a text is a message of the user."""
    return [wire.InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def convert_request(body: wire.ResponsesRequest, history: Sequence[wire.InputItem] = ()) -> ChatRequest:
    """The chat request of ``body`` after ``history``. Raises `RequestError` for items that lack a field."""
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
        chat.tools = [_chat_tool(name, tool) for name, (tool, _) in named_tools(body.tools).items()]
    for name in wire.ResponseExtensions.__struct_fields__:
        setattr(chat, name, getattr(body, name))
    chat.tool_choice = _convert_choice(body.tool_choice)
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        chat.logprobs, chat.top_logprobs = True, body.top_logprobs
    if body.reasoning is not None:
        chat.reasoning_effort = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        chat.response_format = _convert_format(body.text.format)
    return chat

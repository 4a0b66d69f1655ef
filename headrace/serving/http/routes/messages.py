"""``/v1/messages`` and ``/v1/messages/count_tokens``, Anthropic's API: requests converted to `ChatRequest`, responses
whole (`whole_message`) and streamed (`MessageEvents`)."""

from __future__ import annotations

from msgspec import Raw
from starlette.requests import Request

from headrace.base.errors import HeadraceError, RequestError
from headrace.base.media import as_data_uri
from headrace.base.sampling import SamplingParams
from headrace.service.client.outputs import ChoiceDelta, CompletionOutput
from headrace.service.parsing.events import CallArguments, CallEnd, CallStart, Event, TextDelta
from headrace.service.parsing.message import ToolCall
from headrace.serving.http.generation.chat import Chat, OutputReader, prepare_chat
from headrace.serving.http.generation.context import compute, read_request
from headrace.serving.http.generation.conversation import count_prompt
from headrace.serving.http.generation.media import media_of, prepare_media
from headrace.serving.http.generation.run import Generation, collect_generation
from headrace.serving.http.generation.stream import Events, EventStream, named_frame, start_stream
from headrace.serving.http.protocol import messages as wire
from headrace.serving.http.protocol.errors import ThreadsNotServed, describe_messages_error
from headrace.serving.http.protocol.fields import JsonSchemaFormat, ResponseFormat
from headrace.serving.http.protocol.media import ContentPart, PlacedImage, TextPart
from headrace.serving.http.protocol.openai import ChatMessage, ChatRequest, Usage
from headrace.serving.http.protocol.tools import (
    CallRecord,
    FunctionCall,
    FunctionName,
    FunctionTool,
    NamedTool,
    ThinkingSwitch,
    Tool,
)
from headrace.serving.http.transport.endpoint import GENERATION_ERRORS, JsonBody, post
from headrace.serving.http.transport.errors import JsonResponse

BODY, COUNT_BODY = JsonBody(wire.MessagesRequest), JsonBody(wire.CountRequest)
FIELD_NAMES = {"max_tokens": "max_tokens"}
ROLES: dict[type, tuple[str, str]] = {
    wire.ToolResultBlock: ("user", "tool_result"), wire.ToolUseBlock: ("assistant", "tool_use"),
    wire.ThinkingBlock: ("assistant", "thinking"), wire.RedactedBlock: ("assistant", "redacted_thinking"),
}
"""The role that may send a block, and the block's type."""


def _text(content: str | list[wire.TextOnlyBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())


def _check_roles(turn: wire.Turn, where: str) -> None:
    for index, block in enumerate(turn.content):
        role, kind = ROLES.get(type(block), (turn.role, ""))
        if role != turn.role:
            param = f"{where}.content[{index}]"
            raise RequestError(f"{param}: {kind} blocks belong to messages of the role {role!r}", param=param)


def _assistant_message(blocks: list[wire.Block]) -> ChatMessage:
    text = "".join(b.text for b in blocks if isinstance(b, wire.TextBlock))
    reasoning = "".join(b.thinking for b in blocks if isinstance(b, wire.ThinkingBlock))
    calls = [
        CallRecord(id=b.id, type="function", function=FunctionCall(name=b.name, arguments=b.input))
        for b in blocks if isinstance(b, wire.ToolUseBlock)
    ]
    return ChatMessage(
        role="assistant", content=text or None, reasoning_content=reasoning or None, tool_calls=calls or None
    )


def _turn_messages(turn: wire.Turn, where: str) -> list[ChatMessage]:
    """The messages of one turn: one per tool result, consecutive texts and images together."""
    if isinstance(turn.content, str):
        return [ChatMessage(role=turn.role, content=turn.content)]
    _check_roles(turn, where)
    if turn.role == "assistant":
        return [_assistant_message(turn.content)]
    messages: list[ChatMessage] = []
    for index, block in enumerate(turn.content):
        param = f"{where}.content[{index}]"
        if isinstance(block, wire.ToolResultBlock):
            content = _result(block, param)
            messages.append(ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=content))
        elif isinstance(block, wire.TextBlock | wire.ImageBlock):
            part = _part(block, param)
            last = messages[-1] if messages else None
            if last is not None and isinstance(last.content, list) and last.role != "tool":
                last.content.append(part)
            else:
                messages.append(ChatMessage(role=turn.role, content=[part]))
    return messages


def _part(block: wire.TextBlock | wire.ImageBlock, param: str) -> TextPart | PlacedImage:
    if isinstance(block, wire.TextBlock):
        return TextPart(text=block.text)
    if isinstance(block.source, wire.UrlSource):
        return PlacedImage(image_url=block.source.url, param=f"{param}.source.url")
    return PlacedImage(image_url=as_data_uri(block.source.data), param=f"{param}.source.data")


def _result(block: wire.ToolResultBlock, param: str) -> str | list[ContentPart]:
    blocks = block.content if isinstance(block.content, list) else [wire.TextBlock(text=block.content or "")]
    if block.is_error:  # chat templates have no field for failed calls
        first = next((each for each in blocks if isinstance(each, wire.TextBlock)), None)
        text = f"Error: {first.text if first is not None else ''}"
        blocks = [wire.TextBlock(text=text), *(each for each in blocks if each is not first)]
    parts: list[ContentPart] = [_part(each, f"{param}.content[{i}]") for i, each in enumerate(blocks)]
    if any(isinstance(part, PlacedImage) for part in parts):
        return parts
    return "\n".join(part.text for part in parts if isinstance(part, TextPart))


def _tool(tool: wire.ClientTool) -> Tool:
    return Tool(function=FunctionTool(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict,
    ))


def _set_tools(chat: ChatRequest, body: wire.CountRequest) -> None:
    chat.tools = [_tool(tool) for tool in body.tools] if body.tools else None
    choice = body.tool_choice
    if choice is None:
        return
    if isinstance(choice, wire.NoChoice):
        chat.tool_choice = "none"
        return
    chat.parallel_tool_calls = not choice.disable_parallel_tool_use
    if isinstance(choice, wire.NamedChoice):
        chat.tool_choice = NamedTool(function=FunctionName(name=choice.name))
    else:
        chat.tool_choice = "required" if isinstance(choice, wire.AnyChoice) else "auto"


def _set_thinking(chat: ChatRequest, thinking: wire.Thinking) -> None:
    if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
        raise RequestError(
            "thinking.budget_tokens belongs to the type 'enabled', and is required there",
            param="thinking.budget_tokens"
        )
    chat.thinking = ThinkingSwitch(
        type="disabled" if thinking.type == "disabled" else "enabled", budget_tokens=thinking.budget_tokens
    )
    chat.include_reasoning = thinking.display != "omitted"


def convert_prompt(body: wire.CountRequest) -> ChatRequest:
    """The chat request for the fields that make the prompt. Raises `RequestError` for misplaced blocks."""
    messages = [m for i, turn in enumerate(body.messages) for m in _turn_messages(turn, f"messages[{i}]")]
    if not messages:
        raise RequestError("messages must have content", param="messages")
    if messages[-1].tool_calls:
        raise RequestError("messages must not end with a tool_use: send its tool_result", param="messages")
    system = _text(body.system)
    chat = ChatRequest(
        messages=[ChatMessage(role="system", content=system), *messages] if system else messages, model=body.model
    )
    # Anthropic's prefill: a last message of the assistant is continued.
    chat.continue_final_message = True if messages[-1].role == "assistant" else None
    _set_tools(chat, body)
    if body.thinking is not None:
        _set_thinking(chat, body.thinking)
    output = body.output_config
    if output is not None:
        is_off = body.thinking is not None and body.thinking.type == "disabled"
        chat.reasoning_effort = None if is_off else output.effort
        if output.format is not None:
            chat.response_format = ResponseFormat(
                type="json_schema", json_schema=JsonSchemaFormat(schema=output.format.schema)
            )
    return chat


def convert_request(body: wire.MessagesRequest) -> ChatRequest:
    """The chat request of ``body``."""
    if body.thread is not None:
        raise ThreadsNotServed(
            "thread is not supported: conversations are not stored; send all messages", param="thread"
        )
    chat = convert_prompt(body)
    chat.stream, chat.max_completion_tokens = body.stream, body.max_tokens
    chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
    chat.stop = body.stop_sequences or None
    budget = chat.thinking.budget_tokens if chat.thinking is not None else None
    if budget is not None and budget >= body.max_tokens:
        raise RequestError("thinking.budget_tokens must be less than max_tokens", param="thinking.budget_tokens")
    return chat


def _stop_info(
    choice: ChoiceDelta | CompletionOutput, chat: Chat, num_out: int, *, has_calls: bool
) -> wire.StopInfo:
    """Why the output of ``num_out`` tokens has ended."""
    # a stop string; a stop token id is an int and counts as the end of the turn
    if isinstance(choice.stop_reason, str):
        return wire.StopInfo("stop_sequence", choice.stop_reason)
    if choice.finish_reason == "stop":
        return wire.StopInfo("tool_use" if has_calls else "end_turn", None)
    params = chat.request.params[0]
    is_shorter = isinstance(params, SamplingParams) and num_out < (params.max_tokens or 0)
    if is_shorter and choice.finish_reason == "length":
        return wire.StopInfo("model_context_window_exceeded", None)
    return wire.StopInfo("max_tokens", None)  # the API has no reason for aborted requests


def _usage(usage: Usage) -> wire.MessagesUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    # (input without cached tokens, output, cached input)
    return wire.MessagesUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def _empty_block(event: Event) -> wire.OutputBlock:
    """The block that an event begins, empty."""
    if isinstance(event, CallStart):
        return wire.ToolUseOutput(event.call_id, event.name, Raw(b"{}"))
    return wire.ThinkingOutput("") if isinstance(event, TextDelta) and event.is_reasoning else wire.TextOutput("")


def whole_message(model: str, choice: CompletionOutput, chat: Chat, usage: Usage) -> wire.Message:
    """One finished response."""
    reader = OutputReader(chat.plan)
    content: list[wire.OutputBlock] = []
    for part in reader.read_whole(choice):
        match part:
            case TextDelta(text, is_reasoning):
                content.append(wire.ThinkingOutput(text) if is_reasoning else wire.TextOutput(text))
            case ToolCall(call_id, name, arguments):
                content.append(wire.ToolUseOutput(call_id, name, Raw(arguments.encode())))
    stop = _stop_info(choice, chat, usage.completion_tokens, has_calls=reader.has_calls)
    return wire.Message(
        chat.request.request_id, model, content, _usage(usage), stop_reason=stop.stop_reason,
        stop_sequence=stop.stop_sequence
    )


def _frame(event: wire.StreamEvent) -> bytes:
    return named_frame(str(type(event).__struct_config__.tag), event)


class BlockWriter:
    """Writes parse events as content blocks: start, deltas, stop; one block at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._block: wire.OutputBlock | None = None

    def write(self, event: Event) -> bytes:
        """The frames of one event."""
        match event:
            case TextDelta(text, True):
                return self._turn_to(event) + self._delta(wire.ContentDelta("thinking_delta", thinking=text))
            case TextDelta(text):
                return self._turn_to(event) + self._delta(wire.ContentDelta("text_delta", text=text))
            case CallArguments(_, text):
                return self._delta(wire.ContentDelta("input_json_delta", partial_json=text))
            case CallEnd():
                return self.stop()
        return self._turn_to(event)

    def _turn_to(self, event: Event) -> bytes:
        """Start a block for the event, unless it continues the open one."""
        block = _empty_block(event)
        # Consecutive texts of one kind share a block; each call has its own.
        if type(block) is type(self._block) and not isinstance(block, wire.ToolUseOutput):
            return b""
        stopped = self.stop()
        self._block, self._index = block, self._index + 1
        return stopped + _frame(wire.BlockStart(self._index, block))

    def _delta(self, delta: wire.ContentDelta) -> bytes:
        return _frame(wire.BlockDelta(self._index, delta))

    def stop(self) -> bytes:
        """Stop the open block, if any."""
        if self._block is None:
            return b""
        self._block = None
        return _frame(wire.BlockStop(self._index))


class MessageEvents(Events):
    """Stream events: the message's start, its blocks, its stop."""

    done = b""

    def __init__(self, generation: Generation, chat: Chat, model: str):
        self._generation = generation
        self._chat = chat
        self._model = model
        self._reader = OutputReader(chat.plan)
        self._writer = BlockWriter()
        self._has_begun = False
        self._stop = wire.StopInfo(None, None)

    def render(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        """Frames of one delta."""
        opening = b"" if self._has_begun else self._begin()
        frames = b"".join(map(self._writer.write, self._reader.read(delta)))
        if delta.finish_reason is not None:
            num_out = self._generation.usage().completion_tokens
            self._stop = _stop_info(delta, self._chat, num_out, has_calls=self._reader.has_calls)
        return opening + frames

    def _begin(self) -> bytes:
        self._has_begun = True
        usage = _usage(self._generation.usage())
        # The first delta is already counted, but none of its text has been sent.
        usage.output_tokens = 0
        message = wire.Message(self._generation.request.request_id, self._model, [], usage)
        return _frame(wire.MessageStart(message)) + _frame(wire.Ping())

    def end(self) -> bytes:
        """The stop reason and the usage."""
        delta = wire.MessageDelta(self._stop, _usage(self._generation.usage()))
        return self._writer.stop() + _frame(delta) + _frame(wire.MessageStop())

    def fail(self, error: HeadraceError) -> bytes:
        """An error event, the last of the stream."""
        return _frame(describe_messages_error(error))


async def create_message(request: Request) -> JsonResponse | EventStream:
    """Answer a conversation (Anthropic's API)."""
    context, body = await read_request(request, BODY)
    converted = await compute(request, lambda: convert_request(body))
    chat = await prepare_chat(request, context, converted, id_prefix="msg_", fits=True, field_names=FIELD_NAMES)
    if body.stream:
        return await start_stream(request, chat.request, lambda g: MessageEvents(g, chat, g.model_name))
    generation, (output,) = await collect_generation(request, chat.request)
    return JsonResponse(whole_message(generation.model_name, output.outputs[0], chat, generation.usage()))


async def count_tokens(request: Request) -> JsonResponse:
    """Count the tokens of a conversation."""
    context, body = await read_request(request, COUNT_BODY)
    context.check_model(body.model)
    converted = await compute(request, lambda: convert_prompt(body))
    items = await prepare_media(request, context, media_of(converted.messages))
    count = await compute(request, lambda: count_prompt(context, converted, items))
    return JsonResponse(wire.TokenCount(count))


ENDPOINTS = (
    post(
        "/v1/messages", create_message, "anthropic", wire.Message, body=BODY, event=wire.StreamEvent,
        errors=GENERATION_ERRORS
    ),
    post("/v1/messages/count_tokens", count_tokens, "anthropic", wire.TokenCount, body=COUNT_BODY, errors=(404, 503)),
)

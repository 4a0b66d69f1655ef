"""Anthropic's requests as chat requests."""

from __future__ import annotations

from headrace.base.errors import RequestError
from headrace.serving.http.protocol.chat import ChatMessage, ChatRequest, TextPart
from headrace.serving.http.protocol.messages import (
    AnyChoice,
    Block,
    ClientTool,
    CountRequest,
    MessagesRequest,
    NamedChoice,
    NoChoice,
    PlainText,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ThreadsNotServed,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from headrace.serving.http.protocol.structure import JsonSchemaFormat, ResponseFormat
from headrace.serving.http.protocol.tools import (
    CallRecord,
    FunctionCall,
    FunctionName,
    FunctionTool,
    NamedTool,
    ThinkingSwitch,
    Tool,
)

OWNERS: dict[type, tuple[str, str]] = {
    ToolResultBlock: ("user", "tool_result"), ToolUseBlock: ("assistant", "tool_use"),
    ThinkingBlock: ("assistant", "thinking"),
}


def _text(content: str | list[PlainText] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())


def _check_owners(turn: Turn, where: str) -> None:
    for index, block in enumerate(turn.content):
        role, kind = OWNERS.get(type(block), (turn.role, ""))
        if role != turn.role:
            param = f"{where}.content[{index}]"
            raise RequestError(f"{param}: {kind} blocks belong to messages of the role {role!r}", param=param)


def _assistant_message(blocks: list[Block]) -> ChatMessage:
    texts = [b.text for b in blocks if isinstance(b, TextBlock)]
    thoughts = [b.thinking for b in blocks if isinstance(b, ThinkingBlock)]
    calls = [
        CallRecord(id=b.id, type="function", function=FunctionCall(name=b.name, arguments=b.input))
        for b in blocks if isinstance(b, ToolUseBlock)
    ]
    return ChatMessage(
        role="assistant", content="".join(texts) or None, reasoning_content="".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _result_message(block: ToolResultBlock) -> ChatMessage:
    text = _text(block.content)
    return ChatMessage(
        role="tool", tool_call_id=block.tool_use_id, content=f"Error: {text}" if block.is_error else text
    )


def _turn_messages(turn: Turn, where: str) -> list[ChatMessage]:
    """The messages of one turn: every result is one of its own, texts beside each other stay together."""
    if isinstance(turn.content, str):
        return [ChatMessage(role=turn.role, content=turn.content)]
    _check_owners(turn, where)
    if turn.role == "assistant":
        return [_assistant_message(turn.content)]
    messages: list[ChatMessage] = []
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            messages.append(_result_message(block))
        elif isinstance(block, TextBlock):
            if messages and isinstance(messages[-1].content, list):
                messages[-1].content.append(TextPart(text=block.text))
            else:
                messages.append(ChatMessage(role=turn.role, content=[TextPart(text=block.text)]))
    return messages


def _tool(tool: ClientTool) -> Tool:
    return Tool(type="function", function=FunctionTool(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict,
    ))


def _set_tools(chat: ChatRequest, body: CountRequest) -> None:
    chat.tools = [_tool(tool) for tool in body.tools] if body.tools else None
    choice = body.tool_choice
    if choice is None:
        return
    if isinstance(choice, NoChoice):
        chat.tool_choice = "none"
        return
    chat.parallel_tool_calls = not choice.disable_parallel_tool_use
    if isinstance(choice, NamedChoice):
        chat.tool_choice = NamedTool(function=FunctionName(name=choice.name))
    else:
        chat.tool_choice = "required" if isinstance(choice, AnyChoice) else "auto"


def _set_thinking(chat: ChatRequest, thinking: Thinking) -> None:
    if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
        raise RequestError(
            "thinking.budget_tokens belongs to the type 'enabled', and is required there",
            param="thinking.budget_tokens"
        )
    chat.thinking = ThinkingSwitch(
        type="disabled" if thinking.type == "disabled" else "enabled", budget_tokens=thinking.budget_tokens
    )
    chat.include_reasoning = thinking.display != "omitted"


def read_prompt(body: CountRequest) -> ChatRequest:
    """The chat request of what becomes the prompt. Raises `RequestError` for blocks in the wrong place."""
    messages = [m for i, turn in enumerate(body.messages) for m in _turn_messages(turn, f"messages[{i}]")]
    if not messages:
        raise RequestError("messages must have content", param="messages")
    if messages[-1].tool_calls:
        raise RequestError("messages must not end with a tool_use: send its tool_result", param="messages")
    system = _text(body.system)
    chat = ChatRequest(
        messages=[ChatMessage(role="system", content=system), *messages] if system else messages, model=body.model
    )
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


def read_messages(body: MessagesRequest) -> ChatRequest:
    """The chat request of ``body``."""
    if body.thread is not None:
        raise ThreadsNotServed(
            "thread is not supported: conversations are not kept; send the whole of them", param="thread"
        )
    chat = read_prompt(body)
    chat.stream, chat.max_completion_tokens = body.stream, body.max_tokens
    chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
    chat.stop = body.stop_sequences or None
    budget = chat.thinking.budget_tokens if chat.thinking is not None else None
    if budget is not None and budget >= body.max_tokens:
        raise RequestError("thinking.budget_tokens must be less than max_tokens", param="thinking.budget_tokens")
    return chat

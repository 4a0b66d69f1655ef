"""``/v1/messages``, Anthropic's API: the request, the response and its stream events."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from headrace.base.sampling import MAX_STOPS
from headrace.serving.http.protocol.errors import MessagesError
from headrace.serving.http.protocol.fields import Positive, Schema, StopText, TopK, TopP
from headrace.serving.http.protocol.tools import MAX_DESCRIPTION, MAX_TOOLS, Budget, CallId, ToolName

CacheMark = dict[str, Any]
"""``cache_control``: taken, and not needed: every prompt's beginning is cached."""


class PlainText(Struct, kw_only=True, forbid_unknown_fields=True):
    """Text where nothing else may stand."""

    type: Literal["text"]
    text: str
    cache_control: CacheMark | None = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class TextBlock(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Text."""

    text: str
    cache_control: CacheMark | None = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class ThinkingBlock(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="thinking"):
    """What the assistant thought; signatures are taken and not looked at."""

    thinking: str
    signature: str | None = None
    cache_control: CacheMark | None = None


class ToolUseBlock(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool_use"):
    """A call the assistant made."""

    id: CallId
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    input: dict[str, Any]
    cache_control: CacheMark | None = None
    caller: dict[str, Any] | None = None


class ToolResultBlock(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool_result"):
    """What a call came to."""

    tool_use_id: CallId
    content: str | list[PlainText] | None = None
    is_error: bool | None = None
    cache_control: CacheMark | None = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class Turn(Struct, kw_only=True, forbid_unknown_fields=True):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ClientTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the client runs; tools of Anthropic's servers are not served. The fields after ``strict`` are hints
    that change nothing here."""

    name: ToolName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION)] | None = None
    strict: bool | None = None
    cache_control: CacheMark | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None


class AutoChoice(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="auto"):
    """The model decides."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="any"):
    """Some tool must be called."""

    disable_parallel_tool_use: bool | None = None


class NamedChoice(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool"):
    """This tool must be called."""

    name: ToolName
    disable_parallel_tool_use: bool | None = None


class NoChoice(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="none"):
    """No tool may be called."""


class Thinking(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether to think, and how many tokens at most; ``adaptive`` leaves the length to the model. ``display`` "omitted"
    keeps the thinking out of the answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Budget | None = None
    display: Literal["summarized", "omitted"] | None = None


class SchemaFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """The answer is JSON by this schema."""

    type: Literal["json_schema"]
    schema: Schema


class OutputConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """How hard to think, and what the answer must look like."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None


class ThinkingEdit(Struct, kw_only=True, forbid_unknown_fields=True):
    """Leaves thinking of earlier turns out of the prompt; how much of it is kept is up to the model's chat template
    here."""

    type: Literal["clear_thinking_20251015"]
    keep: str | dict[str, Any] | None = None


class ContextManagement(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the server may leave out of the conversation: thinking alone, nothing else is ever left out."""

    edits: list[ThinkingEdit] | None = None


class CountRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """What becomes the prompt."""

    messages: Annotated[list[Turn], Meta(min_length=1, max_length=65536)]
    model: Annotated[str, Meta(max_length=512)] | None = None
    system: str | list[PlainText] | None = None
    tools: Annotated[list[ClientTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheMark | None = None
    context_management: ContextManagement | None = None


class MessagesRequest(CountRequest, kw_only=True, forbid_unknown_fields=True):
    """A conversation to answer. An assistant's message at the end is continued. More ``max_tokens`` than the context
    has room for are as many as it has. ``metadata`` and ``service_tier`` are taken and change nothing; ``thread`` is
    refused as clients expect of servers that keep no conversations, and they send the whole of it."""

    max_tokens: Positive
    stream: bool | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    thread: dict[str, Any] | None = None


JsonObject = Annotated[Raw, Meta(extra_json_schema={"type": "object"})]
"""A JSON object as the model wrote it."""


class ShownText(Struct, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str
    citations: None = None


class ShownThinking(Struct, tag_field="type", tag="thinking"):
    """The model's thinking; nothing signs it."""

    thinking: str
    signature: str = ""


class ShownToolUse(Struct, tag_field="type", tag="tool_use"):
    """A call to make. In a stream the input follows as pieces of JSON."""

    id: str
    name: str
    input: JsonObject


ShownBlock = ShownText | ShownThinking | ShownToolUse


class MessagesUsage(Struct):
    """``input_tokens`` are those that did not come from the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class Message(Struct, tag_field="type", tag="message"):
    """The answer."""

    id: str
    model: str
    content: list[ShownBlock]
    usage: MessagesUsage
    role: Literal["assistant"] = "assistant"
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ] | None = None
    stop_sequence: str | None = None


class TokenCount(Struct):
    """How long the prompt is."""

    input_tokens: int


class MessageStart(Struct, tag_field="type", tag="message_start"):
    """The answer without content."""

    message: Message


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: ShownBlock


class BlockPiece(Struct):
    """More of a block: one of the fields after ``type``."""

    type: Literal["text_delta", "thinking_delta", "input_json_delta", "signature_delta"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: BlockPiece


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    """A block ended."""

    index: int


class Ending(Struct):
    """Why the answer ended."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    """The end of the answer and what it took."""

    delta: Ending
    usage: MessagesUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    """Nothing follows."""


class Ping(Struct, tag_field="type", tag="ping"):
    """Keeps the connection alive."""


StreamEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping | MessagesError

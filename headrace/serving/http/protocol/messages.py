"""``/v1/messages``, Anthropic's API: the request, the response and its stream events."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from headrace.base.sampling import MAX_STOPS
from headrace.serving.http.protocol.errors import MessagesError
from headrace.serving.http.protocol.fields import ModelName, Positive, Schema, StopText, ToolName, TopK, TopP
from headrace.serving.http.protocol.media import Base64, Url
from headrace.serving.http.protocol.tools import MAX_DESCRIPTION, MAX_TOOLS, Budget, CallId

CacheControl = dict[str, Any]
"""``cache_control`` is accepted without effect: every prefix is cached."""


# Requests are strict (`forbid_unknown_fields`), but for messages and their blocks: there unknown keys are ignored.
class TextOnlyBlock(Struct, kw_only=True):
    """Text in a place that takes no other block."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class TextBlock(Struct, kw_only=True, tag_field="type", tag="text"):
    """Text."""

    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class Base64Source(Struct, kw_only=True, tag_field="type", tag="base64"):
    """An image's data. ``media_type`` is ignored: the content tells."""

    data: Base64
    media_type: str | None = None


class UrlSource(Struct, kw_only=True, tag_field="type", tag="url"):
    """An image's address."""

    url: Url


class ImageBlock(Struct, kw_only=True, tag_field="type", tag="image"):
    """An image."""

    source: Base64Source | UrlSource
    cache_control: CacheControl | None = None


class ThinkingBlock(Struct, kw_only=True, tag_field="type", tag="thinking"):
    """The assistant's reasoning; the signature is ignored."""

    thinking: str
    signature: str | None = None
    cache_control: CacheControl | None = None


class RedactedBlock(Struct, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """Reasoning that another server has encrypted; left out."""

    data: str


class ToolUseBlock(Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call the assistant made."""

    id: CallId
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None


class ToolResultBlock(Struct, kw_only=True, tag_field="type", tag="tool_result"):
    """The result of a call."""

    tool_use_id: CallId
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = TextBlock | ImageBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock


class Turn(Struct, kw_only=True):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ClientTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the client runs; Anthropic's server tools are not supported. The fields after ``strict`` are accepted
    without effect."""

    name: ToolName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION)] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None


# msgspec tells the classes of a union apart by ``tag_field``, so each ``type`` has its own class.
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
    """Reasoning and its limit; ``adaptive`` leaves the length to the model. ``display`` "omitted" drops the reasoning
    from the response."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Budget | None = None
    display: Literal["summarized", "omitted"] | None = None


class SchemaFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """The response follows this JSON schema."""

    type: Literal["json_schema"]
    schema: Schema


class OutputConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """Reasoning effort and output format."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None


class ThinkingEdit(Struct, kw_only=True, forbid_unknown_fields=True):
    """Drops reasoning of earlier turns from the prompt. Here the model's chat template decides how much is kept."""

    type: Literal["clear_thinking_20251015"]
    keep: str | dict[str, Any] | None = None


class ContextManagement(Struct, kw_only=True, forbid_unknown_fields=True):
    """Edits of the conversation; only clearing of reasoning is supported."""

    edits: list[ThinkingEdit] | None = None


class CountRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that make the prompt."""

    messages: Annotated[list[Turn], Meta(min_length=1, max_length=65536)]
    model: ModelName | None = None
    system: str | list[TextOnlyBlock] | None = None
    tools: Annotated[list[ClientTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None


class MessagesRequest(CountRequest, kw_only=True, forbid_unknown_fields=True):
    """A conversation. A final assistant message is continued. ``max_tokens`` is lowered to the room in the context.
    ``metadata`` and ``service_tier`` are accepted without effect; ``thread`` is refused with the error that makes
    clients send the whole conversation."""

    max_tokens: Positive
    stream: bool | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    # Anthropic allows 0 to 1; the models served here take more.
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    thread: dict[str, Any] | None = None


JsonObject = Annotated[Raw, Meta(extra_json_schema={"type": "object"})]
"""A JSON object exactly as the model wrote it."""


class TextOutput(Struct, tag_field="type", tag="text"):
    """Output text."""

    text: str


class ThinkingOutput(Struct, tag_field="type", tag="thinking"):
    """Output reasoning, unsigned."""

    thinking: str
    signature: str = ""


class ToolUseOutput(Struct, tag_field="type", tag="tool_use"):
    """A call. In a stream the input follows as pieces of JSON."""

    id: str
    name: str
    input: JsonObject


OutputBlock = TextOutput | ThinkingOutput | ToolUseOutput


class MessagesUsage(Struct):
    """``input_tokens`` excludes tokens from the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0  # always 0: writing to the prefix cache is not counted


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class Message(Struct, tag_field="type", tag="message"):
    """The response."""

    id: str
    model: str
    content: list[OutputBlock]
    usage: MessagesUsage
    role: Literal["assistant"] = "assistant"
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None


class TokenCount(Struct):
    """The prompt's length."""

    input_tokens: int


class MessageStart(Struct, tag_field="type", tag="message_start"):
    """The response without content."""

    message: Message


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: OutputBlock


class ContentDelta(Struct):
    """An addition to a block: the field that ``type`` names."""

    type: Literal["text_delta", "thinking_delta", "input_json_delta", "signature_delta"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    """An addition to a block."""

    index: int
    delta: ContentDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    """A block ended."""

    index: int


class StopInfo(Struct):
    """Why generation stopped."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    """The stop reason and the final usage."""

    delta: StopInfo
    usage: MessagesUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    """The end of the stream."""


class Ping(Struct, tag_field="type", tag="ping"):
    """Keeps the connection alive."""


StreamEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping | MessagesError

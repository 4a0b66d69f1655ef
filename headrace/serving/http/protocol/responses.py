"""``/v1/responses``: the request, the response and its stream events."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from headrace.serving.http.protocol.fields import NumTop, Positive, Schema, TopP
from headrace.serving.http.protocol.tools import MAX_DESCRIPTION, MAX_TOOLS, CallId, ToolChoice, ToolName

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Status = Literal["in_progress", "completed", "incomplete"]


class InputPart(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A piece of text. ``annotations`` and ``logprobs`` come back from answers and are not looked at."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputItem(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message (``role``, ``content``), a call (``call_id``, ``name``, ``arguments``), its result (``call_id``,
    ``output``), or reasoning (``content``, else ``summary``). The fields after ``summary`` come back from answers and
    change nothing."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: CallId | None = None
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    encrypted_content: str | None = None


class ResponseTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function the model may call; OpenAI's own tools are not served."""

    type: Literal["function"]
    name: ToolName
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Struct, tag_field="type", tag="function", kw_only=True, forbid_unknown_fields=True):
    """The function that must be called."""

    name: ToolName


class AllowedFunctions(Struct, tag_field="type", tag="allowed_tools", kw_only=True, forbid_unknown_fields=True):
    """The functions that may be called, and whether one of them must."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Meta(min_length=1, max_length=MAX_TOOLS)]


class TextFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the text must look like; ``json_schema`` needs ``schema``."""

    type: Literal["text", "json_object", "json_schema"]
    schema: Schema | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of the text; there is one verbosity."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """How hard to think. Reasoning is told in full, ``summary`` adds nothing."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Nothing is padded."""

    include_obfuscation: bool | None = None


class TakenFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Accepted without effect, but for the logprobs that ``include`` may ask for. It may ask for encrypted reasoning,
    too: none is encrypted here."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = None
    truncation: Literal["disabled"] | None = None


class ResponsesRequest(TakenFields, kw_only=True, forbid_unknown_fields=True):
    """A conversation to answer."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=65536)]
    model: Annotated[str, Meta(max_length=512)] | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: NumTop | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None


class InputCount(Struct):
    """How long the prompt is."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class OutputText(Struct, tag_field="type", tag="output_text"):
    """Text of an answer."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """Reasoning."""

    text: str


class OutputMessage(Struct, tag_field="type", tag="message"):
    """The text of the answer."""

    id: str
    status: Status
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputReasoning(Struct, tag_field="type", tag="reasoning"):
    """The reasoning before it."""

    id: str
    status: Status
    content: list[ReasoningText]
    summary: list[Any] = []
    encrypted_content: None = None


class OutputCall(Struct, tag_field="type", tag="function_call"):
    """A call to make when it is ``completed``; else its arguments are the beginning of JSON."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class CachedDetails(Struct):
    """How many came from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct):
    """Reasoning is not counted apart."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    """Token counts."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: CachedDetails
    output_tokens_details: OutputDetails


class IncompleteDetails(Struct):
    """Why the answer is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseError(Struct):
    """What went wrong half-way."""

    code: str
    message: str


class AskedFields(Struct, kw_only=True):
    """What was asked, repeated."""

    model: str
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[ResponseTool] = []
    tool_choice: ToolChoice | NamedFunction | AllowedFunctions = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, Any] | None = None
    store: bool = False
    truncation: Literal["disabled"] = "disabled"
    previous_response_id: str | None = None
    background: bool = False


class Response(AskedFields, kw_only=True):
    """The answer."""

    id: str
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    output: list[OutputItem]
    top_logprobs: int = 0
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    object: Literal["response"] = "response"


class DeletedResponse(Struct):
    """An answer that was forgotten."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(Struct):
    """A page of the items that an answer was made of."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class ResponseEvent(Struct, kw_only=True):
    """One event of a stream; ``type`` tells which fields it has."""

    type: str
    sequence_number: int = 0
    response: Response | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET

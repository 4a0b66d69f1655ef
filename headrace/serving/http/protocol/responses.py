"""``/v1/responses``: the request, the response and its stream events."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from headrace.serving.http.protocol.fields import (
    Count,
    Deadline,
    ModelName,
    NumTop,
    Positive,
    Priority,
    Salt,
    Schema,
    SharedSampling,
    Stop,
    StopIds,
    StopRegex,
    ToolName,
    TopP,
)
from headrace.serving.http.protocol.media import Detail
from headrace.serving.http.protocol.openai import ChatTemplate, Verbosity
from headrace.serving.http.protocol.tools import (
    MAX_DESCRIPTION,
    MAX_TOOLS,
    Budget,
    CallId,
    FreeInput,
    GrammarSource,
    ToolChoice,
)

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Status = Literal["in_progress", "completed", "incomplete"]
NAMESPACE_END = "__"
Included = Literal[
    "message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url",
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "code_interpreter_call.outputs", "computer_call_output.output.image_url",
]
"""All but the first are of items that this server never returns, or of what it does not encrypt."""


class InputPart(Struct, kw_only=True, omit_defaults=True):
    """A text part, or an image (``image_url``, ``detail``). ``annotations``, ``logprobs`` and unknown keys are ignored:
    clients copy them from responses."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "refusal", "input_image"]
    text: str | None = None
    refusal: str | None = None
    image_url: Annotated[str, Meta(min_length=1)] | None = None  # stored as it is: no `Url`
    detail: Detail | None = None
    file_id: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputItem(Struct, kw_only=True, omit_defaults=True):
    """A message (``role``, ``content``), a call (``call_id``, ``name``, ``namespace``, ``arguments``; of a custom tool
    ``input``), its result (``call_id``, ``output``), reasoning (``content``, else ``summary``), or a reference to an
    output item of a stored response (``id``). The fields after ``id`` and unknown ones are ignored: clients copy them
    from responses."""

    type: Literal[
        "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning",
        "item_reference",
    ] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: CallId | None = None
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    namespace: ToolName | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    encrypted_content: str | None = None


class ResponseTool(Struct, tag_field="type", tag="function", kw_only=True, forbid_unknown_fields=True):
    """A function the model may call. The fields after ``strict`` are accepted without effect: all functions are shown
    to the model at once."""

    name: ToolName
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    output_schema: dict[str, Any] | None = None


class InputGrammar(GrammarSource, tag_field="type", tag="grammar", kw_only=True, forbid_unknown_fields=True):
    """The grammar of a custom tool's input."""


class ResponseCustomTool(Struct, tag_field="type", tag="custom", kw_only=True, forbid_unknown_fields=True):
    """A tool whose input is one text, in a ``format`` (default: any). ``defer_loading`` and ``allowed_callers`` are
    accepted without effect."""

    name: ToolName
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION)] | None = None
    format: FreeInput | InputGrammar | None = None
    defer_loading: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None


NamespaceTool = ResponseTool | ResponseCustomTool


class ToolNamespace(Struct, tag_field="type", tag="namespace", kw_only=True, forbid_unknown_fields=True):
    """Tools that belong together. The model sees and calls them as ``namespace__tool``."""

    name: ToolName
    tools: Annotated[list[NamespaceTool], Meta(max_length=MAX_TOOLS)]
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION)] | None = None

    def joined(self, name: str) -> str:
        """A tool's name as the model sees it."""
        return f"{self.name}{NAMESPACE_END}{name}"


class WebSearch(Struct, tag_field="type", tag="web_search", kw_only=True):
    """OpenAI's web search, which agents offer to every server. It is left out, and the response header ``Warning``
    says so: the model may search, but need not. Other hosted tools are not supported."""


OfferedTool = ResponseTool | ResponseCustomTool | ToolNamespace | WebSearch


class NamedFunction(Struct, tag_field="type", tag="function", kw_only=True, forbid_unknown_fields=True):
    """The function that must be called."""

    name: ToolName


class NamedCustom(Struct, tag_field="type", tag="custom", kw_only=True, forbid_unknown_fields=True):
    """The custom tool that must be called."""

    name: ToolName


class AllowedFunctions(Struct, tag_field="type", tag="allowed_tools", kw_only=True, forbid_unknown_fields=True):
    """The tools that may be called; with ``required`` one of them must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction | NamedCustom], Meta(min_length=1, max_length=MAX_TOOLS)]


class TextFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """The output format; ``json_schema`` needs ``schema``."""

    type: Literal["text", "json_object", "json_schema"]
    schema: Schema | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of the output text."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None  # accepted without effect


class ReasoningOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Reasoning effort. Reasoning is returned in full; ``summary`` and ``generate_summary``, its older name, have no
    effect."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None


class ResponseStreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Accepted without effect: streams are not padded."""

    include_obfuscation: bool | None = None


class ResponseExtensions(SharedSampling, kw_only=True, forbid_unknown_fields=True):
    """Fields that OpenAI's API does not have; they mean the same as at ``/v1/chat/completions``."""

    stop: Stop | None = None
    stop_regex: StopRegex | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    chat_template: ChatTemplate | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking_budget: Budget | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    deadline_s: Deadline | None = None


class RequestDetails(ResponseExtensions, kw_only=True, forbid_unknown_fields=True):
    """``store: false`` keeps no copy of the response, ``metadata`` is returned in it, and ``include`` may request
    logprobs. The other fields are accepted without effect: with ``truncation`` "auto", too, a conversation that is too
    long is an error."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[Included] | None = None
    truncation: Literal["disabled", "auto"] | None = None


class ResponsesRequest(RequestDetails, kw_only=True, forbid_unknown_fields=True):
    """A conversation. ``background``: the response is generated without the client, which asks for it by its id."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=65536)]
    model: ModelName | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    tools: Annotated[list[OfferedTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | NamedFunction | NamedCustom | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: NumTop | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    background: bool | None = None


class InputCount(Struct):
    """The prompt's length."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


# Empty list defaults are safe: msgspec makes a new list for each instance.
class OutputText(Struct, tag_field="type", tag="output_text"):
    """Output text."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """Reasoning."""

    text: str


class OutputMessage(Struct, tag_field="type", tag="message"):
    """An output message."""

    id: str
    status: Status
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputReasoning(Struct, tag_field="type", tag="reasoning"):
    """Output reasoning."""

    id: str
    status: Status
    content: list[ReasoningText]
    summary: list[Any] = []
    encrypted_content: None = None


class OutputCall(Struct, tag_field="type", tag="function_call"):
    """A call. Its arguments are complete JSON when ``status`` is ``completed``."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class OutputCustomCall(Struct, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool. Its input is whole when ``status`` is ``completed``."""

    id: str
    status: Status
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class CachedDetails(Struct):
    """Tokens from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct):
    """Reasoning is not counted separately."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    """Token counts."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: CachedDetails
    output_tokens_details: OutputDetails


class IncompleteDetails(Struct):
    """Why the response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseError(Struct):
    """Why the response failed."""

    code: str
    message: str


# None is sent as null and not left out, as OpenAI does it.
class EchoedFields(Struct, kw_only=True):
    """Request fields that the response repeats."""

    model: str
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[OfferedTool] = []
    tool_choice: ToolChoice | NamedFunction | NamedCustom | AllowedFunctions = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, Any] | None = None
    store: bool = False
    truncation: Literal["disabled"] = "disabled"
    previous_response_id: str | None = None
    background: bool = False


class Response(EchoedFields, kw_only=True):
    """The response."""

    id: str
    created_at: int  # seconds since the epoch
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    output: list[OutputItem]
    top_logprobs: int = 0
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    object: Literal["response"] = "response"


class DeletedResponse(Struct):
    """A deleted response."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(Struct):
    """A page of a response's input items."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class ResponseEvent(Struct, kw_only=True):
    """One event of a stream; ``type`` decides which fields are set."""

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
    input: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET

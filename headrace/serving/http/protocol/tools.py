"""Tools and reasoning in chat requests and responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from headrace.serving.http.protocol.fields import INT32, StopFields

MAX_TOOLS = 1024
MAX_CALLS = 1024
MAX_DESCRIPTION = 32_768
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$(?!\n)")]
CallId = Annotated[str, Meta(max_length=256)]
ToolChoice = Literal["none", "auto", "required"]
Budget = Annotated[int, Meta(ge=0, le=INT32)]


class FunctionTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function the model may call. ``parameters`` is the JSON schema of an object; with ``strict`` arguments always
    keep to it."""

    name: ToolName
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool; only functions are served."""

    type: Literal["function"]
    function: FunctionTool


class FunctionName(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which function."""

    name: ToolName


class NamedTool(Struct, tag_field="type", tag="function", kw_only=True, forbid_unknown_fields=True):
    """The one tool that must be called."""

    function: FunctionName


class AllowedSet(Struct, kw_only=True, forbid_unknown_fields=True):
    """The tools that may be called, and whether one of them must."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Struct, tag_field="type", tag="allowed_tools", kw_only=True, forbid_unknown_fields=True):
    """Some of the tools. The prompt shows all of them, so that requests with other sets share its beginning."""

    allowed_tools: AllowedSet


class FunctionCall(Struct, kw_only=True, forbid_unknown_fields=True):
    """A call in the conversation so far. ``arguments`` is JSON text, or the object itself."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str | dict[str, Any] | None = None


class CallRecord(Struct, kw_only=True, forbid_unknown_fields=True):
    """A call of an earlier assistant message. ``index`` and ``provider_specific_fields`` are taken and not needed:
    clients copy them from answers."""

    function: FunctionCall
    id: CallId | None = None
    type: Literal["function"] | None = None
    index: int | None = None
    provider_specific_fields: dict[str, Any] | None = None


class ThinkingSwitch(Struct, kw_only=True, forbid_unknown_fields=True):
    """Reasoning on or off, and how much of it at most, in tokens."""

    type: Literal["enabled", "disabled"]
    budget_tokens: Budget | None = None


class ReasoningFields(StopFields, kw_only=True, forbid_unknown_fields=True):
    """How a reasoning model thinks, and how that is told. ``reasoning_effort``, ``thinking`` and ``enable_thinking``
    set the switches of the chat template. ``separate_reasoning`` false leaves reasoning in the content,
    ``stream_reasoning`` false sends it in one piece, ``include_reasoning`` false leaves it out. ``thinking_budget``, by
    any of its names, is the number of tokens after which reasoning is ended."""

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingSwitch | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    include_reasoning: bool | None = None
    thinking_budget: Budget | None = None
    thinking_token_budget: Budget | None = None
    max_thinking_tokens: Budget | None = None


class ToolFields(ReasoningFields, kw_only=True, forbid_unknown_fields=True):
    """What the model may call, and whether it must."""

    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None


class AnsweredFunction(Struct):
    """A function's name, once, and its arguments: JSON text, in pieces when streamed."""

    arguments: str
    name: str | UnsetType = UNSET


class AnsweredCall(Struct):
    """A call of the answer."""

    id: str
    function: AnsweredFunction
    type: Literal["function"] = "function"


class CallPiece(Struct):
    """News of a call in a stream: ``id``, ``type`` and the name come with its first piece."""

    index: int
    function: AnsweredFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET

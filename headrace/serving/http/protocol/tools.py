"""Tools and reasoning in chat requests and responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from headrace.serving.http.protocol.fields import INT32, OpenAIFields, ToolName

# Bounds before work: names and descriptions are rendered into the prompt, and schemas may be compiled to grammars.
MAX_TOOLS = 1024
MAX_CALLS = 1024
MAX_DESCRIPTION = 32_768
MAX_DEFINITION = 64 * 1024
CallId = Annotated[str, Meta(max_length=256)]
ToolChoice = Literal["none", "auto", "required"]
Budget = Annotated[int, Meta(ge=0, le=INT32)]


class FunctionTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function the model may call. ``parameters`` is the JSON schema of an object; with ``strict`` it is enforced."""

    name: ToolName
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, tag_field="type", tag="function", kw_only=True, forbid_unknown_fields=True):
    """A function as a tool."""

    function: FunctionTool


class GrammarSource(Struct, kw_only=True, forbid_unknown_fields=True):
    """What the input of a custom tool must match: a regular expression, or a grammar in Lark."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(min_length=1, max_length=MAX_DEFINITION)]


class FreeInput(Struct, tag_field="type", tag="text", kw_only=True, forbid_unknown_fields=True):
    """Any text."""


class GrammarInput(Struct, tag_field="type", tag="grammar", kw_only=True, forbid_unknown_fields=True):
    """Text that a grammar allows."""

    grammar: GrammarSource


class CustomDetails(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool whose input is one text, in a ``format`` (default: any)."""

    name: ToolName
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION)] | None = None
    format: FreeInput | GrammarInput | None = None


class CustomTool(Struct, tag_field="type", tag="custom", kw_only=True, forbid_unknown_fields=True):
    """A custom tool. The model sees a function with one string argument."""

    custom: CustomDetails


AnyTool = Tool | CustomTool


class FunctionName(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function by name."""

    name: ToolName


class NamedTool(Struct, tag_field="type", tag="function", kw_only=True, forbid_unknown_fields=True):
    """The tool that must be called."""

    function: FunctionName


class NamedCustomTool(Struct, tag_field="type", tag="custom", kw_only=True, forbid_unknown_fields=True):
    """The custom tool that must be called."""

    custom: FunctionName


class AllowedSet(Struct, kw_only=True, forbid_unknown_fields=True):
    """The tools that may be called; with ``required`` one of them must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool | NamedCustomTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Struct, tag_field="type", tag="allowed_tools", kw_only=True, forbid_unknown_fields=True):
    """A subset of the tools. The prompt still shows all of them, so that requests with other subsets share its
    prefix."""

    allowed_tools: AllowedSet


class FunctionCall(Struct, kw_only=True):
    """A call in the conversation so far. ``arguments`` is JSON text, or the object itself."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str | dict[str, Any] | None = None


class CustomCall(Struct, kw_only=True):
    """A call of a custom tool in the conversation so far."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    input: str


class CallRecord(Struct, kw_only=True):
    """A call in an earlier assistant message, of a ``function`` or a ``custom`` tool. Unknown keys are ignored: clients
    copy them from responses."""

    function: FunctionCall | None = None
    custom: CustomCall | None = None
    id: CallId | None = None
    type: Literal["function", "custom"] | None = None


class ThinkingSwitch(Struct, kw_only=True, forbid_unknown_fields=True):
    """Switches reasoning on or off and limits it to ``budget_tokens``."""

    type: Literal["enabled", "disabled"]
    budget_tokens: Budget | None = None


class ReasoningFields(OpenAIFields, kw_only=True, forbid_unknown_fields=True):
    """Reasoning and how it is returned. ``reasoning_effort``, ``thinking`` and ``enable_thinking`` set switches of the
    chat template. ``separate_reasoning`` false leaves reasoning in the content, ``stream_reasoning`` false sends it in
    one piece, ``include_reasoning`` false drops it. ``thinking_budget``, under any of its names, is the number of
    tokens after which reasoning is ended."""

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
    """The tools and whether one must be called."""

    tools: Annotated[list[AnyTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | NamedTool | NamedCustomTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None


class ResponseFunction(Struct):
    """A call's name and its arguments: JSON text, in pieces when streamed."""

    arguments: str
    name: str | UnsetType = UNSET


class ResponseInput(Struct):
    """The name of a custom tool and its input: text, in pieces when streamed."""

    input: str
    name: str | UnsetType = UNSET


class ResponseCall(Struct):
    """A call in the response: ``function`` or ``custom``, as ``type`` says."""

    id: str
    type: Literal["function", "custom"]
    function: ResponseFunction | UnsetType = UNSET
    custom: ResponseInput | UnsetType = UNSET


class CallDelta(Struct):
    """A piece of a streamed call: ``id``, ``type`` and the name come with the first one."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: ResponseFunction | UnsetType = UNSET
    custom: ResponseInput | UnsetType = UNSET

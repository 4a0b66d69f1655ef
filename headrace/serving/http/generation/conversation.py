"""From chat messages and tools to the prompt's text, by the model's chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.base.errors import RequestError, UnsupportedFeature
from headrace.service.client.media import place_items
from headrace.service.client.prompts import check_length
from headrace.service.client.requests import refuse_generation
from headrace.service.media.wire import PreparedItem
from headrace.service.parsing.inputs import ARGUMENT, schema_of_input
from headrace.service.parsing.rendering import check_variables, render_with_tools
from headrace.service.tokenization.chat_template import read_arguments
from headrace.serving.http.generation.context import AppContext
from headrace.serving.http.generation.media import template_content
from headrace.serving.http.protocol.fields import SPEECH, TOOLS
from headrace.serving.http.protocol.native import TokenizeRequest
from headrace.serving.http.protocol.openai import ChatMessage, ChatRequest
from headrace.serving.http.protocol.tools import (
    AllowedTools,
    AnyTool,
    CallRecord,
    CustomTool,
    FunctionTool,
    GrammarInput,
    NamedCustomTool,
    NamedTool,
    ReasoningFields,
    ToolChoice,
)
from headrace.serving.http.transport.threads import AT_ONCE

MAX_SCHEMA_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 64
# C0 controls except tab, LF and CR; and DEL.
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
ROLES_WITH_MEDIA = ("user", "tool")
ROLE_OF_TEMPLATE = {"developer": "system"}
"""OpenAI's roles that chat templates know under another name."""

SYNTAXES = {"regex": "regular expression", "lark": "grammar in Lark"}
AnyToolChoice = ToolChoice | NamedTool | NamedCustomTool | AllowedTools | None


def offered_tools(tools: list[AnyTool] | None, choice: AnyToolChoice = None) -> list[dict[str, Any]]:
    """The tools to show the model, in OpenAI's form, checked; none for the choice "none". Raises `RequestError` naming
    the field."""
    names: set[str] = set()
    functions = [_as_function(tool) for tool in tools or ()]
    for index, (tool, function) in enumerate(zip(tools or (), functions, strict=True)):
        where = f"tools[{index}].{'custom' if isinstance(tool, CustomTool) else 'function'}"
        _check_tool(function, where)
        if function.name in names:
            raise RequestError(f"{where}.name {function.name!r} is used twice", param=f"{where}.name")
        names.add(function.name)
    if choice == "required" and not tools:
        raise RequestError("tool_choice 'required' needs tools", param="tool_choice")
    for name in sorted(chosen_names(choice) - names):
        raise RequestError(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    return [] if choice == "none" else [_tool_dict(function) for function in functions]


def custom_names(tools: list[AnyTool] | None) -> frozenset[str]:
    """The names of custom tools."""
    return frozenset(tool.custom.name for tool in tools or () if isinstance(tool, CustomTool))


def lark_grammars(tools: list[AnyTool] | None) -> dict[str, str]:
    """The grammars in Lark of custom tools, by their names."""
    forms = {tool.custom.name: tool.custom.format for tool in tools or () if isinstance(tool, CustomTool)}
    return {
        name: form.grammar.definition for name, form in forms.items()
        if isinstance(form, GrammarInput) and form.grammar.syntax == "lark"
    }


def _as_function(tool: AnyTool) -> FunctionTool:
    """The function that the model sees: of a custom tool one with a single text, described by its grammar."""
    if not isinstance(tool, CustomTool):
        return tool.function
    given = tool.custom
    if not isinstance(given.format, GrammarInput):
        return FunctionTool(name=given.name, description=given.description, parameters=schema_of_input())
    grammar = given.format.grammar
    note = f"The {ARGUMENT} must match this {SYNTAXES[grammar.syntax]}:\n{grammar.definition}"
    is_enforced = grammar.syntax == "regex"
    return FunctionTool(
        name=given.name, description="\n\n".join(filter(None, (given.description, note))), strict=is_enforced or None,
        parameters=schema_of_input(grammar.definition if is_enforced else None),
    )


def chosen_names(choice: AnyToolChoice) -> set[str]:
    """The names of the tools in a ``tool_choice``; empty for choices without names, such as "auto"."""
    if isinstance(choice, AllowedTools):
        return set().union(*map(chosen_names, choice.allowed_tools.tools))
    if isinstance(choice, NamedCustomTool):
        return {choice.custom.name}
    return {choice.function.name} if isinstance(choice, NamedTool) else set()


def _tool_dict(given: FunctionTool) -> dict[str, Any]:
    """The tool as templates expect it: OpenAI's form with fields in the order of training data. An absent
    description is empty, absent parameters are those of a function without arguments."""
    function = {
        "name": given.name, "description": given.description or "",
        "parameters": given.parameters or {"type": "object", "properties": {}}
    }
    return {"type": "function", "function": function if given.strict is None else {**function, "strict": given.strict}}


def _check_tool(tool: FunctionTool, where: str) -> None:
    _check_text(tool.description or "", f"{where}.description")
    schema, param = tool.parameters, f"{where}.parameters"
    if not schema:
        return
    if schema.get("type", "object") != "object":
        raise RequestError(f"{param}.type must be 'object'", param=param)
    if not isinstance(schema.get("properties", {}), dict) or not isinstance(schema.get("required", []), list):
        raise RequestError(f"{param} must be a JSON schema: properties is an object, required a list", param=param)
    if len(msgspec.json.encode(schema)) > MAX_SCHEMA_BYTES:
        raise RequestError(f"{param} is larger than {MAX_SCHEMA_BYTES} bytes", param=param)
    pending: list[tuple[Any, int]] = [(schema, 1)]
    while pending:  # not recursive: the client chooses the depth
        node, depth = pending.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise RequestError(f"{param} is nested more than {MAX_SCHEMA_DEPTH} deep", param=param)
        if isinstance(node, dict):
            for key in node:
                _check_text(key, param)
        values = node.values() if isinstance(node, dict) else node
        pending.extend((value, depth + 1) for value in values if isinstance(value, dict | list))


def _check_text(text: str, param: str) -> None:
    if _CONTROLS.search(text):
        raise RequestError(f"{param} must not hold control characters", param=param)


def _call_dict(call: CallRecord, where: str) -> dict[str, Any]:
    identity = {} if call.id is None else {"id": call.id}
    if call.custom is not None:
        name, arguments = call.custom.name, {ARGUMENT: call.custom.input}
    elif call.function is not None:
        name, arguments = call.function.name, read_arguments(call.function.arguments, f"{where}.function.arguments")
    else:
        raise RequestError(f"{where}.function is required", param=f"{where}.function")
    return {**identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _message_dict(message: ChatMessage, where: str) -> dict[str, Any]:
    unsupported = (
        ("audio", message.audio, SPEECH), ("function_call", message.function_call, TOOLS),
    )
    for name, value, reason in unsupported:
        if value:
            raise UnsupportedFeature(f"{where}.{name} is not supported: {reason}", param=f"{where}.{name}")
    if message.role == "function":
        raise UnsupportedFeature(f"{where}.role 'function' is not supported: {TOOLS}", param=f"{where}.role")
    for name, is_set, role in (
        ("tool_calls", message.tool_calls, "assistant"), ("tool_call_id", message.tool_call_id, "tool")
    ):
        if is_set and message.role != role:
            raise RequestError(f"{where}.{name} belongs to messages of the role {role!r}", param=f"{where}.{name}")
    content = message.text_or_parts
    if content is None and message.role != "assistant":
        raise RequestError(f"{where}.content is required", param=f"{where}.content")
    shown = template_content(content)
    if isinstance(shown, list) and message.role not in ROLES_WITH_MEDIA:
        raise UnsupportedFeature(
            f"{where}.content: messages of the role {message.role!r} hold text alone; put media into the user's",
            param=f"{where}.content"
        )
    calls = [_call_dict(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())]
    optional = {
        "name": message.name, "reasoning_content": message.reasoning_content or message.reasoning,
        "tool_calls": calls or None, "tool_call_id": message.tool_call_id,
    }
    role = ROLE_OF_TEMPLATE.get(message.role, message.role)
    return {"role": role, "content": shown} | {name: value for name, value in optional.items() if value is not None}


def _template_options(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Template variables besides the messages: the reasoning switches, then ``chat_template_kwargs``, which win."""
    options = request.chat_template_kwargs or {}
    check_variables(options)
    return {**_reasoning_switches(request), **options} if isinstance(request, ReasoningFields) else options


def _reasoning_switches(request: ReasoningFields) -> dict[str, Any]:
    """Template variables for reasoning: ``reasoning_effort``, and whether the model shall think, as both
    ``enable_thinking`` and ``thinking`` since templates use either name. Raises `RequestError` if the fields
    contradict each other."""
    effort = request.reasoning_effort
    switches = (
        None if effort is None else effort != "none", request.enable_thinking,
        None if request.thinking is None else request.thinking.type == "enabled",
    )
    given = {value for value in switches if value is not None}
    if len(given) > 1:
        raise RequestError(
            "reasoning_effort, enable_thinking and thinking contradict each other", param="enable_thinking"
        )
    options: dict[str, Any] = dict.fromkeys(("enable_thinking", "thinking"), given.pop()) if given else {}
    return options if effort in (None, "none") else {**options, "reasoning_effort": effort}


def render_size(request: ChatRequest | TokenizeRequest) -> int:
    """The ``size`` of rendering for `compute`: characters of the messages, as stored ones are not in the request's
    body. A template that the request brings never runs on the event loop."""
    num_chars = sum(len(message.content) for message in request.messages or () if isinstance(message.content, str))
    return max(num_chars, AT_ONCE + 1) if request.chat_template else num_chars


def render_conversation(context: AppContext, request: ChatRequest | TokenizeRequest) -> str:
    """The prompt's text; call it through `compute`. Raises `RequestError` for messages that the model's template cannot
    render."""
    refuse_generation(context.facts())
    if request.chat_template and not context.server.trust_request_chat_template:
        raise UnsupportedFeature(
            "chat_template is not supported: start the server with --trust-request-chat-template to let requests bring "
            "templates", param="chat_template"
        )
    messages = [_message_dict(m, f"messages[{i}]") for i, m in enumerate(request.messages or [])]
    options = _template_options(request)
    tools = offered_tools(request.tools, request.tool_choice if isinstance(request, ChatRequest) else None)
    is_continued = bool(request.continue_final_message)
    if is_continued and request.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    if is_continued and (messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]):
        raise RequestError(
            "continue_final_message needs the last message to be the assistant's, without tool calls",
            param="continue_final_message"
        )
    tokenizer = context.tokenizer()
    if not tokenizer.has_chat_template and not request.chat_template:
        raise RequestError(
            "this model has no chat template; use /v1/completions, or start the server with --chat-template",
            param="messages"
        )
    opens_answer = not is_continued if request.add_generation_prompt is None else request.add_generation_prompt
    formats = context.formats()
    return render_with_tools(
        tokenizer, messages, formats, tools=tools, add_generation_prompt=opens_answer,
        continue_final_message=is_continued, template=request.chat_template or None, **options,
    )


def count_prompt(context: AppContext, request: ChatRequest, items: Sequence[PreparedItem]) -> int:
    """The number of prompt tokens of a conversation with its media; call it through `compute`. Raises
    `ContextLengthExceeded` if they are certainly more than the model takes."""
    text = render_conversation(context, request)
    tokenizer = context.tokenizer()
    if items:
        return len(place_items(
            text, items, tokenizer, context.facts(), add_special_tokens=False, param="messages"
        ))
    check_length(text, tokenizer, context.facts().max_model_len, "messages")
    # In pieces: the ids of a long prompt need not exist at the same time.
    return sum(map(len, tokenizer.encode_pieces(text, add_special_tokens=False)))

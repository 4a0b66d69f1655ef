"""Tools of a request, checked: what the types cannot say of names, schemas and choices."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from headrace.base.errors import RequestError
from headrace.serving.http.protocol.tools import AllowedTools, NamedTool, Tool

MAX_SCHEMA_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 64
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def offered_tools(request: Any) -> list[dict[str, Any]]:
    """The tools that the model may call, in OpenAI's form, checked; none for ``tool_choice`` "none". Raises
    `RequestError` naming the field."""
    tools = request.tools or []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}].function"
        _check_tool(tool, where)
        if tool.function.name in names:
            raise RequestError(f"{where}.name {tool.function.name!r} is used twice", param=f"{where}.name")
        names.add(tool.function.name)
    choice = getattr(request, "tool_choice", None)
    if choice == "required" and not tools:
        raise RequestError("tool_choice 'required' needs tools", param="tool_choice")
    for name in sorted(chosen_names(choice) - names):
        raise RequestError(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    return [] if choice == "none" else [_as_dict(tool) for tool in tools]


def chosen_names(choice: Any) -> set[str]:
    """The tools that a ``tool_choice`` names; none where it leaves the choice open."""
    named = (
        choice.allowed_tools.tools if isinstance(choice, AllowedTools) else [choice] if isinstance(choice, NamedTool)
        else []
    )
    return {tool.function.name for tool in named}


def _as_dict(tool: Tool) -> dict[str, Any]:
    """The tool as templates know it: fields in the order models were trained on."""
    given = tool.function
    function = {
        "name": given.name, "description": given.description or "",
        "parameters": given.parameters or {"type": "object", "properties": {}}
    }
    return {"type": "function", "function": function if given.strict is None else {**function, "strict": given.strict}}


def _check_tool(tool: Tool, where: str) -> None:
    function = tool.function
    _check_text(function.description or "", f"{where}.description")
    schema = function.parameters
    if not schema:
        return
    param = f"{where}.parameters"
    if schema.get("type", "object") != "object":
        raise RequestError(f"{param}.type must be 'object': arguments have names", param=param)
    if not isinstance(schema.get("properties", {}), dict) or not isinstance(schema.get("required", []), list):
        raise RequestError(f"{param} must be a JSON schema: properties is an object, required a list", param=param)
    if len(msgspec.json.encode(schema)) > MAX_SCHEMA_BYTES:
        raise RequestError(f"{param} is larger than {MAX_SCHEMA_BYTES} bytes", param=param)
    pending = [(schema, 1)]
    while pending:
        node, depth = pending.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise RequestError(f"{param} is nested more than {MAX_SCHEMA_DEPTH} deep", param=param)
        if isinstance(node, dict):
            for key in node:
                _check_text(key, param)
            pending.extend((value, depth + 1) for value in node.values() if isinstance(value, dict | list))
        else:
            pending.extend((value, depth + 1) for value in node if isinstance(value, dict | list))


def _check_text(text: str, param: str) -> None:
    if _CONTROLS.search(text):
        raise RequestError(f"{param} must not hold control characters", param=param)

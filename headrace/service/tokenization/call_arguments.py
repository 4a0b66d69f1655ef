"""Earlier tool calls as chat templates want them: arguments that are an object and JSON text at once.

Some templates walk through the arguments or dump them, others append them to a string: both must work.
"""

from __future__ import annotations

import json
from typing import Any

from headrace.base.errors import RequestError


class CallArguments(dict[str, Any]):
    """Arguments of a call. As a string, and joined with strings, they are the JSON text they were given as."""

    def __init__(self, values: dict[str, Any], text: str | None = None):
        super().__init__(values)
        self._text = json.dumps(values, ensure_ascii=False) if text is None else text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def read_arguments(arguments: Any, where: str) -> CallArguments:
    """Arguments given as JSON text or as an object; raises `RequestError` naming the field."""
    if isinstance(arguments, CallArguments):
        return arguments
    if isinstance(arguments, dict):
        return CallArguments(arguments)
    try:
        values = json.loads(arguments or "{}") if isinstance(arguments, str) else None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise RequestError(
            f"{where} must be a JSON object (the model's call may have been cut short: leave it out)", param=where
        )
    return CallArguments(values, arguments or "{}")


def shape_calls(calls: Any) -> list[dict[str, Any]]:
    """The ``tool_calls`` of an assistant's message with readable arguments."""
    if not isinstance(calls, list):
        raise RequestError("tool_calls must be a list", param="messages")
    shaped = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"tool_calls[{index}] must have a function with a name", param="messages")
        arguments = read_arguments(function.get("arguments"), f"tool_calls[{index}].function.arguments")
        shaped.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return shaped

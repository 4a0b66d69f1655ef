"""A complete output as one message: `parse_output` for its text, `MessageBuilder` for events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.service.parsing.choice import Formats
from headrace.service.parsing.events import MAX_CALLS, CallArguments, CallEnd, CallStart, Event, TextDelta
from headrace.service.parsing.parser import OutputParser
from headrace.service.parsing.schemas import ToolSchemas


@dataclass
class ToolCall:
    """A tool call of the model. ``arguments`` is JSON text: an object, or the beginning of one unless
    ``is_complete``."""

    call_id: str
    name: str
    arguments: str = ""
    is_complete: bool = False


@dataclass
class ParsedMessage:
    """A model's output, parsed."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


class MessageBuilder:
    """Adds events up to a message."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._arguments: list[list[str]] = []
        self._calls: list[ToolCall] = []

    def add(self, events: Iterable[Event]) -> None:
        """Take the next events."""
        for event in events:
            match event:
                case TextDelta(text, is_reasoning):
                    (self._reasoning if is_reasoning else self._content).append(text)
                case CallStart(_, call_id, name):
                    self._calls.append(ToolCall(call_id, name))
                    self._arguments.append([])
                case CallArguments(index, text):
                    self._arguments[index].append(text)
                case CallEnd(index, is_complete):
                    self._calls[index].is_complete = is_complete

    def message(self) -> ParsedMessage:
        """The message so far."""
        for call, parts in zip(self._calls, self._arguments, strict=True):
            call.arguments = "".join(parts)
        return ParsedMessage("".join(self._content), "".join(self._reasoning), self._calls)


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> ToolSchemas:
    """The schemas of tools in OpenAI's form, ``{"type": "function", "function": {"name", "parameters"}}``."""
    functions = [tool["function"] for tool in tools]
    return ToolSchemas((f["name"], f.get("parameters")) for f in functions)


def new_parser(
    formats: Formats, *, tools: Sequence[Mapping[str, Any]] | None = None, is_open: bool = False,
    separates: bool = True,
    max_calls: int = MAX_CALLS, custom: frozenset[str] = frozenset(),
) -> OutputParser:
    """A parser for one choice. Without ``tools``, calls are not searched for and stay in the text. ``custom``: the
    names of those that are custom tools."""
    return OutputParser(
        tools=formats.tools if tools else None, reasoning=formats.reasoning, schemas=schemas_of(tools or ()),
        is_open=is_open,
        separates=separates, max_calls=max_calls, custom=custom,
    )


def parse_output(
    text: str, formats: Formats, *, tools: Sequence[Mapping[str, Any]] | None = None, is_open: bool = False,
    separates: bool = True,
) -> ParsedMessage:
    """The message in a model's complete output. Never raises for what a model wrote. ``is_open``: the prompt has begun
    the reasoning (see `Formats.begins_open`)."""
    parser, builder = new_parser(formats, tools=tools, is_open=is_open, separates=separates), MessageBuilder()
    builder.add(parser.push(text))
    builder.add(parser.finish())
    return builder.message()

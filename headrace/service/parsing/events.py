"""Events of parsed output, in order: text, reasoning, and tool calls in pieces; `CallWriter` emits those of calls."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from headrace.service.parsing.inputs import InputReader
from headrace.service.parsing.reader import Mismatch
from headrace.service.parsing.schemas import ToolSchemas


@dataclass(slots=True, frozen=True)
class TextDelta:
    """More of the answer, or of the reasoning before it."""

    text: str
    is_reasoning: bool = False


@dataclass(slots=True, frozen=True)
class CallStart:
    """A tool call begins; its arguments follow. ``index`` counts the calls of a choice from 0."""

    index: int
    call_id: str
    name: str


@dataclass(slots=True, frozen=True)
class CallArguments:
    """More of a call's arguments: the pieces of a complete call concatenate to one JSON object, or to the input of a
    custom tool."""

    index: int
    text: str


@dataclass(slots=True, frozen=True)
class CallEnd:
    """A call ended. Unless ``is_complete``, the model broke off: its arguments are the beginning of a JSON object and
    must not be acted upon."""

    index: int
    is_complete: bool


Event = TextDelta | CallStart | CallArguments | CallEnd


def merge_events(events: Iterable[Event]) -> list[Event]:
    """The same events, with adjacent pieces of one text or of one call's arguments concatenated."""
    groups: list[tuple[Event, list[str]]] = []
    for event in events:
        if isinstance(event, TextDelta | CallArguments) and groups and _goes_on(groups[-1][0], event):
            groups[-1][1].append(event.text)
        else:
            groups.append((event, [event.text] if isinstance(event, TextDelta | CallArguments) else []))
    return [replace(event, text="".join(texts)) if texts[1:] else event for event, texts in groups]  # type: ignore[arg-type]


def _goes_on(last: Event, event: Event) -> bool:
    if isinstance(event, TextDelta) and isinstance(last, TextDelta):
        return event.is_reasoning == last.is_reasoning
    return isinstance(event, CallArguments) and isinstance(last, CallArguments) and event.index == last.index


MAX_NAME = 256
NAME = re.compile(r"[\w.:/-]+")
MAX_CALLS = 1024


def new_call_id(length: int | None = None) -> str:
    """A random call id; ``length`` hexadecimal digits where a template requires ids of that length."""
    return uuid.uuid4().hex[:length] if length else f"call_{uuid.uuid4().hex[:24]}"


class CallWriter:
    """Emits the events of tool calls as their parts are found; none for calls beyond ``max_calls``. Order of calls:
    `set_name` (and perhaps `set_id`), `start`, `add` for each piece of the arguments, `end`. ``custom``: names of
    tools whose only argument is told as text."""

    def __init__(
        self, emit: Callable[[Event], None], schemas: ToolSchemas, *, id_length: int | None = None,
        max_calls: int = MAX_CALLS, custom: frozenset[str] = frozenset()
    ):
        self.schemas = schemas
        self._custom = custom
        self._input: InputReader | None = None
        self.name = ""
        self.is_open = False
        self.num_complete = 0
        self._emit = emit
        self._id_length = id_length
        self._max_calls = max_calls
        self._num_calls = 0
        self._call_id: str | None = None

    def set_name(self, name: str, call_id: str | None = None) -> None:
        """Set the name of the next call; `Mismatch` when it cannot be one."""
        if not NAME.fullmatch(name) or len(name) > MAX_NAME:
            raise Mismatch("not a name")
        self.name, self._call_id = name, call_id

    def set_id(self, call_id: str) -> None:
        """Set the id that the model gave the next call; ignored when it cannot be one."""
        if NAME.fullmatch(call_id) and len(call_id) <= MAX_NAME:
            self._call_id = call_id

    def forget(self) -> None:
        """Reset: what was set for the next call does not count."""
        self.is_open, self.name, self._call_id = False, "", None

    def start(self) -> None:
        """Begin the named call; `Mismatch` when it has no name."""
        if not self.name:
            raise Mismatch("a call without a name")
        self.is_open = True
        self._num_calls += 1
        self._input = InputReader() if self.name in self._custom else None
        if self._is_emitted:
            self._emit(CallStart(self._num_calls - 1, self._call_id or new_call_id(self._id_length), self.name))

    def add(self, text: str) -> None:
        """Emit more of the arguments."""
        self._add(text if self._input is None else self._input.push(text))

    def _add(self, text: str) -> None:
        if text and self._is_emitted:
            self._emit(CallArguments(self._num_calls - 1, text))

    def end(self, *, is_complete: bool = True) -> None:
        """End the call. ``is_complete``: its arguments are a whole JSON object."""
        if self._input is not None:
            self._add(self._input.finish(is_complete=is_complete))
        if self._is_emitted:
            self._emit(CallEnd(self._num_calls - 1, is_complete))
            self.num_complete += is_complete
        self.forget()

    @property
    def _is_emitted(self) -> bool:
        return self._num_calls <= self._max_calls

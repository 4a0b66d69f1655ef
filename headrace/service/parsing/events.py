"""What a parser tells of a model's output, in order: text, reasoning, and tool calls piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(slots=True, frozen=True)
class TextDelta:
    """More of the answer, or of the reasoning before it."""

    text: str
    is_reasoning: bool = False


@dataclass(slots=True, frozen=True)
class CallStart:
    """A tool call begins; its arguments follow. ``index`` counts from 0."""

    index: int
    call_id: str
    name: str


@dataclass(slots=True, frozen=True)
class CallArguments:
    """More of a call's arguments: all pieces of a complete call together are one JSON object."""

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
    """The same events with neighbouring pieces of one text joined."""
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

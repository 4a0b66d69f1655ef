"""`OutputParser`: parses one choice's streamed text to events. The merged events do not depend on how the text was
divided into pieces.

A state machine with two modes, ``content`` and ``reasoning``; each has markers that are searched for. White space
around calls and reasoning is layout and dropped. Text that may still become a marker is held back; text that turns out
to be no call is passed on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.service.parsing.events import MAX_CALLS, CallWriter, Event, TextDelta, merge_events
from headrace.service.parsing.format import Channels, Pattern, ReasoningFormat, ToolFormat, first_texts
from headrace.service.parsing.matching import MAX_HEADER, Matcher
from headrace.service.parsing.reader import (
    MAX_HELD,
    MAX_SPACE,
    SPACE,
    Markers,
    Mismatch,
    Reader,
    Step,
    take_run,
    text_until,
)
from headrace.service.parsing.schemas import ToolSchemas


@dataclass(frozen=True)
class Switch:
    """The marker ends this mode; ``destination`` is the next one. ``shown`` is what is passed on as text when reasoning
    is not separated: the marker itself, or nothing for channel markers."""

    destination: str
    shown: str = ""


@dataclass(frozen=True)
class Attempt:
    """The marker may begin a pattern. ``room``: most characters until it must be clear that it does."""

    pattern: Pattern
    room: int = MAX_HELD
    is_known_only: bool = False


Action = Switch | Attempt


@dataclass
class Mode:
    """What is searched for in one kind of text: the markers of ``actions`` anywhere; at its very beginning those of
    ``first_actions``, which include ``actions``, the longest first."""

    is_reasoning: bool
    actions: dict[str, Action] = field(default_factory=dict)
    first_actions: dict[str, Action] = field(default_factory=dict)
    markers: Markers = field(default_factory=lambda: Markers(()))


def build_modes(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> dict[str, Mode]:
    """The modes of a model that writes calls and reasoning in these formats (None: not searched for)."""
    content, thought = Mode(is_reasoning=False), Mode(is_reasoning=True)
    if tools is not None:
        content.actions |= _attempts(tools.patterns, tools.is_known_only)
        content.first_actions |= _attempts(tools.bare, True)
        if tools.on_lines:
            content.actions |= {"\n" + text: action for text, action in _attempts(tools.bare, True).items()}
    if reasoning is not None:
        starts = {text: Switch("reasoning", text) for text in reasoning.starts}
        content.first_actions |= starts | {text: Switch("content", text) for text in reasoning.answer_starts}
        content.actions |= {text: Switch("content", text) for text in reasoning.answer_ends}
        thought.first_actions |= starts
        thought.actions |= {text: Switch("content", text) for text in reasoning.ends}
        if tools is not None and reasoning.ends_at_calls:
            thought.actions |= _attempts(tools.patterns, tools.is_known_only)
    for channels in {f.channels: None for f in (tools, reasoning) if f is not None and f.channels is not None}:
        for mode in (content, thought):
            mode.actions |= _channel_actions(channels)
        content.first_actions |= _attempts(channels.bare, False, MAX_HEADER)
    for mode in (content, thought):
        mode.first_actions = _longest_first({**mode.actions, **mode.first_actions})
        mode.markers = Markers(mode.actions)
    return {"content": content, "reasoning": thought}


def _attempts(patterns: tuple[Pattern, ...], is_known_only: bool, room: int = MAX_HELD) -> dict[str, Action]:
    return {text: Attempt(pattern, room, is_known_only) for pattern in patterns for text in first_texts(pattern)}


def _channel_actions(channels: Channels) -> dict[str, Action]:
    return {**dict.fromkeys(channels.ends, Switch("content")), **_attempts(channels.openings, False, MAX_HEADER)}


def _longest_first(actions: dict[str, Action]) -> dict[str, Action]:
    return dict(sorted(actions.items(), key=lambda item: -len(item[0])))


class TextWriter:
    """Emits the text of one mode. Trailing white space is held back: it is dropped before a marker and passed on before
    other text. ``is_layout``: white space before the first text is dropped too."""

    def __init__(self, emit: Callable[[Event], None], *, is_reasoning: bool, is_layout: bool):
        self._emit = emit
        self._is_reasoning = is_reasoning
        self._is_layout = is_layout
        self._is_begun = False
        self._is_behind_call = False
        self._space = ""

    def add(self, text: str) -> None:
        """More text."""
        bare = text.rstrip()
        if bare:
            self._pass(self._space + bare)
            self._is_begun = True
            self._is_behind_call = False
            self._space = ""
        self._space += text[len(bare):]
        if len(self._space) > MAX_SPACE:  # a model that writes nothing else must not fill the memory
            self._pass(self._space[:-MAX_SPACE])
            self._space = self._space[-MAX_SPACE:]

    def begin_call(self) -> None:
        """A call or a message comes next: drop the white space before it, and that behind it unless text follows."""
        self._space = ""
        self._is_layout = self._is_behind_call = True

    def flush(self) -> None:
        """No more text comes."""
        if not self._is_behind_call:
            self._pass(self._space)
        self._space = ""

    def _pass(self, text: str) -> None:
        if self._is_layout and not self._is_begun:
            text = text.lstrip()
        if text:
            self._emit(TextDelta(text, self._is_reasoning))


class OutputParser:
    """Parses the output of one choice.

    ``is_open``: the prompt has begun the reasoning. ``separates``: if false, reasoning is emitted as answer text, with
    its markers, but still not searched for calls. Calls beyond ``max_calls`` are parsed but not emitted. ``custom``:
    see `CallWriter`.
    """

    def __init__(
        self, *, tools: ToolFormat | None = None, reasoning: ReasoningFormat | None = None,
        schemas: ToolSchemas | None = None,
        is_open: bool = False, separates: bool = True, max_calls: int = MAX_CALLS, custom: frozenset[str] = frozenset(),
    ):
        self._modes = build_modes(tools, reasoning)
        self._separates = separates
        self._has_tools = tools is not None
        self._reader = Reader()
        self._events: list[Event] = []
        self._calls = CallWriter(
            self._events.append, schemas or ToolSchemas(), id_length=tools.id_length if tools else None,
            max_calls=max_calls, custom=custom,
        )
        self._is_reasoning = is_open
        self._steps = self._run("reasoning" if is_open else "content")

    @property
    def num_calls(self) -> int:
        """Complete calls so far."""
        return self._calls.num_complete

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside reasoning."""
        return self._is_reasoning

    def push(self, text: str) -> list[Event]:
        """The events that have become certain with this text."""
        self._reader.push(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """No more text comes; returns the events of what was held back."""
        self._reader.end()
        return self._advance()

    def _advance(self) -> list[Event]:
        """Run the parser until it waits for text, or has ended; returns the new events."""
        next(self._steps, None)
        events = merge_events(self._events)
        self._events.clear()
        return events

    def _run(self, destination: str | None) -> Step[None]:
        # An output that begins as an answer keeps its leading white space; behind reasoning it is layout.
        is_first = True
        while destination is not None:
            mode = self._modes[destination]
            self._is_reasoning = mode.is_reasoning
            writer = TextWriter(
                self._events.append, is_reasoning=mode.is_reasoning and self._separates,
                is_layout=self._separates and not (is_first and destination == "content"),
            )
            destination = yield from self._read_mode(mode, writer)
            is_first = False

    def _read_mode(self, mode: Mode, writer: TextWriter) -> Step[str | None]:
        """Read text of one mode to its end; returns the next mode, None at the end of the output."""
        marker = yield from self._first_marker(mode, writer)
        actions = mode.first_actions
        while True:
            if marker is None:
                actions = mode.actions
                marker = yield from text_until(self._reader, mode.markers, writer.add)
            if marker is None:
                writer.flush()
                return None
            action = actions[marker]
            if isinstance(action, Switch):
                self._reader.take(len(marker))
                if not self._separates:
                    writer.add(action.shown)
                    writer.flush()
                return action.destination
            destination = yield from self._attempt(action, writer)
            if destination is not None:
                return destination
            marker = None

    def _first_marker(self, mode: Mode, writer: TextWriter) -> Step[str | None]:
        """The marker at the very beginning of a mode's text (after white space), not consumed; None if there is none.
        """
        writer.add((yield from take_run(self._reader, SPACE, MAX_SPACE)))
        for text in mode.first_actions:
            if (yield from self._reader.follows(text)):
                return text
        return None

    def _attempt(self, action: Attempt, writer: TextWriter) -> Step[str | None]:
        """Try a pattern; what was held when it fails is passed on as text. Returns the next mode, None to stay in this
        one. A complete call within reasoning ends the reasoning."""
        num_before = self._calls.num_complete
        self._calls.forget()  # a name that an earlier attempt has set
        self._reader.hold(action.room)
        matcher = Matcher(
            self._reader, self._calls, is_known_only=action.is_known_only, has_calls=self._has_tools,
            on_start=writer.begin_call,
        )
        try:
            yield from matcher.match(action.pattern)
        except Mismatch:
            if self._calls.is_open:
                self._calls.end(is_complete=False)
            # The held text includes the marker and is consumed: it is not searched for markers again.
            writer.add(self._reader.release())
            return None
        self._reader.release()
        return (
            matcher.destination or ("content" if self._is_reasoning and self._calls.num_complete > num_before else None)
        )

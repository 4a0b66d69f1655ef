"""The description of a format as data: patterns of literals and parts, which ``matching.py`` matches text against.

A pattern is a literal (a string, optionally after white space), a part, or a tuple of patterns in sequence. Matching is
predictive: one look at the next literal decides, there is no backtracking.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Name:
    """The tool's name. ``pattern``: extracts it from what the model writes there (group ``name``). ``is_id``: what the
    model writes there, in full, is the call's id."""

    pattern: re.Pattern[str] | None = None
    is_id: bool = False


@dataclass(frozen=True)
class CallId:
    """The call's id, given by the model."""


@dataclass(frozen=True)
class Call:
    """A JSON object that holds the whole call."""

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")


@dataclass(frozen=True)
class Arguments:
    """A JSON object: the arguments of the call named before."""


@dataclass(frozen=True)
class PythonCall:
    """A call in Python's notation, ``name(key=value, ...)``."""


@dataclass(frozen=True)
class Key:
    """The name of an argument."""


@dataclass(frozen=True)
class Flag:
    """``true`` or ``false``: whether the value that follows is bare text (else it is JSON)."""


@dataclass(frozen=True)
class Value:
    """The value of an argument as bare text up to ``end``, converted to JSON by the tool's schema unless a `Flag` said
    what it is. ``has_lines``: one line break on either side is layout, not part of the value."""

    end: str
    has_lines: bool = False


@dataclass(frozen=True)
class Pairs:
    """Arguments of the call named before, one ``pair`` each (with a `Key` and a `Value`), then ``end``."""

    pair: tuple[Pattern, ...]
    end: str


@dataclass(frozen=True)
class Repeat:
    """The pattern once or more, with one of the separators ``between``; an empty string means that none is needed."""

    pattern: Pattern
    between: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Maybe:
    """The pattern if it comes next."""

    pattern: Pattern


@dataclass(frozen=True)
class Either:
    """The first of the patterns that can come next; the last when none can."""

    patterns: tuple[Pattern, ...]


@dataclass(frozen=True)
class Header:
    """The header of a message in a format with channels (Harmony), up to ``end``. If ``call`` is found in it (group
    ``name``) a call's arguments follow, if ``reasoning`` is found reasoning, else answer text."""

    end: str
    call: re.Pattern[str]
    reasoning: re.Pattern[str]


Part = Name | CallId | Call | Arguments | PythonCall | Pairs | Key | Flag | Value | Repeat | Maybe | Either | Header
Pattern = str | Part | tuple["Pattern", ...]


@dataclass(frozen=True)
class Channels:
    """A format in which every message has a header. ``openings`` begin one anywhere, ``bare`` only at the beginning of
    a text (when the prompt has begun the header); ``ends`` are markers of a message's end, dropped from the text."""

    openings: tuple[Pattern, ...]
    ends: tuple[str, ...]
    bare: tuple[Pattern, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Writing:
    """Templates for writing calls: ``begin``, calls separated by ``between`` (None: only one call is possible),
    ``end``. In ``call``, ``$name``, ``$arguments`` and ``$index`` (the call's number) are slots. Without ``pair`` the
    arguments are a JSON object. Otherwise each is a ``pair`` with slots ``$key`` and ``$value``, separated by
    ``comma``. Strings are then written bare, unless ``quotes`` says that they are JSON as well; other values are JSON,
    in ``json_pair`` if that is given.

    ``token``: a special token within the text that ends a value. ``answer``: the beginning of a message without a call,
    in a format where every message has a header.
    """

    call: str
    begin: str = ""
    between: str | None = "\n"
    end: str = ""
    pair: str = ""
    json_pair: str = ""
    comma: str = ""
    quotes: bool = False
    token: str = ""
    answer: str = ""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a model writes tool calls. ``patterns`` are searched for anywhere, by their first literals. ``bare`` patterns
    have no marker of their own: they are tried at the beginning of the answer (with ``on_lines``, of each line), and
    only calls of the request's tools count. ``is_known_only``: that holds for ``patterns`` too.

    ``writing`` is needed to force calls by a grammar and to explain calling in a prompt; without it neither is
    possible. ``id_length``: length of call ids that the model's template requires. ``signs``: groups of texts; a chat
    template that contains all texts of one group uses this format. Formats of higher priority are checked first.
    """

    name: str
    patterns: tuple[Pattern, ...] = ()
    bare: tuple[Pattern, ...] = ()
    on_lines: bool = False
    is_known_only: bool = False
    writing: Writing | None = None
    id_length: int | None = None
    channels: Channels | None = None
    signs: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """How a model marks its reasoning: from one of ``starts`` (at the beginning of the output) to one of ``ends``.

    A prompt that ends with a start mark has begun the reasoning; ``is_open``: so has any prompt that does not end with
    an end mark. ``ends_at_calls``: a tool call ends the reasoning too. In a format with channels, ``writing`` is the
    text that begins and the text that ends the reasoning, and ``answer`` the text that begins the answer.
    ``answer_starts`` at the beginning of an answer and ``answer_ends`` anywhere in it are dropped.
    """

    name: str
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    is_open: bool = False
    ends_at_calls: bool = False
    writing: tuple[str, str] | None = None
    answer: str = ""
    answer_starts: tuple[str, ...] = ()
    answer_ends: tuple[str, ...] = ()
    channels: Channels | None = None
    signs: tuple[tuple[str, ...], ...] = field(default=())


def first_texts(pattern: Pattern) -> tuple[str, ...]:
    """The literals that a pattern can begin with; empty when it begins with arbitrary text, such as a name."""
    if isinstance(pattern, str):
        return (pattern,)
    if isinstance(pattern, tuple):
        return first_texts(pattern[0])
    if isinstance(pattern, Call | Arguments):
        return ("{",)
    if isinstance(pattern, Repeat):
        return first_texts(pattern.pattern)
    if isinstance(pattern, Either):
        return tuple(text for option in pattern.patterns for text in first_texts(option))
    return ()


def literals(pattern: object) -> list[str]:
    """All literals in a pattern. Special tokens among them must not be skipped when the output is detokenized."""
    if isinstance(pattern, str):
        return [pattern] if pattern else []
    if isinstance(pattern, tuple):
        return [text for part in pattern for text in literals(part)]
    if isinstance(pattern, Pairs | Value | Repeat | Maybe | Either | Header | Channels):
        return [text for part in vars(pattern).values() for text in literals(part)]
    return []


def visible_texts(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> list[str]:
    """Texts whose special tokens must be shown for the formats to be recognised."""
    found = [*literals((tools.patterns, tools.bare, tools.channels)), ] if tools else []
    if reasoning:
        found += literals((reasoning.starts, reasoning.ends, reasoning.answer_starts, reasoning.answer_ends))
        found += literals(reasoning.channels)
    return list(dict.fromkeys(found))

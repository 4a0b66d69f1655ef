"""How a format is described: patterns of literals and parts, as data. ``matching.py`` reads text by them.

A pattern is a literal (a string, before which white space may stand), a part, or a tuple of patterns in sequence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Name:
    """The tool's name. ``pattern`` takes it out of what is written there (its group ``name``); with ``is_id`` all of
    what is written there is the call's id."""

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
    """The value of an argument as bare text up to ``end``, made JSON by the tool's schema unless a `Flag` said what it
    is. ``has_lines``: one line break at either side is layout."""

    end: str
    has_lines: bool = False


@dataclass(frozen=True)
class Pairs:
    """Arguments of the call named before, one ``pair`` each (with a `Key` and a `Value`), then ``end``."""

    pair: tuple[Pattern, ...]
    end: str


@dataclass(frozen=True)
class Repeat:
    """The pattern once or more, with one of the separators ``between``; an empty one asks for none."""

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
    """What stands before a message in a format of channels, up to ``end``. One that ``call`` matches (group ``name``)
    is followed by a call's arguments, one with ``reasoning`` in it by reasoning, any other by answer text."""

    end: str
    call: re.Pattern[str]
    reasoning: re.Pattern[str]


Part = Name | CallId | Call | Arguments | PythonCall | Pairs | Key | Flag | Value | Repeat | Maybe | Either | Header
Pattern = str | Part | tuple["Pattern", ...]


@dataclass(frozen=True)
class Channels:
    """A format in which every message has a header: ``openings`` begin one, ``ends`` are dropped."""

    openings: tuple[Pattern, ...]
    ends: tuple[str, ...]
    bare: tuple[Pattern, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How calls are written out: ``begin``, calls with ``between`` them (None: there can be one only), ``end``. In
    ``call``, ``$name`` and ``$arguments`` stand for those, ``$index`` for a number. Arguments are a JSON object; or a
    ``pair`` each, with ``$key`` and ``$value``, joined by ``comma``: a value is JSON, or bare text if it is a string
    and the format does not ``quotes`` it; ``json_pair`` is for values that are not bare text.

    ``token`` is a special token within the text that ends a value. ``answer`` is what a message that calls nothing
    begins with, in a format where every message has a header.
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
    """How a model writes tool calls. ``patterns`` are looked for anywhere, by the literals they begin with. ``bare``
    patterns have no marker of their own: they are looked for where the answer begins (and with ``on_lines`` where any
    of its lines does), and count only when they call a tool of the request.

    ``writing`` is for calls that a grammar forces, and for prompts that must explain how to call; without it neither
    can be served. ``id_length`` is that of call ids that the model's template insists on. ``signs``: a chat template
    that holds all texts of one of these groups is this format's; formats registered earlier are checked first.
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
    """How a model sets its reasoning apart: from one of ``starts`` (where the answer begins) to one of ``ends``.

    A prompt that ends with a start has begun the reasoning itself; ``is_open``: so has one that ends with neither.
    ``ends_at_calls``: a tool call ends it, too. ``writing`` is how it is begun and ended where ``starts`` and ``ends``
    do not tell, ``answer`` what the answer begins with, in a format where every message has a header.
    """

    name: str
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    is_open: bool = False
    ends_at_calls: bool = False
    writing: tuple[str, str] | None = None
    answer: str = ""
    channels: Channels | None = None
    signs: tuple[tuple[str, ...], ...] = field(default=())


def first_texts(pattern: Pattern) -> tuple[str, ...]:
    """The literals that a pattern can begin with; empty when it begins with something open."""
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
    """All literals in a pattern: what must stay visible for it to be found."""
    if isinstance(pattern, str):
        return [pattern] if pattern else []
    if isinstance(pattern, tuple):
        return [text for part in pattern for text in literals(part)]
    if isinstance(pattern, Pairs | Value | Repeat | Maybe | Either | Header | Channels):
        return [text for part in vars(pattern).values() for text in literals(part)]
    return []


def visible_texts(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> list[str]:
    """Texts in which special tokens must not be left out for the formats to work."""
    found = [*literals((tools.patterns, tools.bare, tools.channels)), ] if tools else []
    found += literals((reasoning.starts, reasoning.ends, reasoning.channels)) if reasoning else []
    return list(dict.fromkeys(found))

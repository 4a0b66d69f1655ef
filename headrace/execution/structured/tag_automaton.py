"""`TagAutomaton`: a structural tag (tool calls, alone or within text) as a nondeterministic automaton whose nodes are
constants, JSON values, and free text up to a marker. `build_automaton`: the automaton of any kind of grammar.

llguidance's lexer is greedy: where one constant ends and another goes on, it keeps the longer one. This automaton does
not model that, so it gives up unless all active nodes are complete at the same byte, or none is. Refuses: regular
expressions within a tag.
"""

from __future__ import annotations

import re
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import msgspec

from headrace.base.grammar import Grammar
from headrace.execution.structured.json_automaton import JsonAutomaton, follow_string
from headrace.execution.structured.json_values import read_schema
from headrace.execution.structured.lazy_dfa import Automaton, NotReadError, Reach
from headrace.execution.structured.regex_automaton import RegexAutomaton
from headrace.execution.structured.structural_tag import modernise

MAX_NODES = 4096


@dataclass(eq=False, slots=True)
class Node:
    """``next``: the nodes that may follow. A plain `Node` is an empty transition."""

    next: list[Node]


@dataclass(eq=False, slots=True)
class Constant(Node):
    """A constant text. Its progress is the number of its bytes so far. The empty constant is the end of the output."""

    text: bytes


@dataclass(eq=False, slots=True)
class Json(Node):
    """A JSON value. Its progress is a configuration of its automaton."""

    automaton: JsonAutomaton


@dataclass(eq=False, slots=True)
class Text(Node):
    """Any text up to the first of the ``markers``, each with the nodes that follow it; without markers, to the end. Its
    progress is the longest suffix of the text that begins a marker, or an incomplete UTF-8 character."""

    markers: dict[bytes, list[Node]]


Config = frozenset[tuple[Node, Any]]
"""The active nodes, each with its progress; the type depends on the node's class."""


class TagAutomaton:
    """An `Automaton`. Raises `NotReadError` for formats that it does not support."""

    byte_classes: bytes | None = None

    def __init__(self, format_: Any, reach: Reach, special_texts: Set[str]):
        self._reach, self._special_texts, self._num_nodes = reach, special_texts, 0
        self._end = Constant([], b"")
        self.start: Config = self._enter([self._build(format_, self._end)])

    def step(self, config: Config, byte: int) -> Config | None:
        """See `Automaton`."""
        # active: nodes still within; left: nodes that follow those which this byte completes
        active, left, is_after_json = set[tuple[Node, Any]](), list[Node](), False
        for node, progress in config:
            match node:
                case Constant(text=text) if text[progress : progress + 1] == bytes([byte]):
                    is_complete, after = progress + 1 == len(text), progress + 1
                    following = node.next
                case Json(automaton=automaton):
                    after = automaton.step(progress, byte)
                    if after is None:
                        # Before its first byte the node is just not the one that the output takes; later, JSON that the
                        # automaton cannot follow makes the whole configuration unknown.
                        if progress != automaton.start:
                            return None
                        continue
                    is_complete, following = after.is_complete, node.next
                case Text(markers=markers):
                    after = _write_text(markers, progress, byte)
                    if after is None:
                        return None
                    is_complete, following = after in markers, markers.get(after, [])
                case _:
                    continue
            if is_complete:
                left += following
                is_after_json |= isinstance(node, Json)
            else:
                active.add((node, after))
        if not left:
            return frozenset(active) or None
        entered = self._enter(left)
        # llguidance lets blanks stand between two JSON values, but not before the first.
        has_blanks = is_after_json and any(isinstance(node, Json) for node, _ in entered)
        return None if active or has_blanks else entered

    def mask_key(self, config: Config) -> Config:
        """See `Automaton`."""
        return frozenset(
            (node, node.automaton.mask_key(progress) if isinstance(node, Json) else progress)
            for node, progress in config
        )

    def weigh(self, config: Config) -> int:
        """See `Automaton`."""
        return 12 * len(config)

    def _enter(self, nodes: list[Node]) -> Config:
        """The epsilon closure: the nodes with no progress, with those behind plain nodes in their place."""
        active, pending, seen = set[tuple[Node, Any]](), list(nodes), set[Node]()
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            match node:
                case Constant():
                    active.add((node, 0))
                case Json(automaton=automaton):
                    active.add((node, automaton.start))
                case Text():
                    active.add((node, b""))
                case _:
                    pending.extend(node.next)
        return frozenset(active)

    def _add(self, node: Node) -> Node:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise NotReadError
        return node

    def _build(self, format_: Any, after: Node) -> Node:
        """Build the nodes of a format, back to front: ``after`` is the node behind it. Returns the first."""
        match format_:
            case {"type": "const_string", "value": str(value)}:
                return self._add(Constant([after], value.encode())) if value else after
            case {"type": "json_schema", "json_schema": schema}:
                spec = read_schema(schema)
                if spec.number is not None:  # what ends a number may be the end
                    raise NotReadError
                return self._add(Json([after], JsonAutomaton(spec, self._reach)))
            case {"type": "any_text"}:
                return self._add(Text([], {}))
            case {"type": "sequence", "elements": elements}:
                for element in reversed(elements):
                    after = self._build(element, after)
                return after
            case {"type": "or", "elements": elements}:
                return self._add(Node([self._build(element, after) for element in elements]))
            case {"type": "optional" | "star" | "plus"}:
                return self._build_repeated(format_, after)
            case {"type": "tag"}:
                return self._build_tag(format_, after)
            case {"type": "tags_with_separator"}:
                return self._build_separated(format_, after)
            case {"type": "triggered_tags"}:
                return self._build_triggered(format_, after)
        raise NotReadError

    def _build_repeated(self, format_: Any, after: Node) -> Node:
        # ``again`` stands behind the content and offers to leave or to repeat it.
        kind, again = format_["type"], self._add(Node([after]))
        first = self._build(format_["content"], after if kind == "optional" else again)
        again.next.append(first)
        return first if kind == "plus" else again

    def _build_separated(self, format_: Any, after: Node) -> Node:
        one = {"type": "or", "elements": [{**tag, "type": "tag"} for tag in format_["tags"]]}
        more = {"type": "star", "content": _sequence(_constant(format_["separator"]), one)}
        some = one if format_.get("stop_after_first") else _sequence(one, more)
        return self._build(some if format_.get("at_least_one") else {"type": "optional", "content": some}, after)

    def _build_tag(self, tag: Any, after: Node, trigger: str = "") -> Node:
        """The nodes of a tag; ``trigger`` is the part of its ``begin`` that the text before it has consumed."""
        begin, content, end = tag["begin"][len(trigger) :], tag["content"], tag["end"]
        ends = end if isinstance(end, list) else [end]
        if content.get("type") == "any_text":
            self._check_markers(ends)
            body = self._add(Text([], {text.encode(): [after] for text in ends}))
        else:
            body = self._build(content, self._add(Node([self._build(_constant(text), after) for text in ends])))
        return self._build(_constant(begin), body)

    def _build_triggered(self, format_: Any, after: Node) -> Node:
        triggers, tags = format_["triggers"], format_["tags"]
        self._check_markers(triggers)
        rest = Text([], {})
        first = Text([], {}) if format_.get("at_least_one") else rest
        for text in (first, rest):
            self._add(text)
            for trigger in triggers:
                text.markers[trigger.encode()] = [
                    self._build_tag(tag, after if format_.get("stop_after_first") else rest, trigger)
                    for tag in tags if tag["begin"].startswith(trigger)
                ]
        return first

    def _check_markers(self, markers: list[str]) -> None:
        """Refuse markers that cannot be found by their bytes alone: empty ones, special tokens, and any that contains
        another, which would end first."""
        if not all(markers) or not self._special_texts.isdisjoint(markers):
            raise NotReadError
        if any(one in other for one, other in permutations(markers, 2)):
            raise NotReadError


def build_automaton(grammar: Grammar, reach: Reach, special_texts: Set[str]) -> Automaton | None:
    """The automaton of a grammar, None if none supports it. The grammar was compiled before, so it is valid."""
    with suppress(NotReadError, RecursionError):  # the library is asked for every bitmask, then
        match grammar.kind:
            case "json_object":
                return JsonAutomaton(read_schema({"type": "object"}), reach)
            case "json_schema":
                return JsonAutomaton(read_schema(msgspec.json.decode(grammar.text)), reach)
            case "structural_tag":
                return TagAutomaton(modernise(msgspec.json.decode(grammar.text))["format"], reach, special_texts)
            case "regex":
                return RegexAutomaton(grammar.text)
            case "choice":
                return RegexAutomaton("|".join(map(re.escape, msgspec.json.decode(grammar.text))))
    return None


def _sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _constant(text: str) -> dict[str, str]:
    return {"type": "const_string", "value": text}


def _write_text(markers: dict[bytes, list[Node]], written: bytes, byte: int) -> bytes | None:
    """The progress of a `Text` after one more byte: the longest suffix that begins a marker, or an incomplete UTF-8
    character; None for invalid UTF-8, and for non-ASCII text where a marker is not ASCII either."""
    character = written if written[:1] >= b"\x80" else b""
    if byte > 127 or character:
        if not all(marker.isascii() for marker in markers):
            return None
        return follow_string(character, byte)
    written += bytes([byte])
    while written and not any(marker.startswith(written) for marker in markers):
        written = written[1:]
    return written

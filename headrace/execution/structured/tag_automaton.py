"""`TagAutomaton`: a structural tag as a nondeterministic automaton over constants, JSON and text up to a marker: tool
calls as they are written, alone or in text. `build_automaton`: the automaton of any kind of grammar.

llguidance's lexer is greedy: where one constant ends and another goes on, it keeps the longer one. So a configuration
is known only if all of its active nodes are complete together, or none is. Refuses: regular expressions within a tag.
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
from headrace.execution.structured.json_automaton import JsonAutomaton, follow_string, read_schema
from headrace.execution.structured.lazy_dfa import Automaton, NotReadError, Reach
from headrace.execution.structured.regex_automaton import RegexAutomaton
from headrace.execution.structured.structural_tag import modernise

MAX_NODES = 4096


@dataclass(eq=False, slots=True)
class Node:
    """``next``: the nodes that may follow. One that is nothing else is left at once."""

    next: list[Node]


@dataclass(eq=False, slots=True)
class Constant(Node):
    """A node's progress is the number of its bytes that are written. An empty one is the end."""

    text: bytes


@dataclass(eq=False, slots=True)
class Json(Node):
    """A node's progress is a configuration of its automaton."""

    automaton: JsonAutomaton


@dataclass(eq=False, slots=True)
class Text(Node):
    """Any text up to one of the ``markers``, which leads to its nodes; without them, to the end. A node's progress is
    what is written of a marker, or of a character in UTF-8."""

    markers: dict[bytes, list[Node]]


Config = frozenset[tuple[Node, Any]]
"""Active nodes, each with its progress."""


class TagAutomaton:
    """An `Automaton`. Raises `NotReadError` for formats beyond the part that is read."""

    byte_classes: bytes | None = None

    def __init__(self, format_: Any, reach: Reach, special_texts: Set[str]):
        self._reach, self._special_texts, self._num_nodes = reach, special_texts, 0
        self._end = Constant([], b"")
        self.start: Config = self._enter([self._build(format_, self._end)])

    def step(self, config: Config, byte: int) -> Config | None:
        """See `Automaton`."""
        active, left, is_after_json = set[tuple[Node, Any]](), list[Node](), False
        for node, progress in config:
            match node:
                case Constant(text=text) if text[progress : progress + 1] == bytes([byte]):
                    is_complete, after = progress + 1 == len(text), progress + 1
                    following = node.next
                case Json(automaton=automaton):
                    after = automaton.step(progress, byte)
                    if after is None:
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
        """The nodes at their beginning, and those behind what is empty."""
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
        """The node that a format begins with; ``after`` it."""
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
        """``trigger``: what of its beginning is written already."""
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
        """Each must be known where it ends: none within another, none a special token."""
        if not all(markers) or not self._special_texts.isdisjoint(markers):
            raise NotReadError
        if any(one in other for one, other in permutations(markers, 2)):
            raise NotReadError


def build_automaton(grammar: Grammar, reach: Reach, special_texts: Set[str]) -> Automaton | None:
    """For grammars that are read; None for others. The grammar was compiled before."""
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
    """The longest end of the text that begins a marker, or of a character that is not whole; None for no UTF-8."""
    character = written if written[:1] >= b"\x80" else b""
    if byte > 127 or character:
        if not all(marker.isascii() for marker in markers):
            return None
        return follow_string(character, byte)
    written += bytes([byte])
    while written and not any(marker.startswith(written) for marker in markers):
        written = written[1:]
    return written

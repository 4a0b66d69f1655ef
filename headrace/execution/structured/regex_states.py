"""`RegexAutomaton`: where an output stands in a regular expression: what is allowed next depends on nothing else.

Reads a common part of the notation, and ASCII alone: where an output holds anything else, and for expressions beyond what
is read, nothing is told.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_NODES = 8192
MAX_PLACES = 256
"""Nodes that an output may be in at once: what it takes to go on grows with them."""

_COUNTS = re.compile(r"\{(\d{1,4})(,?)(\d{0,4})\}")
_ALL = (1 << 128) - 1
_CLASSES = {"d": "0123456789", "w": "0123456789_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", "s": "\t\n\v\f\r "}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r"}
_META = frozenset("\\.+*?()|[]{}^$#&-~")


class _NotReadError(Exception):
    """The expression holds something beyond the part that is read."""


@dataclass(slots=True)
class _Nodes:
    """A nondeterministic automaton over bytes: ``edges[n]`` are ``(bytes as bits, target)``, ``jumps[n]`` targets for nothing."""

    edges: list[list[tuple[int, int]]] = field(default_factory=list)
    jumps: list[list[int]] = field(default_factory=list)

    def add(self) -> int:
        if len(self.edges) >= MAX_NODES:
            raise _NotReadError
        self.edges.append([])
        self.jumps.append([])
        return len(self.edges) - 1


def _bits(text: str) -> int:
    return sum(1 << ord(character) for character in set(text) if ord(character) < 128)


class _Parser:
    """Recursive descent; every method appends to the automaton from node ``begin`` on and returns the node it ends at."""

    def __init__(self, pattern: str):
        self.pattern, self.at, self.nodes = pattern, 0, _Nodes()

    def read(self) -> tuple[_Nodes, int]:
        end = self._read_branches(self.nodes.add())
        if self.at < len(self.pattern):
            raise _NotReadError
        return self.nodes, end

    def _peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def _take(self) -> str:
        self.at += 1
        return self.pattern[self.at - 1 : self.at]

    def _read_branches(self, begin: int) -> int:
        end = self.nodes.add()
        while True:
            branch = self.nodes.add()
            self.nodes.jumps[begin].append(branch)
            while self._peek() not in ("", "|", ")"):
                branch = self._read_repeated(branch)
            self.nodes.jumps[branch].append(end)
            if self._peek() != "|":
                return end
            self.at += 1

    def _read_repeated(self, begin: int) -> int:
        start = self.at
        end = self._read_one(begin)
        after = self.at
        low, high = self._read_counts()
        if (low, high) == (1, 1):
            return end
        if self._peek() in ("?", "+", "*", "{"):
            raise _NotReadError
        resume = self.at
        # The first copy was read from ``begin``: an entry that is skipped must not be one that is come back to.
        last, exits = end, []
        if low == 0:
            exits.append(begin)
        for count in range(1, max(low, 1 if high is None else high)):
            if count >= low:
                exits.append(last)
            self.at, entry = start, self.nodes.add()
            self.nodes.jumps[last].append(entry)
            last = self._read_one(entry)
            assert self.at == after
        self.at = resume
        final = self.nodes.add()
        if high is None:
            self.at, entry = start, self.nodes.add()
            loop = self._read_one(entry)
            self.at = resume
            self.nodes.jumps[last].append(entry)
            self.nodes.jumps[loop].append(entry)
            exits.append(loop)
        for node in (*exits, last):
            self.nodes.jumps[node].append(final)
        return final

    def _read_counts(self) -> tuple[int, int | None]:
        match self._peek():
            case "*":
                self.at += 1
                return 0, None
            case "+":
                self.at += 1
                return 1, None
            case "?":
                self.at += 1
                return 0, 1
            case "{":
                found = _COUNTS.match(self.pattern, self.at)
                if found is None:
                    raise _NotReadError
                self.at = found.end()
                low = int(found[1])
                high = low if not found[2] else int(found[3]) if found[3] else None
                if high == 0 or (high is not None and high < low):
                    raise _NotReadError
                return low, high
        return 1, 1

    def _read_one(self, begin: int) -> int:
        character = self._take()
        if character == "(":
            if self._peek() == "?":
                if self.pattern[self.at : self.at + 2] != "?:":
                    raise _NotReadError
                self.at += 2
            inside = self.nodes.add()
            self.nodes.jumps[begin].append(inside)
            end = self._read_branches(inside)
            if self._take() != ")":
                raise _NotReadError
            return end
        if character == "[":
            return self._add_edge(begin, self._read_class())
        if character == ".":
            return self._add_edge(begin, _ALL & ~_bits("\n"))
        if character == "\\":
            bits, character = self._read_escape()
            if bits:
                return self._add_edge(begin, bits)
        elif character in _META and character not in "#&-~":
            raise _NotReadError
        for byte in character.encode():
            begin = self._add_edge(begin, 1 << byte)
        return begin

    def _read_escape(self) -> tuple[int, str]:
        """The bits of a class, or the character that is meant."""
        character = self._take()
        if character.lower() in _CLASSES:
            bits = _bits(_CLASSES[character.lower()])
            return (bits if character.islower() else _ALL & ~bits), ""
        if character in _CONTROLS:
            return 0, _CONTROLS[character]
        if not character or character.isalnum() or not character.isascii():
            raise _NotReadError
        return 0, character

    def _read_class(self) -> int:
        is_negated = self._peek() == "^"
        self.at += is_negated
        bits, previous = 0, ""
        is_first = True
        while (character := self._take()) != "]" or is_first:
            if character in ("", "[") or (character in "&~-" and self._peek() == character) or (is_first and character == "]"):
                raise _NotReadError
            more = 0
            if character == "\\":
                more, character = self._read_escape()
            elif character == "-" and previous and self._peek() not in ("]", ""):
                last = self._take()
                if last == "\\":
                    more, last = self._read_escape()
                if more or last in ("[", "-") or ord(last) < ord(previous):
                    raise _NotReadError
                more, character = _bits("".join(map(chr, range(ord(previous), min(ord(last), 127) + 1)))), ""
            bits |= more or _bits(character)
            previous, is_first = character, False
        return _ALL & ~bits if is_negated else bits

    def _add_edge(self, begin: int, bits: int) -> int:
        end = self.nodes.add()
        self.nodes.edges[begin].append((bits, end))
        return end


class RegexAutomaton:
    """An `Automaton`. An inside is the set of nodes that an output may be in. Bytes beyond ASCII are not told: classes were
    read as if there were nothing else, so that after anything else one would be in more places than are known here."""

    def __init__(self, nodes: _Nodes, end: int):
        self._nodes, self._end = nodes, end
        start = self._close({0})
        if start is None:
            raise _NotReadError
        self.start: frozenset[int] = start

    def advance(self, inside: frozenset[int], byte: int) -> frozenset[int] | None:
        """See `Automaton`."""
        return None if byte > 127 else self._close({target for node in inside for bits, target in self._nodes.edges[node] if bits >> byte & 1})

    def summarise(self, inside: frozenset[int]) -> frozenset[int]:
        """See `Automaton`."""
        return inside

    def weigh(self, inside: frozenset[int]) -> int:
        """See `Automaton`."""
        return 4 + len(inside)

    def may_end(self, inside: frozenset[int]) -> bool:
        """Whether the expression matches what was written."""
        return self._end in inside

    def _close(self, places: set[int]) -> frozenset[int] | None:
        """With all that is reached for nothing; None when that is nothing, or too much."""
        pending = list(places)
        while pending:
            for target in self._nodes.jumps[pending.pop()]:
                if target not in places:
                    places.add(target)
                    pending.append(target)
            if len(places) > MAX_PLACES:
                return None
        return frozenset(places) or None


def read_regex(pattern: str) -> RegexAutomaton | None:
    """The automaton of an expression; None when it is beyond the part that is read."""
    try:
        return RegexAutomaton(*_Parser(pattern).read())
    except (_NotReadError, RecursionError):
        return None

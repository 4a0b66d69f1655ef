"""`RegexStates`: where an output stands in a regular expression, by number: what is allowed next depends on nothing else.

Two outputs in one state have one mask, which need be computed only once. Reads a common part of the notation, and ASCII
alone: where an output holds anything else, and for expressions beyond what is read, no state is told.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_NODES = 8192
MAX_PLACES = 256
"""Nodes that a state may be in at once: what it takes to go on grows with them."""
MAX_PLACES_IN_ALL = 16_384
MAX_STEPS = 8192
START = 0

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


class RegexStates:
    """The states of one expression, numbered as outputs come to them; an output begins in `START`. Bounded in memory and in
    the work of a step."""

    def __init__(self, nodes: _Nodes, tokens: list[bytes]):
        self._nodes, self._tokens = nodes, tokens
        self._sets: list[frozenset[int]] = []
        self._numbers: dict[frozenset[int], int] = {}
        self._steps: dict[tuple[int, int], int | None] = {}
        self._num_places = 0
        if self._number(self._close({0})) is None:
            raise _NotReadError

    def step(self, state: int, token: int) -> int | None:
        """The state after a token; None when it is not told."""
        key = (state, token)
        if key not in self._steps:
            if len(self._steps) >= MAX_STEPS:
                self._steps.clear()
            self._steps[key] = self._number(self._follow(self._sets[state], self._tokens[token] if token < len(self._tokens) else b""))
        return self._steps[key]

    def _follow(self, places: frozenset[int], text: bytes) -> frozenset[int]:
        """Empty when the text is not of ASCII: classes were read as if there were nothing else, so that after anything else
        one would be in more places than are known here."""
        if not text or not text.isascii():
            return frozenset()
        for byte in text:
            places = self._close({target for node in places for bits, target in self._nodes.edges[node] if bits >> byte & 1})
        return places

    def _number(self, places: frozenset[int]) -> int | None:
        if places not in self._numbers:
            if not places or self._num_places + len(places) > MAX_PLACES_IN_ALL:
                return None
            self._num_places += len(places)
            self._numbers[places] = len(self._sets)
            self._sets.append(places)
        return self._numbers[places]

    def _close(self, places: set[int]) -> frozenset[int]:
        """With all that is reached for nothing; empty when that is too much."""
        pending = list(places)
        while pending:
            for target in self._nodes.jumps[pending.pop()]:
                if target not in places:
                    places.add(target)
                    pending.append(target)
            if len(places) > MAX_PLACES:
                return frozenset()
        return frozenset(places)


def read_states(pattern: str, tokens: list[bytes]) -> RegexStates | None:
    """The states of an expression over the bytes of a vocabulary; None when it is beyond the part that is read."""
    try:
        nodes, _ = _Parser(pattern).read()
        return RegexStates(nodes, tokens)
    except (_NotReadError, RecursionError):
        return None

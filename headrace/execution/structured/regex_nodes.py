"""`read_nodes`: a regular expression as a small automaton over bytes, whose counts are counted and not written out.

Reads a common part of the notation, and ASCII alone: classes are read as if there were nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import IntEnum

MAX_NODES = 8192
MAX_COUNTS = 8
"""Within one another."""

_COUNTS = re.compile(r"\{(\d{1,5})(?:(,)(\d{0,5}))?\}")
_ALL = (1 << 128) - 1
_CLASSES = {
    "d": "0123456789", "w": "0123456789_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", "s": "\t\n\v\f\r "
}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r"}
_META = frozenset("\\.+*?()|[]{}^$#&-~")


class NotReadError(Exception):
    """The expression holds something beyond the part that is read."""


@dataclass(slots=True)
class Repeat:
    """Something ``low`` to ``high`` times (None: without end). ``least``: bytes that it takes each time, at least."""

    inner: Part
    low: int
    high: int | None
    least: int = 0


Part = int | list["Part"] | tuple["Part", ...] | Repeat
"""One of some bytes, as bits; one part after another; branches; a part that is repeated."""


class Move(IntEnum):
    """What a jump does to the counts that run: nothing; begin another, at 1; add 1 to the innermost, which ends within
    its bounds; forget that one."""

    PLAIN = 0
    ENTER = 1
    AGAIN = 2
    LEAVE = 3


@dataclass(slots=True)
class Nodes:
    """A nondeterministic automaton from node 0 to ``end``: ``edges[n]`` are ``(bytes as bits, target)``, ``jumps[n]``
    ``(move, target)`` for nothing, ``counts[n]`` the counts that run at a node, the outermost first."""

    edges: list[list[tuple[int, int]]] = field(default_factory=list)
    jumps: list[list[tuple[Move, int]]] = field(default_factory=list)
    counts: list[tuple[Repeat, ...]] = field(default_factory=list)
    end: int = 0

    def add(self, counts: tuple[Repeat, ...]) -> int:
        """Another node."""
        if len(self.edges) >= MAX_NODES:
            raise NotReadError
        self.edges.append([])
        self.jumps.append([])
        self.counts.append(counts)
        return len(self.edges) - 1

    def build(self, part: Part, begin: int, counts: tuple[Repeat, ...]) -> tuple[int, int]:
        """Append a part from a node on: the node that it ends at, and the bytes that it takes at least."""
        least = 0
        if isinstance(part, int):
            end = self.add(counts)
            self.edges[begin].append((part, end))
            return end, 1
        if isinstance(part, list):
            for inner in part:
                begin, more = self.build(inner, begin, counts)
                least += more
            return begin, least
        if isinstance(part, Repeat):
            return self._build_repeat(part, begin, counts)
        end, leasts = self.add(counts), []
        for inner in part:
            branch = self.add(counts)
            self.jumps[begin].append((Move.PLAIN, branch))
            branch, least = self.build(inner, branch, counts)
            leasts.append(least)
            self.jumps[branch].append((Move.PLAIN, end))
        return end, min(leasts)

    def _build_repeat(self, part: Repeat, begin: int, counts: tuple[Repeat, ...]) -> tuple[int, int]:
        is_counted = part.low > 1 or (part.high or 0) > 1
        if is_counted and len(counts) >= MAX_COUNTS:
            raise NotReadError
        within = (*counts, part) if is_counted else counts
        entry, final = self.add(within), self.add(counts)
        last, part.least = self.build(part.inner, entry, within)
        self.jumps[begin].append((Move.ENTER if is_counted else Move.PLAIN, entry))
        self.jumps[last].append((Move.LEAVE if is_counted else Move.PLAIN, final))
        if part.high != 1:
            self.jumps[last].append((Move.AGAIN if is_counted else Move.PLAIN, entry))
        if part.low == 0:
            self.jumps[begin].append((Move.PLAIN, final))
        return final, part.low * part.least


def read_nodes(pattern: str) -> Nodes:
    """The automaton of an expression; raises `NotReadError`."""
    parser, nodes = _Parser(pattern), Nodes()
    try:
        nodes.end, _ = nodes.build(parser.read(), nodes.add(()), ())
    except RecursionError as error:
        raise NotReadError from error
    return nodes


def as_bits(text: str) -> int:
    """Its ASCII characters as bits."""
    return sum(1 << ord(character) for character in set(text) if ord(character) < 128)


class _Parser:
    """Recursive descent."""

    def __init__(self, pattern: str):
        self.pattern, self.at = pattern, 0

    def read(self) -> Part:
        whole = self._read_branches()
        if self.at < len(self.pattern):
            raise NotReadError
        return whole

    def _peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def _take(self) -> str:
        self.at += 1
        return self.pattern[self.at - 1 : self.at]

    def _read_branches(self) -> Part:
        branches: list[Part] = []
        while True:
            branch: list[Part] = []
            while self._peek() not in ("", "|", ")"):
                branch.append(self._read_repeated())
            branches.append(branch)
            if self._peek() != "|":
                return tuple(branches) if len(branches) > 1 else branch
            self.at += 1

    def _read_repeated(self) -> Part:
        part = self._read_one()
        low, high = self._read_counts()
        if (low, high) == (1, 1):
            return part
        if self._peek() in ("?", "+", "*", "{"):
            raise NotReadError
        return Repeat(part, low, high)

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
                    raise NotReadError
                self.at = found.end()
                low = int(found[1])
                high = low if not found[2] else int(found[3]) if found[3] else None
                if high == 0 or (high is not None and high < low):
                    raise NotReadError
                return low, high
        return 1, 1

    def _read_one(self) -> Part:
        character = self._take()
        if character == "(":
            if self._peek() == "?":
                if self.pattern[self.at : self.at + 2] != "?:":
                    raise NotReadError
                self.at += 2
            inside = self._read_branches()
            if self._take() != ")":
                raise NotReadError
            return inside
        if character == "[":
            return self._read_class()
        if character == ".":
            return _ALL & ~as_bits("\n")
        if character == "\\":
            bits, character = self._read_escape()
            if bits:
                return bits
        elif character in _META and character not in "#&-~":
            raise NotReadError
        return [1 << byte for byte in character.encode()]

    def _read_escape(self) -> tuple[int, str]:
        """The bits of a class, or the character that is meant."""
        character = self._take()
        if character.lower() in _CLASSES:
            bits = as_bits(_CLASSES[character.lower()])
            return (bits if character.islower() else _ALL & ~bits), ""
        if character in _CONTROLS:
            return 0, _CONTROLS[character]
        if not character or character.isalnum() or not character.isascii():
            raise NotReadError
        return 0, character

    def _read_class(self) -> int:
        is_negated = self._peek() == "^"
        self.at += is_negated
        bits, previous = 0, ""
        is_first = True
        while (character := self._take()) != "]" or is_first:
            if (
                character in ("", "[") or (character in "&~-" and self._peek() == character)
                or (is_first and character == "]")
            ):
                raise NotReadError
            more = 0
            if character == "\\":
                more, character = self._read_escape()
            elif character == "-" and previous and self._peek() not in ("]", ""):
                last = self._take()
                if last == "\\":
                    more, last = self._read_escape()
                if more or last in ("[", "-") or ord(last) < ord(previous):
                    raise NotReadError
                more, character = as_bits("".join(map(chr, range(ord(previous), min(ord(last), 127) + 1)))), ""
            bits |= more or as_bits(character)
            previous, is_first = character, False
        return _ALL & ~bits if is_negated else bits

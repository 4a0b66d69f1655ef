"""`RegexAutomaton`: a regular expression as a nondeterministic automaton with counters: Thompson's construction, but
repetitions such as ``{2,400}`` are counted instead of unrolled. A configuration is the set of its active nodes.

Supports the common syntax (no look-around, lazy quantifiers, anchors or nested classes) and ASCII only: character
classes are bit sets of 128 bits, so a byte above 127 has no configuration.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import IntEnum

from headrace.execution.structured.lazy_dfa import NotReadError

MAX_NODES = 8192
MAX_ACTIVE = 256
"""Active nodes of a configuration: the cost of a step grows with them."""
MAX_COUNTERS = 8
"""Depth of counted repetitions within each other."""

_COUNT = re.compile(r"\{(\d{1,5})(?:(,)(\d{0,5}))?\}")
_ALL = (1 << 128) - 1  # bit b stands for byte b
_CLASSES = {
    "d": "0123456789", "w": "0123456789_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", "s": "\t\n\v\f\r "
}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r"}
_META = frozenset("\\.+*?()|[]{}^$#&-~")


@dataclass(slots=True)
class Repeat:
    """Something ``low`` to ``high`` times (None: without end)."""

    inner: Part
    low: int
    high: int | None


Part = int | list["Part"] | tuple["Part", ...] | Repeat
"""The syntax tree: one byte of a bit set (int); a sequence (list); alternatives (tuple); a repetition."""


class Move(IntEnum):
    """What an empty transition does to the counters: nothing (PLAIN); push one with value 1 (ENTER); add 1 to the
    innermost if its upper bound allows (AGAIN); pop the innermost if it has reached its lower bound (LEAVE)."""

    PLAIN = 0
    ENTER = 1
    AGAIN = 2
    LEAVE = 3


@dataclass(slots=True)
class Nfa:
    """From node 0 to ``end``: ``edges[n]`` are ``(bit set of bytes, target)``, ``empty[n]`` ``(move, target)``,
    ``counters[n]`` the repetitions around node n, the outermost first."""

    edges: list[list[tuple[int, int]]] = field(default_factory=list)
    empty: list[list[tuple[Move, int]]] = field(default_factory=list)
    counters: list[tuple[Repeat, ...]] = field(default_factory=list)
    end: int = 0

    def add(self, counters: tuple[Repeat, ...]) -> int:
        """Add a node within these repetitions; returns its number."""
        if len(self.edges) >= MAX_NODES:
            raise NotReadError
        self.edges.append([])
        self.empty.append([])
        self.counters.append(counters)
        return len(self.edges) - 1

    def build(self, part: Part, begin: int, counters: tuple[Repeat, ...]) -> int:
        """Append a part's nodes to node ``begin``; returns the node that the part ends at."""
        if isinstance(part, int):
            end = self.add(counters)
            self.edges[begin].append((part, end))
            return end
        if isinstance(part, list):
            for inner in part:
                begin = self.build(inner, begin, counters)
            return begin
        if isinstance(part, Repeat):
            return self._build_repeat(part, begin, counters)
        end = self.add(counters)
        for inner in part:
            branch = self.add(counters)
            self.empty[begin].append((Move.PLAIN, branch))
            self.empty[self.build(inner, branch, counters)].append((Move.PLAIN, end))
        return end

    def _build_repeat(self, part: Repeat, begin: int, counters: tuple[Repeat, ...]) -> int:
        is_counted = part.low > 1 or (part.high or 0) > 1
        if is_counted and len(counters) >= MAX_COUNTERS:
            raise NotReadError
        # ``?``, ``*`` and ``+`` need no counter: plain edges skip the part, or lead back to its entry.
        within = (*counters, part) if is_counted else counters
        entry, final = self.add(within), self.add(counters)
        last = self.build(part.inner, entry, within)
        self.empty[begin].append((Move.ENTER if is_counted else Move.PLAIN, entry))
        self.empty[last].append((Move.LEAVE if is_counted else Move.PLAIN, final))
        if part.high != 1:
            self.empty[last].append((Move.AGAIN if is_counted else Move.PLAIN, entry))
        if part.low == 0:
            self.empty[begin].append((Move.PLAIN, final))
        return final


Counts = tuple[int, ...]
Config = frozenset[tuple[int, Counts]]
"""Active nodes, each with the values of its counters."""


class RegexAutomaton:
    """An `Automaton` of an expression that must match the whole text. Raises `NotReadError` for syntax beyond what is
    supported."""

    def __init__(self, pattern: str):
        self._nfa = nfa = Nfa()
        try:
            nfa.end = nfa.build(_Parser(pattern).read(), nfa.add(()), ())
        except RecursionError as error:
            raise NotReadError from error
        start = self._close({(0, ())})
        if start is None:
            raise NotReadError
        self.start: Config = start
        self.byte_classes: bytes | None = _find_classes({bits for edges in nfa.edges for bits, _ in edges})

    def step(self, config: Config, byte: int) -> Config | None:
        """See `Automaton`."""
        if byte > 127:
            return None
        edges = self._nfa.edges
        return self._close(
            {(target, counts) for node, counts in config for bits, target in edges[node] if bits >> byte & 1}
        )

    def mask_key(self, config: Config) -> Config:
        """See `Automaton`."""
        return config

    def weigh(self, config: Config) -> int:
        """See `Automaton`."""
        return 4 + sum(1 + len(counts) for _, counts in config)

    def _close(self, active: set[tuple[int, Counts]]) -> Config | None:
        """The epsilon closure, without nodes that have empty transitions only (they are passed, never stayed at); None
        for an empty set or more than `MAX_ACTIVE` nodes."""
        nfa, pending = self._nfa, list(active)
        while pending:
            node, counts = pending.pop()
            for move, target in nfa.empty[node]:
                after = counts if move is Move.PLAIN else _count(move, nfa.counters[node], counts)
                if after is not None and (target, after) not in active:
                    active.add((target, after))
                    pending.append((target, after))
            if len(active) > MAX_ACTIVE:
                return None
        return frozenset([item for item in active if nfa.edges[item[0]] or item[0] == nfa.end]) or None


def _count(move: Move, repeats: tuple[Repeat, ...], counts: Counts) -> Counts | None:
    """The counters after a move; None if the bounds of the innermost forbid it."""
    if move is Move.ENTER:
        return (*counts, 1)
    repeat, count = repeats[-1], counts[-1]
    if move is Move.LEAVE:
        return counts[:-1] if count >= repeat.low else None
    # Without an upper bound, values beyond ``low`` are alike: capped, or there would be endless configurations.
    if repeat.high is None:
        return (*counts[:-1], min(count + 1, repeat.low))
    return (*counts[:-1], count + 1) if count < repeat.high else None


def _find_classes(bit_sets: set[int]) -> bytes:
    """[256] equivalence classes: for each byte the least one that is in the same bit sets. Bytes above 127 are in none
    and stand for themselves."""
    first: dict[tuple[bool, ...], int] = {}
    return bytes(
        byte if byte > 127 else first.setdefault(tuple(bool(bits >> byte & 1) for bits in bit_sets), byte)
        for byte in range(256)
    )


def _as_bits(text: str) -> int:
    """The ASCII characters of a text as a bit set."""
    return sum(1 << ord(character) for character in set(text) if ord(character) < 128)


class _Parser:
    """Recursive descent. Raises `NotReadError` rather than guess what an unusual construct means."""

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
        # Two quantifiers in a row: lazy or possessive ones, or an error.
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
                found = _COUNT.match(self.pattern, self.at)
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
            return _ALL & ~_as_bits("\n")
        if character == "\\":
            bits, character = self._read_escape()
            if bits:
                return bits
        elif character in _META and character not in "#&-~":
            raise NotReadError
        return [1 << byte for byte in character.encode()]

    def _read_escape(self) -> tuple[int, str]:
        """``(bit set, "")`` of a class such as ``\\d``, or ``(0, character)`` of an escaped character."""
        character = self._take()
        if character.lower() in _CLASSES:
            bits = _as_bits(_CLASSES[character.lower()])
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
        # Nested classes, operators and a leading ``]`` mean different things in different dialects: refused.
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
                more, character = _as_bits("".join(map(chr, range(ord(previous), min(ord(last), 127) + 1)))), ""
            bits |= more or _as_bits(character)
            previous, is_first = character, False
        return _ALL & ~bits if is_negated else bits

"""`ModulePattern`: regular expressions over module names, as adapter_config.json has them, matched in polynomial time.

An adapter's author writes both the patterns and some of the names, so Python's backtracking engine, which takes
exponential time for some patterns, is used for single characters alone. Syntax: Python's, without look-behind, back
references and flags.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from headrace.base.errors import AdapterError

MAX_CHARS = 4096
MAX_DEPTH = 24
"""Groups within each other."""
MAX_NESTED_REPEATS = 3
"""Repetitions within each other: the time is the name's length to this power."""
MAX_COUNT = 1000

_COUNT = re.compile(r"\{(\d{1,4})(?:(,)(\d{0,4}))?\}")
_ESCAPE = re.compile(r"\\(?:x[0-9A-Fa-f]{2}|[dDwWsSntrfv]|[^0-9A-Za-z])")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")
_GROUP = re.compile(r"\?(?::|=|!|P<\w+>)")
_EDGES = {"^": lambda text, at: at == 0, "$": lambda text, at: at == len(text)}

_Node = Callable[[str, frozenset[int]], frozenset[int]]
"""Where a part can end in a text, of all positions where it may begin."""


class ModulePattern:
    """A pattern that is matched with whole names. Raises `AdapterError`, which names ``field``."""

    def __init__(self, pattern: str, field: str):
        if len(pattern) > MAX_CHARS:
            raise AdapterError(f"{field} has a pattern of {len(pattern)} characters, at most {MAX_CHARS} are read")
        self._node = _Parser(pattern, field).read()

    def matches(self, name: str) -> bool:
        """Whether the pattern matches the whole name."""
        return len(name) in self._node(name, frozenset((0,)))

    def matches_end(self, name: str) -> bool:
        """Whether it matches the name, or what is behind one of its dots."""
        starts = frozenset((0, *(i + 1 for i, letter in enumerate(name) if letter == ".")))
        return len(name) in self._node(name, starts)


@lru_cache(maxsize=1024)
def compile_pattern(pattern: str, field: str) -> ModulePattern:
    """The pattern, remembered."""
    return ModulePattern(pattern, field)


class _Parser:
    """Recursive descent over a pattern; ``repeats`` is how deep repetitions are in what was read last."""

    def __init__(self, pattern: str, field: str):
        self._pattern, self._field, self._at = pattern, field, 0

    def read(self) -> _Node:
        node, _ = self._read_choice(0)
        if self._at < len(self._pattern):
            raise self._refuse("it closes a group that was not opened")
        return node

    def _refuse(self, reason: str) -> AdapterError:
        return AdapterError(f"{self._field} has a pattern that is not read: {self._pattern[:200]!r}: {reason}")

    def _take(self, token: re.Pattern[str]) -> re.Match[str] | None:
        found = token.match(self._pattern, self._at)
        self._at = found.end() if found else self._at
        return found

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _read_choice(self, depth: int) -> tuple[_Node, int]:
        if depth > MAX_DEPTH:
            raise self._refuse(f"groups are nested more than {MAX_DEPTH} deep")
        choices = [self._read_sequence(depth)]
        while self._peek() == "|":
            self._at += 1
            choices.append(self._read_sequence(depth))
        nodes = [node for node, _ in choices]
        repeats = max(nested for _, nested in choices)
        if len(nodes) == 1:
            return nodes[0], repeats
        return (lambda text, starts: frozenset().union(*(node(text, starts) for node in nodes))), repeats

    def _read_sequence(self, depth: int) -> tuple[_Node, int]:
        nodes: list[_Node] = []
        repeats = 0
        while self._peek() not in ("", "|", ")"):
            node, nested = self._read_item(depth)
            node, nested = self._read_repeat(node, nested)
            nodes.append(node)
            repeats = max(repeats, nested)

        def run(text: str, starts: frozenset[int]) -> frozenset[int]:
            for node in nodes:
                starts = node(text, starts)
            return starts

        return run, repeats

    def _read_item(self, depth: int) -> tuple[_Node, int]:
        letter = self._peek()
        if letter == "(":
            return self._read_group(depth)
        if letter in _EDGES:
            self._at += 1
            holds = _EDGES[letter]
            return (lambda text, starts: frozenset(at for at in starts if holds(text, at))), 0
        if letter in "*+?":
            raise self._refuse("there is nothing to repeat")
        if self._pattern.startswith((r"\b", r"\B"), self._at):
            wants = self._pattern[self._at + 1] == "b"
            self._at += 2
            return (lambda text, starts: frozenset(at for at in starts if _is_edge(text, at) == wants)), 0
        token = self._take(_ESCAPE) or self._take(_CLASS)
        fragment = token[0] if token else letter if letter == "." else re.escape(letter)
        if token is None:
            if letter in "\\[":
                raise self._refuse(f"{self._pattern[self._at : self._at + 8]!r} is not supported")
            self._at += 1
        return _one_character(self._compile(fragment)), 0

    def _compile(self, fragment: str) -> re.Pattern[str]:
        try:
            return re.compile(fragment)
        except re.error as error:
            raise self._refuse(str(error)) from error

    def _read_group(self, depth: int) -> tuple[_Node, int]:
        self._at += 1
        kind = ""
        if self._peek() == "?":
            found = self._take(_GROUP)
            if found is None:
                raise self._refuse(f"'({self._pattern[self._at : self._at + 4]}' is not supported")
            kind = found[0]
        node, repeats = self._read_choice(depth + 1)
        if self._peek() != ")":
            raise self._refuse("a group is not closed")
        self._at += 1
        if kind not in ("?=", "?!"):
            return node, repeats
        wants = kind == "?="
        # counts as a repetition: it is tried at every position by itself
        ahead: _Node = lambda text, starts: frozenset(  # noqa: E731
            at for at in starts if bool(node(text, frozenset((at,)))) == wants
        )
        return ahead, self._deepen(repeats)

    def _read_repeat(self, node: _Node, nested: int) -> tuple[_Node, int]:
        low, high = 1, 1
        counted = self._take(_COUNT)
        letter = self._peek()
        if counted:
            low = int(counted[1])
            high = low if not counted[2] else int(counted[3]) if counted[3] else MAX_COUNT
        elif letter and letter in "*+?":
            self._at += 1
            low, high = {"*": (0, MAX_COUNT), "+": (1, MAX_COUNT), "?": (0, 1)}[letter]
        else:
            return node, nested
        if low > high or max(low, high) > MAX_COUNT:
            raise self._refuse(f"it repeats from {low} to {high} times")
        if self._peek() == "?":  # lazy: whether a name matches does not depend on it
            self._at += 1
        elif self._peek() and self._peek() in "*+":
            raise self._refuse("a repetition is repeated")
        return _repeat(node, low, high), nested if high == 1 else self._deepen(nested)

    def _deepen(self, nested: int) -> int:
        if nested >= MAX_NESTED_REPEATS:
            raise self._refuse(f"repetitions are nested more than {MAX_NESTED_REPEATS} deep")
        return nested + 1


def _one_character(fragment: re.Pattern[str]) -> _Node:
    return lambda text, starts: frozenset(
        at + 1 for at in starts if at < len(text) and fragment.fullmatch(text[at]) is not None
    )


def _repeat(node: _Node, low: int, high: int) -> _Node:
    def run(text: str, starts: frozenset[int]) -> frozenset[int]:
        count = 0
        while count < low and starts:
            starts, count = node(text, starts), count + 1
        found = new = starts
        # ends where nothing new is reached, after at most as many rounds as the name has characters
        while count < high and new:
            new = node(text, new) - found
            found, count = found | new, count + 1
        return found

    return run


def _is_edge(text: str, at: int) -> bool:
    def is_word(index: int) -> bool:
        return 0 <= index < len(text) and (text[index].isalnum() or text[index] == "_")

    return is_word(at - 1) != is_word(at)

"""`StopPatterns`: regular expressions that end an output, searched in linear time in a text that comes in parts.

Python's syntax without look-around, back references and word boundaries. A nondeterministic automaton (Thompson's
construction) is followed character by character, so that no pattern can make the search slow; Python's own engine
decides only whether one character is in a class.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from headrace.base.errors import RequestError

MAX_STATES = 1024
"""States of all patterns of a request together: the cost of a character grows with them."""
MAX_CACHED = 1024
"""Characters whose membership in a class is remembered."""
_FLAGS = re.compile(r"\(\?([ims]+)\)")
_COUNT = re.compile(r"\{(\d{0,4})(?:(,)(\d{0,4}))?\}")
_ESCAPE = re.compile(r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[dDwWsSntrfva]|[^0-9A-Za-z])", re.DOTALL)
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_Edges = list[list[int]]


class CharClass(dict[str, bool]):
    """Whether a character matches a fragment of a pattern, computed on first use."""

    def __init__(self, fragment: str, flags: int):
        super().__init__()
        self._match = re.compile(fragment, flags).fullmatch

    def __missing__(self, char: str) -> bool:
        if len(self) >= MAX_CACHED:
            self.clear()
        found = self[char] = self._match(char) is not None
        return found


class Program:
    """The automaton of some patterns. ``classes[s]`` is what state s consumes, None where it consumes nothing; then
    ``edges[s]`` are the states behind it, otherwise the one after the character. ``accepts[s]``: the pattern that ends
    in s. ``line_starts``: states passed only at the begin of the text, or of a line where the value is True."""

    def __init__(self, patterns: Sequence[str]):
        self.classes: list[CharClass | None] = []
        self.edges: _Edges = []
        self.accepts: dict[int, str] = {}
        self.line_starts: dict[int, bool] = {}
        self._closures: dict[tuple[int, str], tuple[int, ...]] = {}
        self.start = self.add()
        for pattern in patterns:
            _Parser(pattern, self).read()
        if any(state in self.accepts for state in self.close(self.start, "")):
            raise _refuse(patterns[0] if len(patterns) == 1 else "one of them", "it matches the empty text")

    def add(self, consumed: CharClass | None = None) -> int:
        """A new state."""
        if len(self.classes) >= MAX_STATES:
            raise RequestError(f"stop_regex: the patterns need more than {MAX_STATES} states", param="stop_regex")
        self.classes.append(consumed)
        self.edges.append([])
        return len(self.classes) - 1

    def close(self, state: int, before: str) -> tuple[int, ...]:
        """States that consume or accept, reached from ``state`` without consuming. ``before``: "" at the begin of the
        text, "\\n" behind a line break, else any other character, of which only one is passed."""
        known = self._closures.get((state, before))
        if known is not None:
            return known
        found, seen, pending = [], {state}, [state]
        while pending:
            at = pending.pop()
            if self.classes[at] is not None or at in self.accepts:
                found.append(at)
                continue
            if at in self.line_starts and before and not (self.line_starts[at] and before == "\n"):
                continue
            fresh = [target for target in self.edges[at] if target not in seen]
            seen.update(fresh)
            pending += reversed(fresh)
        closed = self._closures[state, before] = tuple(found)
        return closed


@lru_cache(maxsize=64)
def compile_stops(patterns: tuple[str, ...]) -> Program:
    """The automaton of the patterns of a request. Raises `RequestError`, with the reason."""
    return Program(patterns)


class StopPatterns:
    """Searches for the patterns; see `headrace.service.tokenization.detokenizer.StopScanner`, which does the same for
    strings. The match that ends first wins (of two that end together, the longer), so quantifiers are never greedy."""

    def __init__(self, program: Program):
        self._program = program
        self._threads: list[tuple[int, int]] = []  # (state, where the match began), the earliest first
        self._before = ""
        self.tail = ""

    def scan(self, text: str) -> tuple[str, int, int] | None:
        """Take the next part. Returns ``(pattern, start, end)`` of the first match, as offsets into the old ``tail``
        plus ``text``, or None; ``tail``, from where a match may have begun, is then the new one."""
        window, offset = self.tail + text, len(self.tail)
        for place, char in enumerate(text, offset):
            found = self._step(char, place)
            if found is not None:
                return found[0], found[1], place + 1
        begin = self._threads[0][1] if self._threads else len(window)
        self.tail = window[begin:]
        self._threads = [(state, start - begin) for state, start in self._threads]
        return None

    def _step(self, char: str, place: int) -> tuple[str, int] | None:
        """Follow one character; the pattern that ends with it, and where it began."""
        program = self._program
        classes, edges = program.classes, program.edges
        before = char if char == "\n" else "x"
        entries = [(state, place) for state in program.close(program.start, self._before)]
        after: dict[int, int] = {}
        for state, start in (*self._threads, *entries):
            consumed = classes[state]
            if consumed is not None and consumed[char]:
                for target in program.close(edges[state][0], before):
                    if target in program.accepts:
                        return program.accepts[target], start
                    after.setdefault(target, start)  # matches that began earlier come first
        self._threads, self._before = list(after.items()), before
        return None


def _refuse(pattern: str, reason: str) -> RequestError:
    return RequestError(f"stop_regex: {pattern[:80]!r} cannot be searched: {reason}", param="stop_regex")


class _Parser:
    """Recursive descent over one pattern; adds its states to a program. A method takes the state that its part begins
    at and returns the one it ends at."""

    def __init__(self, pattern: str, program: Program):
        self._pattern, self._program, self._at = pattern, program, 0
        found = _FLAGS.match(pattern)
        letters = found[1] if found else ""
        self._at = found.end() if found else 0
        self._flags = re.IGNORECASE * ("i" in letters) | re.DOTALL * ("s" in letters)
        self._is_multiline = "m" in letters

    def read(self) -> None:
        """The whole pattern."""
        try:
            end = self._branches(self._program.start)
        except RecursionError:
            raise _refuse(self._pattern, "it is nested too deeply") from None
        if self._at < len(self._pattern):
            raise _refuse(self._pattern, "a parenthesis is not open")
        final = self._program.add()
        self._program.edges[end].append(final)
        self._program.accepts[final] = self._pattern

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _branches(self, begin: int) -> int:
        program, end = self._program, self._program.add()
        while True:
            at = program.add()
            program.edges[begin].append(at)
            while self._peek() not in ("", "|", ")"):
                at = self._repeated(at)
            program.edges[at].append(end)
            if self._peek() != "|":
                return end
            self._at += 1

    def _repeated(self, begin: int) -> int:
        """One part with its quantifier. It is read again for every repetition, from the same place."""
        source, program = self._at, self._program
        entry = program.add()
        program.edges[begin].append(entry)
        at = self._part(entry)
        low, high = self._counts()
        if (low, high) == (1, 1):
            return at
        rest, end = self._at, program.add()
        if low == 0:
            program.edges[begin].append(end)
        for number in range(2, max(low, high or 0) + 1):
            if number > low:
                program.edges[at].append(end)
            self._at, previous = source, at
            entry = program.add()
            program.edges[previous].append(entry)
            at = self._part(entry)
        if high is None:
            program.edges[at].append(entry)
        program.edges[at].append(end)
        self._at = rest
        return end

    def _counts(self) -> tuple[int, int | None]:
        low: int
        high: int | None
        found = _COUNT.match(self._pattern, self._at)
        if self._peek() in ("*", "+", "?"):
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[self._peek()]
            self._at += 1
        elif found is not None and found[0] not in ("{}", "{,}"):
            self._at = found.end()
            low = int(found[1] or 0)
            high = low if not found[2] else int(found[3]) if found[3] else None
            if high is not None and (high < low or high == 0):
                raise _refuse(self._pattern, f"{found[0]} repeats nothing")
        else:
            return 1, 1
        if self._peek() == "?":
            self._at += 1  # lazy or greedy: the first end counts
        if self._peek() in ("*", "+", "?"):
            raise _refuse(self._pattern, "a quantifier follows another")
        return low, high

    def _part(self, begin: int) -> int:
        char = self._peek()
        if char == "(":
            return self._group(begin)
        if char in ("^", "$") or self._pattern[self._at : self._at + 2] in ("\\A", "\\Z"):
            return self._anchor(begin)
        found = {"[": _CLASS, "\\": _ESCAPE}[char].match(self._pattern, self._at) if char in "[\\" else None
        if char in ("*", "+", "?") or (char in "[\\" and found is None):
            reason = {"[": "a class is not closed", "\\": "this escape is not supported (a back reference, or \\b)"}
            raise _refuse(self._pattern, reason.get(char, "a quantifier repeats nothing"))
        fragment = found[0] if found is not None else char if char == "." else re.escape(char)
        self._at += len(found[0]) if found is not None else 1
        try:
            consumed = CharClass(fragment, self._flags)
        except re.error as error:
            raise _refuse(self._pattern, str(error)) from None
        state, end = self._program.add(consumed), self._program.add()
        self._program.edges[begin].append(state)
        self._program.edges[state].append(end)
        return end

    def _group(self, begin: int) -> int:
        self._at += 1
        if self._peek() == "?":
            name = re.compile(r"\?(?::|P<\w+>)").match(self._pattern, self._at)
            if name is None:
                raise _refuse(self._pattern, "look-around and flags inside of it are not supported")
            self._at = name.end()
        end = self._branches(begin)
        if self._peek() != ")":
            raise _refuse(self._pattern, "a parenthesis is not closed")
        self._at += 1
        return end

    def _anchor(self, begin: int) -> int:
        program, is_end = self._program, self._peek() == "$" or self._pattern.startswith("\\Z", self._at)
        is_line = self._peek() == "^" and self._is_multiline
        self._at += 1 if self._peek() in ("^", "$") else 2
        if is_end:
            # The end of the text so far: true where the match ends, which only its last part can be.
            if self._pattern[self._at :].strip(")"):
                raise _refuse(self._pattern, "the end of the text ($) comes before the end of the pattern")
            return begin
        state, end = program.add(), program.add()
        program.edges[begin].append(state)
        program.edges[state].append(end)
        program.line_starts[state] = is_line
        return end

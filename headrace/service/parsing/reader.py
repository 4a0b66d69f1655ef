"""`Reader`: a buffer of streamed text for incremental parsers, written as generators that ``yield`` to wait for more.

Decisions depend on the whole text alone, never on how it was divided into pieces: a primitive that would have to look
beyond the buffer waits. Consumed text is dropped unless it is held, so that a failed attempt can give it back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Step = Generator[None, None, T]
"""A parser coroutine: yields to wait for text, returns what it read. Composed with ``yield from``."""

Out = Callable[[str], None]

MAX_HELD = 1 << 20
"""Most characters held during one attempt; a longer one is a `Mismatch`, so that memory is bounded."""
MAX_SPACE = 1024
SPACE = re.compile(r"\s+")


class Mismatch(Exception):
    """The text does not fit the format. Ends an attempt; never leaves the parser."""


class Markers:
    """A set of literals to search for, in one regular expression: longer ones are tried first at each position."""

    def __init__(self, texts: Iterable[str]):
        self.texts = tuple(dict.fromkeys(texts))
        self._search = (
            re.compile("|".join(map(re.escape, sorted(self.texts, key=len, reverse=True)))).search if self.texts
            else None
        )
        self._beginnings = frozenset(text[:n] for text in self.texts for n in range(1, len(text)))
        self._firsts = frozenset(text[0] for text in self.texts)
        self._reach = max(map(len, self.texts), default=1) - 1

    def find(self, text: str, start: int, end: int, *, is_final: bool = False) -> tuple[str | None, int]:
        """Search ``text[start:end]``. Returns ``(marker, position)`` of the leftmost marker (of several there, the
        longest), or ``(None, position)``: no marker begins before position, but one may begin there and be completed
        by later text. ``is_final``: no text follows ``end``."""
        if self._search is None:
            return None, end
        found = self._search(text, start, end)
        # Only the last ``_reach`` characters can begin a marker that ``end`` cuts off.
        limit = end if found is None else found.start() + 1  # a longer marker may begin up to where the found one does
        for at in range(end if is_final else max(start, end - self._reach), limit):
            if text[at] in self._firsts and text[at:end] in self._beginnings:
                return None, at
        return (None, end) if found is None else (found[0], found.start())


class Reader:
    """Buffer of one text. `push` appends, `end` marks the end of the text; generators consume in between. One hold at a
    time: a second `hold` drops what the first has kept."""

    def __init__(self) -> None:
        self._buffer = ""
        self._at = 0  # how much of the buffer is consumed
        self._is_ended = False
        self._held: list[str] | None = None  # text consumed since `hold`; None: not held
        self._room = 0  # characters that may still be consumed while held

    @property
    def is_exhausted(self) -> bool:
        """Whether all text there is has been consumed."""
        return self._at == len(self._buffer)

    def push(self, text: str) -> None:
        """Add text at the end."""
        self._buffer = self._buffer[self._at:] + text
        self._at = 0

    def end(self) -> None:
        """No more text comes."""
        self._is_ended = True

    def hold(self, room: int = MAX_HELD) -> None:
        """Keep what is consumed from here on. Reading on past ``room`` characters is a `Mismatch`."""
        self._held, self._room = [], room

    def extend_hold(self, room: int) -> None:
        """Give what is being held more room."""
        self._room += room

    def release(self) -> str:
        """End the hold; returns the text that was consumed during it."""
        held, self._held = self._held or [], None
        return "".join(held)

    def more(self) -> Step[bool]:
        """Wait for more text; False when there is none to come."""
        if self._held is not None and len(self._buffer) - self._at >= self._room:  # more would not be visible
            raise Mismatch("too long")
        if self._is_ended:
            return False
        yield
        return True

    def take(self, count: int) -> str:
        """Consume that many characters of what is there."""
        text = self._buffer[self._at:self._at + count]
        self._at += count
        if self._held is not None:
            self._held.append(text)
            self._room -= count
        return text

    def peek(self) -> Step[str]:
        """The next character; empty at the end."""
        while self._at >= self._end():
            if not (yield from self.more()):
                return ""
        return self._buffer[self._at]

    def ahead(self, count: int) -> Step[str]:
        """The next characters without consuming them; fewer at the end."""
        while self._end() - self._at < count:
            if not (yield from self.more()):
                break
        return self._buffer[self._at:min(self._at + count, self._end())]

    def follows(self, text: str) -> Step[bool]:
        """Whether the text comes next."""
        while True:
            there = self._buffer[self._at:min(self._at + len(text), self._end())]
            if there == text:
                return True
            if not text.startswith(there) or not (yield from self.more()):
                return False

    def skip(self, text: str) -> Step[bool]:
        """Consume the text if it comes next."""
        found = yield from self.follows(text)
        if found:
            self.take(len(text))
        return found

    def expect(self, text: str) -> Step[None]:
        """Consume the text; `Mismatch` when something else comes. If the whole text ends within a literal that is
        expected (a closing tag cut off by ``max_tokens``) and nothing is held, the part is consumed: it is no answer.
        """
        if not (yield from self.skip(text)):
            rest = len(self._buffer) - self._at
            if self._is_ended and self._held is None and text.startswith(self._buffer[self._at:]):
                self.take(rest)
            raise Mismatch(f"expected {text!r}")

    @property
    def visible(self) -> tuple[str, int, int]:
        """``(text, start, end)``: what can be seen now is ``text[start:end]``."""
        return self._buffer, self._at, self._end()

    def _end(self) -> int:
        """Where the visible text ends. Text beyond the room of a hold is hidden even if it has arrived, so that the
        result does not depend on the size of the pieces."""
        return len(self._buffer) if self._held is None else min(len(self._buffer), self._at + self._room)


def take_run(reader: Reader, characters: re.Pattern[str], limit: int) -> Step[str]:
    """Consume characters of a class (a pattern of the form ``[...]+``), at most ``limit``."""
    parts, count = [], 0
    while count < limit:
        text, start, end = reader.visible
        found = characters.match(text, start, min(end, start + limit - count))
        if found is not None:
            parts.append(reader.take(found.end() - start))
            count += len(parts[-1])
        is_over = count == limit or start + (len(parts[-1]) if found else 0) < end
        if is_over or not (yield from reader.more()):
            break
    return "".join(parts)


def see_run(reader: Reader, characters: re.Pattern[str], limit: int) -> Step[str]:
    """As `take_run`, without consuming."""
    while True:
        text, start, end = reader.visible
        found = characters.match(text, start, min(end, start + limit))
        stop = start if found is None else found.end()
        if stop < end or stop - start == limit or not (yield from reader.more()):
            return text[start:stop]


def take_now(reader: Reader, characters: re.Pattern[str]) -> str:
    """Consume characters of a class as far as they are there, waiting for none."""
    text, start, end = reader.visible
    found = characters.match(text, start, end)
    return reader.take(found.end() - start) if found is not None else ""


def text_until(reader: Reader, markers: Markers, out: Out) -> Step[str | None]:
    """Consume text up to the next marker, passing it to ``out`` as it comes; the marker, or None at the end."""
    is_final = False
    while True:
        text, start, end = reader.visible
        marker, stop = markers.find(text, start, end, is_final=is_final)
        if stop > start:
            out(reader.take(stop - start))
        if marker is not None or is_final:
            return marker
        is_final = not (yield from reader.more())


def read_whole(read: Callable[[Reader, Out], Step[None]], text: str) -> str | None:
    """Run a parser on a complete text; returns its output, or None when it does not fit or leaves text over."""
    reader = Reader()
    parts: list[str] = []
    reader.push(text)
    reader.end()
    try:
        for _ in read(reader, parts.append):
            raise AssertionError("a complete text needs no waiting")
    except Mismatch:
        return None
    return "".join(parts) if reader.is_exhausted else None

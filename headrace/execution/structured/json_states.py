"""`JsonAutomaton`: where an output stands in the JSON of a schema: what it is within, how much of that there is, and
what is written of a name, a number or a string that is not done.

What is done is forgotten but for the names in an object and the number of items in an array: schemas in which more of
it matters are not read (``json_values.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from headrace.execution.structured.json_values import Listing, Number, Place, Record, Text
from headrace.execution.structured.reach import Reach

Within = tuple[Any, ...] | None
"""None around the whole, else ``(what that is within, record, names)`` or ``(what that is within, listing, number of
items)``."""

Inside = tuple[Within, str, Any]
"""Within what, the phase, and what the phase has to remember."""

MAX_DEPTH = 64
MAX_WRITTEN = 512
MAX_BLANKS = 48
OTHER = "*"
"""Stands among the names of an object for those that the schema does not name. No schema's name: those have quotes
around."""

_BLANKS = b" \n\r\t"
_ENDS = b"]}"
_WORDS = (b"true", b"false", b"null")



def count_blanks(blanks: bytes, byte: int) -> bytes:
    """What matters of blanks between values, and of one more, where there may be so many of any."""
    return blanks + b" "


def count_indentation(blanks: bytes, byte: int) -> bytes:
    """The same where there may be a space, or a line break and so many more."""
    return b"\n" if byte == ord("\n") else blanks + (b" " if blanks[:1] == b"\n" else bytes([byte]))


class JsonAutomaton:
    """An `Automaton`. ``count``: `count_blanks` or `count_indentation`."""

    classes = None

    def __init__(self, place: Place, reach: Reach, count: Callable[[bytes, int], bytes]):
        self.start: Inside = (None, "value", (place, b""))
        self._num_items, self._longest, self._count_blanks = reach.items, reach.longest, count
        self._phases: dict[str, Callable[[Within, Any, int], Inside | None]] = {
            "value": self._begin_value, "first": self._go_first, "next": self._go_next, "name?": self._begin_name,
            "name": self._write_name,
            "colon": self._go_colon, "text": self._write_text, "number": self._write_number, "word": self._write_word,
        }

    def advance(self, inside: Inside, byte: int) -> Inside | None:
        """See `Automaton`."""
        within, phase, written = inside
        return self._phases[phase](within, written, byte)

    def summarise(self, inside: Inside) -> Inside:
        """See `Automaton`. Numbers of items or characters mean nothing while no token reaches one that is a bound."""
        within, phase, written = inside
        if phase == "text" and written[0].limits is not None:
            text, so_far, tail = written
            written = text, self._round_text(text, *so_far), tail
        return self._round(within), phase, written

    def _round_text(self, text: Text, inside: Any, length: int) -> tuple[Any, int | str]:
        """Where both a pattern and lengths bind a string, what one needs may be more than the other leaves, however far
        away."""
        least, most = text.limits or (0, 0)
        if text.pattern is not None:
            return (inside, length) if least or most else (text.pattern.summarise(inside), length)
        furthest = length + self._longest
        if furthest < least:
            return inside, "before"
        return inside, "past" if length >= least and (not most or furthest < most) else length

    def weigh(self, inside: Inside) -> int:
        """See `Automaton`."""
        return 12

    def _round(self, within: Within) -> Within:
        if within is None:
            return None
        outer, what, done = within
        if isinstance(what, Listing) and not any(done < bound <= done + self._num_items for bound in what.bounds):
            done = "about", sum(bound <= done for bound in what.bounds)
        return self._round(outer), what, done

    def _begin_value(self, within: Within, written: tuple[Place, bytes], byte: int) -> Inside | None:
        place, blanks = written
        if byte in _BLANKS:
            return self._add_blank(within, "value", blanks, byte, place)
        character = chr(byte)
        if character == "{" and place.record is not None:
            return self._enter(within, place.record, ())
        if character == "[" and place.listing is not None:
            return self._enter(within, place.listing, 0)
        if character == '"' and place.text is not None:
            text = place.text
            return (
                within, "text",
                (text, b"" if text.limits is None else (None if text.pattern is None else text.pattern.start, 0), b"")
            )
        if character in "-0123456789" and place.number is not None:
            return within, "number", (place.number, _add_digit(place.number, b"", byte))
        return (within, "word", bytes([byte])) if character in "tfn" and place.has_words else None

    def _enter(self, within: Within, what: Record | Listing, done: Any) -> Inside | None:
        depth, outer = 0, within
        while outer is not None:
            depth, outer = depth + 1, outer[0]
        return ((within, what, done), "first", b"") if depth < MAX_DEPTH else None

    def _go_first(self, within: Within, blanks: bytes, byte: int) -> Inside | None:
        assert within is not None
        if byte in _BLANKS:
            return self._add_blank(within, "first", blanks, byte)
        if byte in _ENDS:
            return self._leave(within, byte)
        if isinstance(within[1], Record):
            return self._begin_name(within, b"", byte)
        return self._begin_value(within, (within[1].items, b""), byte)

    def _go_next(self, within: Within, blanks: bytes, byte: int) -> Inside | None:
        if byte in _BLANKS:
            return self._add_blank(within, "next", blanks, byte)
        if within is None:
            return None
        if byte in _ENDS:
            return self._leave(within, byte)
        if byte != ord(","):
            return None
        return (within, "name?", b"") if isinstance(within[1], Record) else (within, "value", (within[1].items, b""))

    def _leave(self, within: tuple[Any, ...], byte: int) -> Inside | None:
        return self._finish(within[0]) if (byte == ord("}")) == isinstance(within[1], Record) else None

    def _finish(self, within: Within) -> Inside:
        """A value is done."""
        if within is not None and isinstance(within[1], Listing):
            outer, what, count = within
            within = outer, what, min(count + 1, max(what.bounds, default=0) + 1)
        return within, "next", b""

    def _add_blank(
        self, within: Within, phase: str, blanks: bytes, byte: int, place: Place | None = None
    ) -> Inside | None:
        if len(blanks) >= MAX_BLANKS:
            return None
        more = self._count_blanks(blanks, byte)
        return within, phase, more if place is None else (place, more)

    def _begin_name(self, within: Within, blanks: bytes, byte: int) -> Inside | None:
        if byte in _BLANKS:
            return self._add_blank(within, "name?", blanks, byte)
        return (within, "name", (b"", b"")) if byte == ord('"') else None

    def _write_name(self, within: Within, written: tuple[bytes | None, bytes], byte: int) -> Inside | None:
        """What is written of a name is forgotten once it is none that the schema knows, however that is spelled."""
        assert within is not None
        name, tail = written
        record: Record = within[1]
        if _is_end(tail, byte):
            return self._end_name(within, name)
        after = follow_text(tail, byte)
        if after is None or (name is not None and len(name) > MAX_WRITTEN):
            return None
        if name is not None:
            name += bytes([byte])
            if b"\\" not in name and not any(known.encode().startswith(name) for known in record.named):
                name = None
        return within, "name", (name, after)

    def _end_name(self, within: tuple[Any, ...], written: bytes | None) -> Inside | None:
        outer, record, names = within
        name = None
        if written is not None:
            try:
                name = json.loads(b'"' + written + b'"')
            except ValueError:
                return None
        place = record.named.get(name, record.others)
        known = json.dumps(name) if name in record.named else OTHER
        if place is None:
            return None
        return (outer, record, names if known == OTHER and OTHER in names else (*names, known)), "colon", (place, b"")

    def _go_colon(self, within: Within, written: tuple[Place, bytes], byte: int) -> Inside | None:
        place, blanks = written
        if byte in _BLANKS:
            return self._add_blank(within, "colon", blanks, byte, place)
        return (within, "value", (place, b"")) if byte == ord(":") else None

    def _write_text(self, within: Within, written: tuple[Text, Any, bytes], byte: int) -> Inside | None:
        text, so_far, tail = written
        if _is_end(tail, byte):
            return self._finish(within)
        after = follow_text(tail, byte)
        if after is None:
            return None
        if not text.is_free:
            so_far = (
                _add_written(so_far, byte) if text.limits is None else _count(text, so_far, byte, is_whole=not after)
            )
            if so_far is None:
                return None
        return within, "text", (text, so_far, after)

    def _write_number(self, within: Within, written: tuple[Number, bytes], byte: int) -> Inside | None:
        number, so_far = written
        if byte in b"0123456789.eE+-":
            more = _add_digit(number, so_far, byte)
            return (within, "number", (number, more)) if len(more) <= MAX_WRITTEN else None
        return self._go_next(*self._finish(within)[::2], byte)

    def _write_word(self, within: Within, written: bytes, byte: int) -> Inside | None:
        written += bytes([byte])
        if written in _WORDS:
            return self._finish(within)
        return (within, "word", written) if any(word.startswith(written) for word in _WORDS) else None


def _add_written(written: bytes, byte: int) -> bytes | None:
    return written + bytes([byte]) if len(written) < MAX_WRITTEN else None


def _add_digit(number: Number, written: bytes, byte: int) -> bytes:
    """What is written of a number; of one without bounds, digits after the first of its parts are as good as none."""
    character = bytes([byte])
    if number.is_free and character.isdigit():
        if written in (b"", b"-"):
            character = b"0" if character == b"0" else b"1"
        elif written[-1:].isdigit() and written not in (b"0", b"-0"):
            return written
        else:
            character = b"1"
    return written + character


def _count(text: Text, so_far: tuple[Any, int], byte: int, *, is_whole: bool) -> tuple[Any, int] | None:
    """One more byte of a string that is told by its length and its place in a pattern; None for what is not counted
    here."""
    inside, length = so_far
    assert text.limits is not None
    if byte == ord("\\") or (text.pattern is not None and byte > 127):
        return None
    if text.pattern is not None:
        inside = text.pattern.advance(inside, byte)
        if inside is None:
            return None
    return inside, min(length + is_whole, max(text.limits) + 1) if any(text.limits) else 0


def _is_end(tail: bytes, byte: int) -> bool:
    """Whether a byte ends a string."""
    return byte == ord('"') and len(tail) in (0, 6) and tail[:1] in (b"", b"\\")


def follow_text(tail: bytes, byte: int) -> bytes | None:
    """What matters of the end of a string's text: a character or an escape that is not done, and the escape before it,
    which may be half of a character."""
    before, part = (tail[:6], tail[6:]) if tail[:2] == b"\\u" and len(tail) >= 6 else (b"", tail)
    character = bytes([byte])
    if part[:1] == b"\\":
        return _escape(before, part, character)
    if part:  # the rest of a character
        needed = 2 if part[0] < 0xE0 else 3 if part[0] < 0xF0 else 4
        if byte & 0xC0 != 0x80:
            return None
        return b"" if len(part) + 1 == needed else part + character
    if byte < 0x20 or 0x80 <= byte < 0xC2 or byte > 0xF4:
        return None
    return before + character if character == b"\\" else character if byte >= 0x80 else b""


def _escape(before: bytes, part: bytes, character: bytes) -> bytes | None:
    if part == b"\\":
        return before + part + character if character == b"u" else b"" if character in b'"\\/bfnrt' else None
    if character not in b"0123456789abcdefABCDEF":
        return None
    part += character
    return part if len(part) == 6 else before + part

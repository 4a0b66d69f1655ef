"""`JsonAutomaton`: JSON of a schema as a pushdown automaton. A configuration is the stack of open objects and arrays,
each with the names or the number of items so far, and the text of a name, number or string that is not complete.

Values that are complete are forgotten, but for the names in an object and the number of items in an array. Schemas
in which more of them matters are not supported: `read_schema` is conservative, as merged states would share bitmasks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from headrace.execution.structured.json_values import ArraySpec, NumberSpec, ObjectSpec, StringSpec, ValueSpec
from headrace.execution.structured.lazy_dfa import Reach

MAX_DEPTH = 64  # of open objects and arrays
MAX_WRITTEN = 512  # bytes of an incomplete name, number or string
MAX_BLANKS = 48
OTHER = "*"
"""Stands for all names that a schema does not list. No listed name equals it, as those are kept with their quotes."""

_BLANKS = b" \n\r\t"
_ENDS = b"]}"
_LITERALS = (b"true", b"false", b"null")


class Level(NamedTuple):
    """An open object or array, linked to the one around it: ``done`` is a tuple of an object's names so far, or the
    number of an array's items."""

    outer: Level | None
    spec: ObjectSpec | ArraySpec
    done: Any


class JsonConfig(NamedTuple):
    """A configuration: the innermost open level, the phase (a key of `JsonAutomaton._phases`), and the phase's data."""

    level: Level | None
    phase: str
    written: Any

    @property
    def is_complete(self) -> bool:
        """Whether the outermost value is complete."""
        return self.level is None and self.phase == "next"


class JsonAutomaton:
    """An `Automaton`, of JSON as llguidance is told to write it: between values a space, or a line break and its
    indentation; in strings no ``\\u`` escapes."""

    byte_classes: bytes | None = None

    def __init__(self, value: ValueSpec, reach: Reach):
        self.start = JsonConfig(None, "value", (value, b""))
        self._reach = reach
        self._phases: dict[str, Callable[[Level | None, Any, int], JsonConfig | None]] = {
            "value": self._begin_value, "first": self._go_first, "next": self._go_next, "name?": self._begin_name,
            "name": self._write_name, "colon": self._go_colon, "string": self._write_string,
            "number": self._write_number, "literal": self._write_literal,
        }

    def step(self, config: JsonConfig, byte: int) -> JsonConfig | None:
        """See `Automaton`."""
        return self._phases[config.phase](config.level, config.written, byte)

    def mask_key(self, config: JsonConfig) -> JsonConfig:
        """See `Automaton`. Counts of items or characters are dropped while no token can reach a bound of theirs."""
        level, phase, written = config
        if phase == "string" and written[0].limits is not None:
            string, so_far, tail = written
            written = string, self._round_length(string, *so_far), tail
        return JsonConfig(self._round_items(level), phase, written)

    def weigh(self, config: JsonConfig) -> int:
        """See `Automaton`."""
        return 12

    def _round_length(self, string: StringSpec, inside: Any, length: int) -> tuple[Any, int | str]:
        """Replace a length by "before" or "past" where no token reaches a bound. Not where a string has a pattern and
        lengths: how much the pattern still needs may exceed what the length leaves, however far away the bound is."""
        least, most = string.limits or (0, 0)
        if string.pattern is not None:
            return inside, length
        furthest = length + self._reach.longest
        if furthest < least:
            return inside, "before"
        return inside, "past" if length >= least and (not most or furthest < most) else length

    def _round_items(self, level: Level | None) -> Level | None:
        """Replace item counts, in all levels, by how many bounds are passed where no token reaches the next one."""
        if level is None:
            return None
        outer, spec, done = level
        if isinstance(spec, ArraySpec) and not any(done < b <= done + self._reach.items for b in spec.bounds):
            done = "about", sum(bound <= done for bound in spec.bounds)
        return Level(self._round_items(outer), spec, done)

    def _begin_value(self, level: Level | None, written: tuple[ValueSpec, bytes], byte: int) -> JsonConfig | None:
        value, blanks = written
        if byte in _BLANKS:
            return _add_blank(level, "value", blanks, byte, value)
        character = chr(byte)
        if character == "{" and value.object is not None:
            return _enter(level, value.object, ())
        if character == "[" and value.array is not None:
            return _enter(level, value.array, 0)
        if character == '"' and value.string is not None:
            pattern = value.string.pattern
            so_far = b"" if value.string.limits is None else (None if pattern is None else pattern.start, 0)
            return JsonConfig(level, "string", (value.string, so_far, b""))
        if character in "-0123456789" and value.number is not None:
            return JsonConfig(level, "number", (value.number, _add_digit(value.number, b"", byte)))
        return JsonConfig(level, "literal", bytes([byte])) if character in "tfn" and value.has_literals else None

    def _go_first(self, level: Level | None, blanks: bytes, byte: int) -> JsonConfig | None:
        assert level is not None
        if byte in _BLANKS:
            return _add_blank(level, "first", blanks, byte)
        if byte in _ENDS:
            return _leave(level, byte)
        if isinstance(level.spec, ObjectSpec):
            return self._begin_name(level, b"", byte)
        return self._begin_value(level, (level.spec.items, b""), byte)

    def _go_next(self, level: Level | None, blanks: bytes, byte: int) -> JsonConfig | None:
        if byte in _BLANKS:
            return _add_blank(level, "next", blanks, byte)
        if level is None:
            return None
        if byte in _ENDS:
            return _leave(level, byte)
        if byte != ord(","):
            return None
        if isinstance(level.spec, ObjectSpec):
            return JsonConfig(level, "name?", b"")
        return JsonConfig(level, "value", (level.spec.items, b""))

    def _begin_name(self, level: Level | None, blanks: bytes, byte: int) -> JsonConfig | None:
        if byte in _BLANKS:
            return _add_blank(level, "name?", blanks, byte)
        return JsonConfig(level, "name", (b"", b"")) if byte == ord('"') else None

    def _write_name(self, level: Level | None, written: tuple[bytes | None, bytes], byte: int) -> JsonConfig | None:
        """The text of a name becomes None once it can be no listed name. A name with escapes is kept, as it may spell a
        listed one."""
        assert level is not None and isinstance(level.spec, ObjectSpec)
        name, tail = written
        if byte == ord('"') and not tail:
            return _end_name(level, level.spec, name)
        after = follow_string(tail, byte)
        if after is None or (name is not None and len(name) > MAX_WRITTEN):
            return None
        if name is not None:
            name += bytes([byte])
            if b"\\" not in name and not any(known.encode().startswith(name) for known in level.spec.named):
                name = None
        return JsonConfig(level, "name", (name, after))

    def _go_colon(self, level: Level | None, written: tuple[ValueSpec, bytes], byte: int) -> JsonConfig | None:
        value, blanks = written
        if byte in _BLANKS:
            return _add_blank(level, "colon", blanks, byte, value)
        return JsonConfig(level, "value", (value, b"")) if byte == ord(":") else None

    def _write_string(
        self, level: Level | None, written: tuple[StringSpec, Any, bytes], byte: int
    ) -> JsonConfig | None:
        string, so_far, tail = written
        if byte == ord('"') and not tail:
            return _finish(level)
        after = follow_string(tail, byte)
        if after is None:
            return None
        if not string.is_free:
            if string.limits is None:
                so_far = so_far + bytes([byte]) if len(so_far) < MAX_WRITTEN else None
            else:
                so_far = _count(string, so_far, byte, is_whole=not after)
            if so_far is None:
                return None
        return JsonConfig(level, "string", (string, so_far, after))

    def _write_number(self, level: Level | None, written: tuple[NumberSpec, bytes], byte: int) -> JsonConfig | None:
        number, so_far = written
        if byte in b"0123456789.eE+-":
            more = _add_digit(number, so_far, byte)
            return JsonConfig(level, "number", (number, more)) if len(more) <= MAX_WRITTEN else None
        return self.step(_finish(level), byte)  # only the byte behind it shows that a number is complete

    def _write_literal(self, level: Level | None, written: bytes, byte: int) -> JsonConfig | None:
        written += bytes([byte])
        if written in _LITERALS:
            return _finish(level)
        is_begun = any(literal.startswith(written) for literal in _LITERALS)
        return JsonConfig(level, "literal", written) if is_begun else None


def _enter(level: Level | None, spec: ObjectSpec | ArraySpec, done: Any) -> JsonConfig | None:
    depth, outer = 0, level
    while outer is not None:
        depth, outer = depth + 1, outer.outer
    return JsonConfig(Level(level, spec, done), "first", b"") if depth < MAX_DEPTH else None


def _leave(level: Level, byte: int) -> JsonConfig | None:
    return _finish(level.outer) if (byte == ord("}")) == isinstance(level.spec, ObjectSpec) else None


def _finish(level: Level | None) -> JsonConfig:
    """The configuration behind a complete value. Items are counted up to one beyond the last bound."""
    if level is not None and isinstance(level.spec, ArraySpec):
        level = level._replace(done=min(level.done + 1, max(level.spec.bounds, default=0) + 1))
    return JsonConfig(level, "next", b"")


def _add_blank(
    level: Level | None, phase: str, blanks: bytes, byte: int, value: ValueSpec | None = None
) -> JsonConfig | None:
    """Add white space between values: a space, or a line break and indentation (tabs count as spaces)."""
    if len(blanks) >= MAX_BLANKS:
        return None
    more = b"\n" if byte == ord("\n") else blanks + (b" " if blanks[:1] == b"\n" else bytes([byte]))
    return JsonConfig(level, phase, more if value is None else (value, more))


def _end_name(level: Level, spec: ObjectSpec, written: bytes | None) -> JsonConfig | None:
    name = None
    if written is not None:
        try:
            name = json.loads(b'"' + written + b'"')
        except ValueError:
            return None
    value = spec.named.get(name, spec.others) if name is not None else spec.others
    known = json.dumps(name) if name in spec.named else OTHER
    if value is None:
        return None
    # In order of appearance. All unlisted names are one: how many there are does not matter.
    names = level.done if known == OTHER and OTHER in level.done else (*level.done, known)
    return JsonConfig(level._replace(done=names), "colon", (value, b""))


def _add_digit(number: NumberSpec, written: bytes, byte: int) -> bytes:
    """The text of a number with one more byte. In a free number digits are normalised to 0 and 1, and a run of digits
    to its first, so that all its texts share few configurations."""
    character = bytes([byte])
    if number.is_free and character.isdigit():
        if written in (b"", b"-"):
            character = b"0" if character == b"0" else b"1"
        elif written[-1:].isdigit() and written not in (b"0", b"-0"):
            return written
        else:
            character = b"1"
    return written + character


def _count(string: StringSpec, so_far: tuple[Any, int], byte: int, *, is_whole: bool) -> tuple[Any, int] | None:
    """One more byte of a string with limits; ``is_whole``: it completes a character. None where the length cannot be
    known (escapes), or the pattern cannot tell."""
    inside, length = so_far
    assert string.limits is not None
    if byte == ord("\\") or (string.pattern is not None and byte > 127):
        return None
    if string.pattern is not None:
        inside = string.pattern.step(inside, byte)
        if inside is None:
            return None
    return inside, min(length + is_whole, max(string.limits) + 1) if any(string.limits) else 0


def follow_string(tail: bytes, byte: int) -> bytes | None:
    """The incomplete end of a string after one more byte: a backslash, the first bytes of a UTF-8 character, or b"";
    None for bytes that may not follow."""
    character = bytes([byte])
    if tail == b"\\":
        return b"" if byte in b'"\\/bfnrt' else None
    if tail:
        needed = 2 if tail[0] < 0xE0 else 3 if tail[0] < 0xF0 else 4
        if byte & 0xC0 != 0x80:
            return None
        return b"" if len(tail) + 1 == needed else tail + character
    if byte < 0x20 or 0x80 <= byte < 0xC2 or byte > 0xF4:
        return None
    return character if byte == ord("\\") or byte >= 0x80 else b""

"""`Matcher`: reads one tool call, or a section of them, by a format's pattern.

Text is held from the first literal on until the name of a call is known and its arguments begin: if it turns out to be
something else, a `Mismatch` leaves all of it to be passed on as text. From then on arguments are emitted as they come,
and a `Mismatch` ends the call as incomplete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Any

from headrace.service.parsing.events import MAX_NAME, NAME, CallWriter
from headrace.service.parsing.format import (
    Arguments,
    Call,
    CallId,
    Either,
    Flag,
    Header,
    Key,
    Maybe,
    Name,
    Pairs,
    Pattern,
    PythonCall,
    Repeat,
    Value,
    first_texts,
)
from headrace.service.parsing.json_text import LITERALS, copy_json, escape, quote, read_string
from headrace.service.parsing.python_text import NAME as PYTHON_NAME
from headrace.service.parsing.python_text import copy_python
from headrace.service.parsing.reader import (
    MAX_HELD,
    MAX_SPACE,
    SPACE,
    Markers,
    Mismatch,
    Out,
    Reader,
    Step,
    read_whole,
    see_run,
    take_run,
    text_until,
)
from headrace.service.parsing.schemas import STRING, value_as_json

MAX_HEADER = 256
KEY = re.compile(r"[^<>\"\n]+")


class Matcher:
    """State of one attempt at a pattern. ``is_known_only``: a call of a tool that the request does not offer is a
    `Mismatch`. ``has_calls``: whether a `Header` may begin a call. ``on_start`` is called when a call or a message
    begins; from then on its text cannot become answer text again.

    ``destination``: the mode of the text that follows, ``reasoning`` or ``content``, if a `Header` says so.
    """

    def __init__(
        self, reader: Reader, calls: CallWriter, *, is_known_only: bool, has_calls: bool, on_start: Callable[[], None]
    ):
        self._reader = reader
        self._calls = calls
        self._is_known_only = is_known_only
        self._has_calls = has_calls
        self._on_start = on_start
        self._key = ""  # of the latest `Key`
        self._flag: bool | None = None  # of the latest `Flag`, consumed by the next `Value`
        self.destination: str | None = None

    def match(self, pattern: Pattern) -> Step[None]:
        """Read by a pattern; raises `Mismatch` where the text departs from it."""
        if isinstance(pattern, str):
            yield from self._skip_space()
            yield from self._reader.expect(pattern)
        elif isinstance(pattern, tuple):
            for part in pattern:
                yield from self.match(part)
        else:
            yield from _READINGS[type(pattern)](self, pattern)

    def _skip_space(self) -> Step[str]:
        return (yield from take_run(self._reader, SPACE, MAX_SPACE))

    def _can_start(self, pattern: Pattern) -> Step[bool]:
        """Whether the pattern can come next, by its first literal or the first character of a name."""
        if isinstance(pattern, tuple):
            return (yield from self._can_start(pattern[0]))
        if isinstance(pattern, PythonCall | Name):
            return bool(NAME.match((yield from self._reader.peek())))
        for text in first_texts(pattern):
            if (yield from self._reader.follows(text)):
                return True
        return False

    def _set_name(self, name: str, call_id: str | None = None) -> None:
        if self._is_known_only and name not in self._calls.schemas:
            raise Mismatch("not a tool of the request")
        self._calls.set_name(name, call_id)

    def _start(self) -> None:
        """Commit to the call: emit its start and give up the held text."""
        self._calls.start()
        self._reader.release()
        self._on_start()

    def _read_repeat(self, repeat: Repeat) -> Step[None]:
        yield from self.match(repeat.pattern)
        while True:
            yield from self._skip_space()
            self._reader.hold()  # a separator without a call behind it must come out as text
            if not (yield from self._skip_separator(repeat)):
                self._reader.release()
                return
            yield from self.match(repeat.pattern)

    def _skip_separator(self, repeat: Repeat) -> Step[bool]:
        for text in filter(None, repeat.between):
            if (yield from self._reader.skip(text)):
                return True
        return "" in repeat.between and (yield from self._can_start(repeat.pattern))

    def _read_maybe(self, maybe: Maybe) -> Step[None]:
        yield from self._skip_space()
        if (yield from self._can_start(maybe.pattern)):
            yield from self.match(maybe.pattern)

    def _read_either(self, either: Either) -> Step[None]:
        yield from self._skip_space()
        for option in either.patterns[:-1]:
            if (yield from self._can_start(option)):
                yield from self.match(option)
                return
        yield from self.match(either.patterns[-1])

    def _read_name(self, part: Name) -> Step[None]:
        yield from self._skip_space()
        text = yield from take_run(self._reader, NAME, MAX_NAME)
        found = part.pattern.fullmatch(text) if part.pattern else None
        self._set_name(found["name"] if found else text, text if part.is_id else None)

    def _read_call_id(self, _: CallId) -> Step[None]:
        yield from self._skip_space()
        self._calls.set_id((yield from take_run(self._reader, NAME, MAX_NAME)))

    def _read_arguments(self, _: Arguments) -> Step[None]:
        yield from self._skip_space()
        yield from self._copy_object(is_last=True)

    def _copy_object(self, *, is_last: bool) -> Step[None]:
        """Emit the arguments of the named call as they are read. ``is_last``: the call ends with them."""
        if (yield from self._reader.peek()) != "{":
            raise Mismatch("arguments must be an object")
        self._start()
        yield from copy_json(self._reader, self._calls.add)
        if is_last:
            self._calls.end()

    def _read_call(self, call: Call) -> Step[None]:
        """A JSON object with the call's name and arguments as members, in any order."""
        yield from self._skip_space()
        yield from self._reader.expect("{")
        kept: str | None = None  # arguments that could not be emitted before the object's end
        while True:
            yield from self._skip_space()
            key = yield from read_string(self._reader)
            yield from self._skip_space()
            yield from self._reader.expect(":")
            yield from self._skip_space()
            kept = (yield from self._read_member(call, key)) or kept
            yield from self._skip_space()
            if (yield from self._reader.skip("}")):
                break
            yield from self._reader.expect(",")
        if not self._calls.is_open:
            self._start()
            self._calls.add(kept or "{}")
        self._calls.end()

    def _read_member(self, call: Call, key: str) -> Step[str | None]:
        """Read one value of the call's object. Returns the arguments as text when they cannot be emitted at once:
        because they precede the name, or are not written as an object."""
        if key in call.names and not self._calls.name:
            self._set_name((yield from read_string(self._reader)))
        elif key == "id" and (yield from self._reader.follows('"')):
            self._calls.set_id((yield from read_string(self._reader)))
        elif key in call.arguments and not self._calls.is_open:
            if self._calls.name and (yield from self._reader.follows("{")):
                yield from self._copy_object(is_last=False)
            else:
                return (yield from self._keep_arguments())
        elif self._is_known_only and not self._calls.name:  # an object that does not begin as a call is an answer
            if key != "type" or (yield from read_string(self._reader)) != "function":
                raise Mismatch("not a call")
        else:
            yield from copy_json(self._reader, _drop)
        return None

    def _keep_arguments(self) -> Step[str]:
        """Read arguments to their end before they are used: those before the name, a string that contains JSON, or
        null."""
        parts: list[str] = []
        if (yield from self._reader.follows('"')):
            text = yield from read_string(self._reader)
            text = read_whole(copy_json, text.strip().encode("utf-8", "replace").decode() or "{}") or ""
        else:
            yield from copy_json(self._reader, parts.append)
            text = "".join(parts)
        text = "{}" if text == "null" else text
        if not text.startswith("{"):
            raise Mismatch("arguments must be an object")
        return text

    def _read_python_call(self, _: PythonCall) -> Step[None]:
        yield from self._skip_space()
        name = yield from take_run(self._reader, PYTHON_NAME, MAX_NAME)
        self._set_name(name)
        yield from self._skip_space()
        yield from self._reader.expect("(")
        yield from self._skip_space()
        num_read = 0
        while not (yield from self._reader.follows(")")):
            yield from self._read_argument(num_read)
            num_read += 1
            yield from self._skip_space()
            if not (yield from self._reader.skip(",")):
                break
            yield from self._skip_space()
        if not num_read:
            self._start()
            self._calls.add("{")
        yield from self._reader.expect(")")
        self._calls.add("}")
        self._calls.end()

    def _read_argument(self, position: int) -> Step[None]:
        """Read ``key=value``, or a positional value, whose name is that of the schema's property at ``position``."""
        # A word in front may also be a value: a literal such as True, or a number.
        name = yield from see_run(self._reader, PYTHON_NAME, MAX_NAME)
        if name and name not in LITERALS and not name[0].isdigit() and name[0] not in "-.":
            self._reader.take(len(name))
            yield from self._skip_space()
            yield from self._reader.expect("=")
            yield from self._skip_space()
        else:
            name = yield from self._name_of_position(position)
        if position == 0:
            self._start()
        self._calls.add(("{" if position == 0 else ", ") + quote(name) + ": ")
        yield from copy_python(self._reader, self._calls.add)

    def _name_of_position(self, position: int) -> Step[str]:
        keys = self._calls.schemas.keys_of(self._calls.name)
        if position >= len(keys) or (yield from self._reader.peek()) in (",", "=", ""):
            raise Mismatch("an argument without a name")
        return keys[position]

    def _read_pairs(self, pairs: Pairs) -> Step[None]:
        while True:
            yield from self._skip_space()
            if not (yield from self._can_start(pairs.pair)):
                break
            if self._calls.is_open:  # a broken pair comes out as text; before the first, the hold of the attempt lasts
                self._reader.hold()
            yield from self.match(pairs.pair)
        yield from self._reader.expect(pairs.end)
        if not self._calls.is_open:
            self._start()
            self._calls.add("{")
        self._calls.add("}")
        self._calls.end()

    def _read_key(self, _: Key) -> Step[None]:
        self._key = (yield from take_run(self._reader, KEY, MAX_NAME)).strip()
        if not self._key:
            raise Mismatch("an argument without a name")

    def _read_flag(self, _: Flag) -> Step[None]:
        self._flag = yield from self._reader.skip("true")
        if not self._flag:
            yield from self._reader.expect("false")

    def _read_value(self, value: Value) -> Step[None]:
        lead = ", "
        if self._calls.is_open:
            self._reader.release()
        else:
            self._start()
            lead = "{"
        self._calls.add(lead + quote(self._key) + ": ")
        if value.has_lines:
            yield from self._reader.skip("\n")
        flag, self._flag = self._flag, None
        # True: a string, whatever the schema says; False: JSON; None: by the schema.
        types = (
            self._calls.schemas.types_of(self._calls.name, self._key) if flag is None else STRING if flag
            else frozenset()
        )
        ends = _ends_of(value)
        if types == STRING:
            self._calls.add('"')
            yield from self._text_until(ends, lambda text: self._calls.add(escape(text)))
            self._calls.add('"')
            return
        # Strings are emitted as they come (above). Any other type shows only at the end of the value.
        parts: list[str] = []
        self._reader.hold()
        yield from self._text_until(ends, parts.append)
        self._reader.release()
        text = "".join(parts)
        as_json = read_whole(copy_json, text.strip()) if flag is False else None
        self._calls.add(as_json or value_as_json(text, types))

    def _text_until(self, ends: Markers, out: Out) -> Step[None]:
        marker = yield from text_until(self._reader, ends, out)
        if marker is None:
            raise Mismatch("the text ends inside a value")
        self._reader.take(len(marker))

    def _read_header(self, header: Header) -> Step[None]:
        parts: list[str] = []
        yield from self._text_until(Markers((header.end,)), parts.append)
        text = "".join(parts)
        call = header.call.search(text) if self._has_calls else None
        if call is not None:
            self._reader.extend_hold(MAX_HELD)  # the attempt began with room for a header only
            self._set_name(call["name"])
            yield from self._read_arguments(Arguments())
            self.destination = "content"
        else:
            self._reader.release()
            self._on_start()
            self.destination = "reasoning" if header.reasoning.search(text) else "content"


@lru_cache(maxsize=64)
def _ends_of(value: Value) -> Markers:
    return Markers((value.end, "\n" + value.end) if value.has_lines else (value.end,))


def _drop(_: str) -> None:
    """For text that is read over."""


_READINGS: dict[type, Callable[[Matcher, Any], Generator[None, None, None]]] = {
    Arguments: Matcher._read_arguments, Call: Matcher._read_call, CallId: Matcher._read_call_id,
    Either: Matcher._read_either,
    Flag: Matcher._read_flag, Header: Matcher._read_header, Key: Matcher._read_key, Maybe: Matcher._read_maybe,
    Name: Matcher._read_name,
    Pairs: Matcher._read_pairs, PythonCall: Matcher._read_python_call, Repeat: Matcher._read_repeat,
    Value: Matcher._read_value,
}

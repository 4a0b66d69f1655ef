"""Streaming conversion of Python literals to JSON, for models that write calls in Python syntax.

Read: strings with any quotes and escapes, numbers, constants, lists, tuples, dicts. Nothing is ever evaluated. Open
containers are a stack instead of recursion, as in ``json_text.py``.
"""

from __future__ import annotations

import math
import re

from headrace.service.parsing.json_text import LITERALS, MAX_SCALAR, SCALAR, escape
from headrace.service.parsing.reader import (
    MAX_SPACE,
    SPACE,
    Markers,
    Mismatch,
    Out,
    Reader,
    Step,
    see_run,
    take_run,
    text_until,
)

NAME = re.compile(r"[\w.-]+")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_ESCAPED = {
    "\\": "\\", "'": "'", '"': '"', "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v",
    "0": "\0", "\n": ""
}
_CODE_LENGTHS = {"x": 2, "u": 4, "U": 8}
_STRING_ENDS = {quote: Markers((quote, "\\")) for quote in ("'", '"', "'''", '"""')}
_HEX = re.compile(r"[0-9a-fA-F]+")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}


def copy_python(reader: Reader, out: Out) -> Step[None]:
    """Copy the Python literal that comes next, after white space, as JSON."""
    yield from take_run(reader, SPACE, MAX_SPACE)
    closers: list[str] = []
    yield from _copy_item(reader, out, closers)
    while closers:
        yield from take_run(reader, SPACE, MAX_SPACE)
        char = yield from reader.peek()
        if char == closers[-1]:
            _close(reader, out, closers)
        elif char == ",":
            yield from _copy_next(reader, out, closers)
        else:
            raise Mismatch("expected a comma or the end")


def _close(reader: Reader, out: Out, closers: list[str]) -> None:
    reader.take(1)
    out("}" if closers.pop() == "}" else "]")


def _copy_next(reader: Reader, out: Out, closers: list[str]) -> Step[None]:
    """Copy what follows a comma: another item, or nothing (a trailing comma, which JSON does not allow)."""
    reader.take(1)
    yield from take_run(reader, SPACE, MAX_SPACE)
    if (yield from reader.peek()) == closers[-1]:
        return
    out(", ")
    if closers[-1] == "}":
        yield from _copy_key(reader, out)
    yield from _copy_item(reader, out, closers)


def _copy_item(reader: Reader, out: Out, closers: list[str]) -> Step[None]:
    """A scalar; or a container is opened and its first item read, and so on."""
    while True:
        char = yield from reader.peek()
        if char in ("'", '"'):
            yield from _copy_string(reader, out)
            return
        closer = _CLOSERS.get(char)
        if closer is None:
            yield from _copy_scalar(reader, out)
            return
        reader.take(1)
        out("{" if char == "{" else "[")
        closers.append(closer)
        yield from take_run(reader, SPACE, MAX_SPACE)
        if (yield from reader.peek()) == closer:
            return
        if closer == "}":
            yield from _copy_key(reader, out)


def _copy_key(reader: Reader, out: Out) -> Step[None]:
    """Copy a dict's key; keys of other types become strings, as JSON requires."""
    if (yield from reader.peek()) in ("'", '"'):
        yield from _copy_string(reader, out)
    else:
        parts: list[str] = []
        yield from _copy_scalar(reader, parts.append)
        out(f'"{parts[0]}"')
    yield from take_run(reader, SPACE, MAX_SPACE)
    yield from reader.expect(":")
    out(": ")
    yield from take_run(reader, SPACE, MAX_SPACE)


def _copy_scalar(reader: Reader, out: Out) -> Step[None]:
    token = yield from see_run(reader, SCALAR, MAX_SCALAR)
    text = LITERALS.get(token) or number_as_json(token)
    if text is None:
        raise Mismatch("expected a value")
    reader.take(len(token))
    out(text)


def number_as_json(token: str) -> str | None:
    """A Python number in JSON's spelling; None when it is none or not finite."""
    if not _NUMBER.fullmatch(token):
        return None
    digits = token.lstrip("+-")
    if digits.isdigit():
        return None if len(digits) > 1 and digits[0] == "0" else token.lstrip("+")
    return repr(float(token)) if math.isfinite(float(token)) else None


def _copy_string(reader: Reader, out: Out) -> Step[None]:
    char = yield from reader.peek()
    is_triple = yield from reader.skip(char * 3)
    quote = char * 3 if is_triple else reader.take(1)
    out('"')
    while True:
        marker = yield from text_until(reader, _STRING_ENDS[quote], lambda text: out(escape(text)))
        if marker is None:
            raise Mismatch("the text ends inside a string")
        if marker == quote:
            reader.take(len(quote))
            out('"')
            return
        yield from _copy_escape(reader, out)


def _copy_escape(reader: Reader, out: Out) -> Step[None]:
    """Copy an escape sequence; an unknown one is a literal backslash, as in Python."""
    kind = (yield from reader.ahead(2))[1:]
    if not kind:
        raise Mismatch("the text ends inside a string")
    if kind in _ESCAPED:
        reader.take(2)
        out(escape(_ESCAPED[kind]))
        return
    length = _CODE_LENGTHS.get(kind, 0)
    code = (yield from reader.ahead(2 + length))[2:] if length else ""
    if length and len(code) == length and _HEX.fullmatch(code) and int(code, 16) < 0x110000:
        reader.take(2 + length)
        out(escape(chr(int(code, 16))))
    else:
        reader.take(1)
        out(escape("\\"))

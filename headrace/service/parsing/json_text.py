"""Streaming JSON: copied piece by piece while it is validated, with common mistakes of models repaired.

Repaired: line breaks and other control characters inside strings, backslashes before characters that need none, and
``True``, ``False``, ``None``. Everything else that is not JSON is a `Mismatch`. Open containers are a stack of their
closing brackets instead of recursion, so that nesting depth cannot exhaust Python's stack.
"""

from __future__ import annotations

import json
import re

from headrace.service.parsing.reader import MAX_SPACE, SPACE, Mismatch, Out, Reader, Step, see_run, take_now, take_run

MAX_SCALAR = 512
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
SCALAR = re.compile(r"[-+.0-9A-Za-z_]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPES = frozenset('"\\/bfnrt')


def escape(text: str) -> str:
    """The text as the inside of a JSON string, without quotes. Lone surrogates are escaped: UTF-8 cannot encode them.
    """
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", escaped)


def quote(text: str) -> str:
    """A JSON string."""
    return f'"{escape(text)}"'


def copy_json(reader: Reader, out: Out) -> Step[None]:
    """Copy the JSON value of any type that comes next, after white space. Pieces go to ``out`` as they are validated,
    so on a `Mismatch` the beginning has been passed on."""
    yield from take_run(reader, SPACE, MAX_SPACE)
    closers: list[str] = []
    yield from _copy_item(reader, out, closers)
    while closers:
        out((yield from take_run(reader, SPACE, MAX_SPACE)))
        char = yield from reader.peek()
        if char == closers[-1]:
            out(reader.take(1))
            closers.pop()
        elif char == ",":
            out(reader.take(1))
            yield from _copy_member(reader, out, closers)
        else:
            raise Mismatch("expected a comma or the end")


def read_string(reader: Reader) -> Step[str]:
    """The value of a JSON string, which comes next."""
    parts: list[str] = []
    yield from copy_string(reader, parts.append)
    text: str = json.loads("".join(parts))
    return text


def copy_string(reader: Reader, out: Out) -> Step[None]:
    """Copy a JSON string with its quotes."""
    if not (yield from reader.skip('"')):
        raise Mismatch("expected a string")
    out('"')
    while True:
        char = yield from reader.peek()
        if char == '"':
            out(reader.take(1))
            return
        yield from _copy_inside(reader, out, char)


def _copy_inside(reader: Reader, out: Out, char: str) -> Step[None]:
    """Copy the next part of a string's inside; ``char`` is its first character, empty at the end of the text."""
    if not char:
        raise Mismatch("the text ends inside a string")
    if char == "\\":
        yield from _copy_escape(reader, out)
    elif char < " ":
        out(escape(reader.take(1)))
    else:  # what is there, without waiting for the end of the run: arguments are streamed
        out(take_now(reader, _PLAIN))


def _copy_escape(reader: Reader, out: Out) -> Step[None]:
    pair = yield from reader.ahead(2)
    if pair[1:] in _ESCAPES:
        out(reader.take(2))
    elif pair[1:] == "u" and _HEX.fullmatch((yield from reader.ahead(6))[2:]):
        out(reader.take(6))
    elif pair[1:]:  # not an escape in JSON: a literal backslash
        reader.take(1)
        out("\\\\")
    else:
        raise Mismatch("the text ends inside a string")


def _copy_item(reader: Reader, out: Out, closers: list[str]) -> Step[None]:
    """Copy a scalar, or open a container and copy its first item, and so on."""
    while True:
        char = yield from reader.peek()
        if char == '"':
            yield from copy_string(reader, out)
            return
        if char not in ("{", "["):
            yield from _copy_scalar(reader, out)
            return
        closer = "}" if char == "{" else "]"
        out(reader.take(1))
        closers.append(closer)
        out((yield from take_run(reader, SPACE, MAX_SPACE)))
        if (yield from reader.peek()) == closer:
            return
        if closer == "}":
            yield from _copy_key(reader, out)


def _copy_member(reader: Reader, out: Out, closers: list[str]) -> Step[None]:
    out((yield from take_run(reader, SPACE, MAX_SPACE)))
    if closers[-1] == "}":
        yield from _copy_key(reader, out)
    yield from _copy_item(reader, out, closers)


def _copy_key(reader: Reader, out: Out) -> Step[None]:
    yield from copy_string(reader, out)
    out((yield from take_run(reader, SPACE, MAX_SPACE)))
    yield from reader.expect(":")
    out(":")
    out((yield from take_run(reader, SPACE, MAX_SPACE)))


def _copy_scalar(reader: Reader, out: Out) -> Step[None]:
    token = yield from see_run(reader, SCALAR, MAX_SCALAR)
    if not (NUMBER.fullmatch(token) or token in LITERALS):
        raise Mismatch("expected a value")
    reader.take(len(token))
    out(LITERALS.get(token, token))

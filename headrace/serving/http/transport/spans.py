"""Where the values of a large JSON text lie: `check_num_values` counts them, `find_spans` locates them. Both read the
text in short calls, between which other threads run, and leave it to the decoder to find most of what is not JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from headrace.base.errors import RequestError
from headrace.serving.http.transport.errors import BodyTooLarge

MAX_VALUES, MAX_DEPTH = 1 << 17, 256
"""Strings (names of fields among them), lists and objects of a body, which take about 25 ms to decode; how deep they
may be nested."""
PIECE_BYTES = 1 << 18
"""Bytes that are scanned or decoded in one call, which takes at most about 10 ms."""
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"{}[]")
_QUOTE = 0x22
# A whole short string, the begin of another one, or a bracket.
_EVENT = re.compile(rb'"[^"\\]{0,256}+"|["\[\]{}]')
# Whole characters and escapes up to the end of a string; two-part escapes (surrogate pairs) are kept together.
_INSIDE = re.compile(rb'(?:[^"\\]++|\\[^u]|\\u[dD][89abAB]..\\u....|\\u(?![dD][89abAB])....)*+', re.DOTALL)


def check_num_values(body: bytes) -> None:
    """Raise `BodyTooLarge` for JSON with more than `MAX_VALUES` strings, lists and objects, `RequestError` where they
    are nested more than `MAX_DEPTH` deep. Much cheaper than decoding. Numbers, which cost little, are not counted; what
    is not JSON may pass."""
    begin, count, depth, is_inside = 0, 0, 0, False
    while begin < len(body):
        end = begin + PIECE_BYTES
        while body[end - 1 : end] == b"\\":  # never between a backslash and what it escapes
            end += 1
        if is_inside and body.find(b'"', begin, end) < 0:  # in the middle of a long text
            begin = end
            continue
        piece = body[begin:end]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        brackets = b"".join(parts[is_inside::2]).translate(None, _NO_BRACKETS)
        depth = _scan_depth(brackets, depth)
        count += len(parts) // 2 + brackets.count(b"{") + brackets.count(b"[")
        if count > MAX_VALUES:
            raise BodyTooLarge(f"the body has more than {MAX_VALUES} strings, lists and objects; split the request")
        is_inside ^= len(parts) % 2 == 0
        begin = end


def _scan_depth(brackets: bytes, depth: int) -> int:
    """The depth after these brackets, which begin at ``depth``."""
    for bracket in brackets:
        depth += 1 if bracket in b"{[" else -1
        if depth > MAX_DEPTH:
            raise RequestError(f"the body is nested too deeply; at most {MAX_DEPTH} levels are accepted")
    return depth


class Span(msgspec.Struct, gc=False):
    """A string, list or object: ``body[begin:end]``. ``children`` are the strings, lists and objects right inside it
    (names of fields among them), in order; forgotten where the span is small enough to be decoded in one call. They are
    a tree without cycles and many, and each collection of garbage would look at all of them, with the GIL held."""

    begin: int
    end: int = 0
    children: Sequence[Span] = ()

    @property
    def is_large(self) -> bool:
        """Whether it must be decoded in pieces."""
        return self.end - self.begin > PIECE_BYTES


def find_spans(body: bytes) -> Span:
    """The span of the whole document. Raises `msgspec.DecodeError` where brackets or quotes do not match."""
    children: list[Span] = []  # of the list or object that is open
    stack: list[tuple[int, list[Span]]] = []  # where those around it begin, and their children so far
    for begin, end in _events(body):
        kind = body[begin]
        if kind in b"[{":
            stack.append((begin, children))
            children = []
        elif kind == _QUOTE:
            children.append(Span(begin, end))
        else:
            if not stack or (body[stack[-1][0]] == 0x5B) != (kind == 0x5D):
                raise msgspec.DecodeError(f"JSON is malformed: invalid character (byte {begin})")
            first, around = stack.pop()
            span = Span(first, end)
            if span.is_large:
                span.children = children
            around.append(span)
            children = around
    if stack:
        raise msgspec.DecodeError("Input data was truncated")
    if len(children) != 1:
        raise msgspec.DecodeError("JSON is malformed: it must be one object")
    document = children[0]
    check_blank(body, 0, document.begin)
    check_blank(body, document.end, len(body))
    return document


def check_blank(body: bytes, begin: int, end: int) -> None:
    """Raise `msgspec.DecodeError` if there is anything but white space between two values."""
    if begin < end and body[begin:end].strip(b" \t\r\n"):
        raise msgspec.DecodeError(f"JSON is malformed: trailing characters (byte {begin})")


def _events(body: bytes) -> Iterator[tuple[int, int]]:
    """``(begin, end)`` of each string and bracket."""
    begin = 0
    while begin < len(body):
        end = begin + PIECE_BYTES
        found = _EVENT.search(body, begin, end)
        if found is None:
            begin = end
            continue
        begin = found.end()
        if body[begin - 1] == _QUOTE and begin - found.start() == 1:  # the begin of a long string, or one with escapes
            for part_end in text_parts(body, begin):
                begin = part_end
            begin += 1
        yield found.start(), begin


def text_parts(body: bytes, begin: int) -> Iterator[int]:
    """The ends of the parts, of about `PIECE_BYTES`, into which a string falls whose first character is at ``begin``;
    the last one is that of its closing quote. No character or escape is cut in two."""
    while True:
        end = _find_end(body, begin, begin + PIECE_BYTES)
        if body[end : end + 1] == b'"':
            yield end
            return
        while end > begin and body[end : end + 1] and body[end] & 0xC0 == 0x80:  # inside a character of several bytes
            end -= 1
        if end == begin or end >= len(body):
            raise msgspec.DecodeError(f"JSON is malformed: unfinished string or invalid escape (byte {end})")
        yield end
        begin = end


def _find_end(body: bytes, begin: int, limit: int) -> int:
    """The place of the quote that ends a string, or one up to ``limit`` that divides no escape. Base64 has no escapes,
    and most texts few: looking for one byte is some fifty times faster than `_INSIDE`."""
    quote = body.find(b'"', begin, limit)
    end = min(limit, len(body)) if quote < 0 else quote
    if body.find(b"\\", begin, end) < 0:
        return end
    found = _INSIDE.match(body, begin, limit)
    return begin if found is None else found.end()

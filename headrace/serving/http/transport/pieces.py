"""`PieceReader`: decodes large JSON by its types, piece by piece. One call of msgspec's decoder holds the GIL, on a
thread too, and so stops the event loop: for a tenth of a second and more where a list has millions of numbers.

Small parts are decoded by msgspec as always; errors have its wording and its paths. Token ids in large lists are packed
(`TokenIds`), as freeing millions of numbers takes about as long as making them.
"""

from __future__ import annotations

import contextlib
import math
import re
from array import array
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec

from headrace.base.errors import ContextLengthExceeded
from headrace.base.media import Base64Text
from headrace.serving.http.protocol.media import STAYS_BYTES
from headrace.serving.http.transport.spans import PIECE_BYTES, Span, check_blank, find_spans, text_parts

TokenIds = list[int] | array  # type: ignore[type-arg]
"""Token ids of a request: a list, or packed as ``array("i")`` where they came in a large body."""
MAX_URI_HEAD = 256
SAMPLE_CHARS = 64
"""Characters of a large text that an error may show."""
S = TypeVar("S", bound=msgspec.Struct)
Member = tuple[Any, tuple[msgspec.Meta, ...]]
"""One type of a union, with its bounds."""
_PARTS = re.compile(r"^(?P<reason>.*?)(?: - at `(?P<key>key` in `)?\$(?P<path>[^`]*)`)?$", re.DOTALL)
_INDEX = re.compile(r"^\[(\d+)\]")
_URI_HEAD = re.compile(rb"[\x20-\x2b\x2d-\x7e]*;base64,", re.IGNORECASE)
_TEXT = msgspec.json.Decoder(str)
_QUOTE, _LIST = 0x22, 0x5B
_LISTS: tuple[Any, ...] = (list, Any)
_OBJECTS: tuple[Any, ...] = (dict, Any)


class PieceReader:
    """Reads one JSON object. ``most_ids``: a prompt of more token ids is refused before it is decoded. Raises
    `msgspec.DecodeError` and `msgspec.ValidationError`, as msgspec does, and `ContextLengthExceeded`."""

    def __init__(self, body: bytes, *, most_ids: int | None = None):
        self.most_ids = most_ids
        self._body = body
        self.document = find_spans(body)

    def text_of(self, span: Span) -> bytes:
        """The JSON text of a value."""
        return self._body[span.begin : span.end]

    def fields(self, span: Span) -> dict[str, Span]:
        """The values of an object by field name; of several fields of one name the last."""
        found: dict[str, Span] = {}
        body, children, at, i = self._body, span.children, span.begin + 1, 0
        while i < len(children):
            name, last = children[i], span.end - 1
            check_blank(body, at, name.begin)
            i += 1
            # Numbers, true, false and null are no children: behind them comes a comma, then the next name.
            end = children[i].begin if i < len(children) else last
            colon = body.find(b":", name.end, end)
            if body[name.begin] != _QUOTE or colon < 0:
                raise msgspec.DecodeError(f"JSON is malformed: expected a name and ':' (byte {name.begin})")
            check_blank(body, name.end, colon)
            value, at = Span(colon + 1, body.find(b",", colon, end)), colon + 1
            if value.end < 0 and i < len(children):
                value, i = children[i], i + 1
                check_blank(body, at, value.begin)
                end = children[i].begin if i < len(children) else last
                comma = body.find(b",", value.end, end)
                check_blank(body, value.end, end if comma < 0 else comma)
            else:
                comma, value.end = value.end, last if value.end < 0 else value.end
            if (comma < 0) != (i == len(children)):
                raise msgspec.DecodeError(f"JSON is malformed: expected ',' between fields (byte {value.end})")
            found[self._text(name)], at = value, comma + 1
        if not children:
            check_blank(body, at, span.end - 1)
        return found

    def record(self, kind: type[S], places: Mapping[str, Span], given: Mapping[str, Any]) -> S:
        """The record with these fields: values at ``places``, and those ``given``, which are decoded already."""
        values = dict(given)
        for known in msgspec.structs.fields(kind):
            name = known.encode_name
            if name in places and known.name not in given:
                with within_field(name):
                    values[known.name] = self.decode(places[name], known.type)
            elif known.required and known.name not in given:
                raise msgspec.ValidationError(f"Object missing required field `{name}`")
        return kind(**values)

    def decode(self, span: Span, wanted: Any) -> Any:
        """The value at a place as a type."""
        if not span.is_large or not (span.children or self._body[span.begin] in (_QUOTE, _LIST)):
            return _decode(self.text_of(span), wanted)
        members = _members(wanted)
        if any(kind is msgspec.Raw for kind, _ in members):
            return msgspec.Raw(self.text_of(span))
        if any(kind is bytes for kind, _ in members):
            return _decode(self.text_of(span), wanted)
        if self._body[span.begin] == _QUOTE:
            return self._long_text(span, wanted, members)
        if self._body[span.begin] == _LIST:
            return self._list(span, wanted, members)
        return self._object(span, wanted, members)

    def _text(self, span: Span) -> str:
        begin, parts = span.begin + 1, []
        for end in text_parts(self._body, begin):
            parts.append(_TEXT.decode(b'"%b"' % self._body[begin:end]))
            begin = end
        return parts[0] if len(parts) == 1 else "".join(parts)

    def _as_bytes(self, span: Span, form: str) -> Base64Text | None:
        """A text of one of the forms of `STAYS_BYTES`; None for another one, or with escapes."""
        begin, end = span.begin + 1, span.end - 1
        head = self._body[begin : begin + MAX_URI_HEAD]
        if head[:5].lower() == b"data:":
            found = _URI_HEAD.match(head)
            length = -1 if found is None else found.end()
        else:
            length = -1 if form != "bare" or b"://" in head[:16] else 0
        places = range(begin, end, PIECE_BYTES)
        if length < 0 or any(self._body.find(b"\\", at, min(at + PIECE_BYTES, end)) >= 0 for at in places):
            return None
        return Base64Text.of(head[:length].decode("ascii"), memoryview(self._body)[begin + length : end])

    def _long_text(self, span: Span, wanted: Any, members: list[Member]) -> str:
        bounds = next((bounds for kind, bounds in members if kind in (str, Any)), None)
        forms = [bound.extra[STAYS_BYTES] for bound in bounds or () if bound.extra and STAYS_BYTES in bound.extra]
        if forms and (held := self._as_bytes(span, forms[0])) is not None:
            return held
        text = self._text(span)
        if bounds is None:
            _decode(msgspec.json.encode(text[:SAMPLE_CHARS]), wanted)  # raises, with the names of the types
            raise msgspec.ValidationError("Invalid enum value")
        for bound in bounds:
            if bound.max_length is not None and len(text) > bound.max_length:
                raise msgspec.ValidationError(f"Expected `str` of length <= {bound.max_length}")
            if bound.pattern is not None and not re.search(bound.pattern, text):
                raise msgspec.ValidationError(f"Expected `str` matching regex {bound.pattern!r}")
        return text

    def _list(self, span: Span, wanted: Any, members: list[Member]) -> Any:
        found = next((each for each in members if each[0] in _LISTS or _origin(each[0]) is list), None)
        if found is None:
            return _decode(b"[]", wanted)  # raises
        kind, bounds = found
        item: Any = next(iter(get_args(kind)), Any)
        most = min((b.max_length for b in bounds if b.max_length is not None), default=None)
        is_ids = _takes(item, int) and not span.children
        if is_ids and most is None and self.most_ids is not None:
            self._check_num_ids(span, self.most_ids)
        result: Any = array("i") if is_ids else []
        decode, has_ids = msgspec.json.Decoder(list.__class_getitem__(item)).decode, _takes(item, list)
        for begin, end, large in self._groups(span):
            with _within("", first=len(result)):
                if large is not None:
                    check_blank(self._body, begin, large.begin)
                    check_blank(self._body, large.end, end)
                    with _within("[0]"):
                        part: list[Any] = [self.decode(large, item)]
                else:
                    part = decode(b"[%b]" % self._body[begin:end])
            if not part:
                raise msgspec.DecodeError(f"JSON is malformed: a list has nothing between commas (byte {begin})")
            result.extend([array("i", each) if type(each) is list else each for each in part] if has_ids else part)
            if most is not None and len(result) > most:
                raise msgspec.ValidationError(f"Expected `array` of length <= {most}")
        return result

    def _check_num_ids(self, span: Span, most: int) -> None:
        places = range(span.begin, span.end, PIECE_BYTES)
        count = 1 + sum(self._body.count(b",", place, min(place + PIECE_BYTES, span.end)) for place in places)
        if count > most:
            raise ContextLengthExceeded.of(most, f"the prompt has {count}")

    def _groups(self, span: Span) -> Iterator[tuple[int, int, Span | None]]:
        """``(begin, end)`` of groups of elements between commas, of about `PIECE_BYTES`; a large element has one of its
        own, and is the third value."""
        body, begin, after, large = self._body, span.begin + 1, span.begin + 1, None
        for child in [*span.children, Span(span.end - 1, span.end - 1)]:
            # Between children are numbers and commas: all commas of the list itself.
            while large is not None or child.begin - begin > PIECE_BYTES:
                comma = body.find(b",", after if large else max(after, begin + PIECE_BYTES), child.begin)
                if comma < 0:
                    break
                yield begin, comma, large
                begin = after = comma + 1
                large = None
            comma = body.rfind(b",", after, child.begin) if child.end - begin > PIECE_BYTES else -1
            if comma >= 0:
                yield begin, comma, large
                begin, large = comma + 1, None
            after, large = child.end, child if child.is_large else large
        yield begin, span.end - 1, large

    def _object(self, span: Span, wanted: Any, members: list[Member]) -> Any:
        places = self.fields(span)
        records = [kind for kind, _ in members if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
        if records:
            return self._record_of(places, records)
        found: Any = next((kind for kind, _ in members if kind in _OBJECTS or _origin(kind) is dict), None)
        name_type, value_type = get_args(found) or (str, Any)
        if found is None or name_type is not str:
            return _decode(b"{}" if found is None else self.text_of(span), wanted)
        values = {}
        for name, place in places.items():
            with _within("[...]"):
                values[name] = self.decode(place, value_type)
        return values

    def _record_of(self, places: dict[str, Span], records: list[type[msgspec.Struct]]) -> msgspec.Struct:
        tag_field = records[0].__struct_config__.tag_field
        if tag_field is not None and tag_field in places:
            with within_field(tag_field):
                tag = self.decode(places.pop(tag_field), str)
                kind = next((each for each in records if each.__struct_config__.tag == tag), None)
                if kind is None:
                    raise msgspec.ValidationError(f"Invalid value {tag[:SAMPLE_CHARS]!r}")
        elif len(records) > 1:
            raise msgspec.ValidationError(f"Object missing required field `{tag_field}`")
        else:
            kind = records[0]
        known = {field.encode_name for field in msgspec.structs.fields(kind)}
        for name in places.keys() - known:
            if kind.__struct_config__.forbid_unknown_fields:
                raise msgspec.ValidationError(f"Object contains unknown field `{name[:SAMPLE_CHARS]}`")
            self.decode(places[name], Any)  # it must be JSON
        return self.record(kind, places, {})


def _origin(kind: Any) -> Any:
    return get_origin(kind)


def is_float_for_int(error: msgspec.DecodeError) -> bool:
    """Whether a number with a fraction or an exponent stands where a whole one belongs."""
    return "Expected `int" in (text := str(error)) and "got `float`" in text


def decode_whole(text: bytes) -> Any:
    """JSON whose numbers without a remainder are integers, however they are written: ``4.0`` and ``1e3``, as programs
    write them that know one kind of number."""
    return _WHOLE.decode(text)


def _read_number(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise msgspec.DecodeError("Number out of range")
    # beyond 2^53 not every integer is a float of its own
    return int(number) if number.is_integer() and abs(number) <= 2**53 else number


_WHOLE = msgspec.json.Decoder(float_hook=_read_number)


def _decode(text: bytes, wanted: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=wanted)
    except msgspec.ValidationError as error:
        if not is_float_for_int(error):
            raise
    return msgspec.convert(decode_whole(text), wanted, str_keys=True)


def _members(wanted: Any, bounds: tuple[msgspec.Meta, ...] = ()) -> list[Member]:
    """The types that a value may have."""
    origin = get_origin(wanted)
    if origin is Annotated:
        inner, *more = get_args(wanted)
        return _members(inner, (*bounds, *(each for each in more if isinstance(each, msgspec.Meta))))
    if origin in (Union, UnionType):
        return [member for each in get_args(wanted) for member in _members(each, bounds)]
    return [(wanted, bounds)]


def _takes(wanted: Any, kind: type) -> bool:
    """Whether a type takes token ids (``kind`` is int), or lists of them (list)."""
    members = [each for each, _ in _members(wanted)]
    if kind is int:
        return int in members
    return any(get_origin(each) is list and _takes(get_args(each)[0], int) for each in members)


def within_field(name: str) -> contextlib.AbstractContextManager[None]:
    """Lets errors inside begin their path with the field."""
    return _within(f".{name}")


@contextlib.contextmanager
def _within(step: str, *, first: int = 0) -> Iterator[None]:
    """Lets errors inside begin their path with ``step``; the index at its begin counts from ``first``."""
    try:
        yield
    except msgspec.ValidationError as error:
        parts = _PARTS.match(str(error))
        assert parts is not None
        path = _INDEX.sub(lambda found: f"[{int(found[1]) + first}]", parts["path"] or "") if first else parts["path"]
        raise msgspec.ValidationError(f"{parts['reason']} - at `{parts['key'] or ''}${step}{path or ''}`") from None
    except ContextLengthExceeded as error:
        raise ContextLengthExceeded(error.message, param=error.param or step.lstrip(".") or None) from None

"""`Endpoint`: one route as data, from which routing and the OpenAPI document are made. `JsonBody`: reads a request body
within bounds and decodes it into one record type; every error names the field."""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import inspect
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from headrace.base.errors import RequestError, UnsupportedFeature
from headrace.serving.http.protocol.fields import DEFERRED, IN_WORDS, RESTRICTED, LogitBias
from headrace.serving.http.transport.errors import BodyTooLarge, BodyTooSlow, UnsupportedMediaType, is_json
from headrace.serving.http.transport.pieces import PieceReader, decode_whole, is_float_for_int, within_field
from headrace.serving.http.transport.spans import Span, check_num_values
from headrace.serving.http.transport.threads import AT_ONCE, WorkThreads
from headrace.serving.http.transport.unknown import alternatives, drop_fields, drop_inner_fields, names_of

T = TypeVar("T", bound=msgspec.Struct)
Handler = Callable[[Request], Awaitable[Response]]
Query = dict[str, dict[str, Any]]
"""JSON schemas of query parameters by name."""

GENERATION_ERRORS = (404, 429, 503, 504)
"""Statuses besides 200 of routes that run requests."""
GAP_TIMEOUT_S = 60.0
"""Seconds without any data of a body, after which the request fails. A slow upload that makes progress is accepted."""
SAMPLING = "sampling_params"
BIAS = "logit_bias"
WITH_MARK = "the body begins with a byte order mark; send it as UTF-8 without one"
BYTE_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
MARK_BYTES = 4
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a body raises; `msgspec.ValidationError` is a `msgspec.DecodeError`."""
BODY_BYTES = "body_bytes"
LARGE_BYTES = 1 << 19
"""Bodies from this size on are decoded in pieces."""
PROMPTS = frozenset({"messages", "prompt", "text", "input", "input_ids", "documents"})
"""Fields that may be very large. None that is holds a record that refuses unknown fields."""
CUTTING = "truncate_prompt_tokens"
"""The field with which a prompt may be longer than the context."""
# These match the wording of msgspec's validation errors, which carry the path only as text.
_WHERE = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_PATTERN = re.compile(r"^Expected `str` matching regex (?P<pattern>.*)$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")
_INVALID = re.compile(r"^Invalid (?:enum )?value")
_PART = re.compile(r"^Invalid (?:enum )?value '(?P<kind>.*)' - at `\$\.(?P<path>.*content\[\d+\]\.type)`$", re.DOTALL)


async def read_body(scope: Scope, receive: Receive, limit: int) -> list[bytes]:
    """Read a body of at most ``limit`` bytes, in the parts in which it arrives. Raises `BodyTooLarge`, `BodyTooSlow`
    after `GAP_TIMEOUT_S` without data, and `ClientDisconnect`."""
    # A declared length is refused before anything is read; chunked bodies are counted as they arrive.
    declared = Headers(scope=scope).get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise BodyTooLarge(f"the body has {declared} bytes; at most {limit} are accepted")
    chunks, size, has_more = [], 0, True
    while has_more:
        try:
            async with asyncio.timeout(GAP_TIMEOUT_S):
                message = await receive()
        except TimeoutError:
            raise BodyTooSlow(f"no body data for {GAP_TIMEOUT_S:g} s; {size} bytes were received") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk, has_more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > limit:
            raise BodyTooLarge(f"the body has more than {limit} bytes")
        chunks.append(chunk)
    return chunks


def _check_media_type(request: Request, *, takes_any_type: bool) -> None:
    declared = request.headers.get("content-type", "")
    # Browsers let pages of other sites send any type but JSON without a preflight; such requests have an Origin.
    accepts_any = takes_any_type and "origin" not in request.headers
    if not is_json(declared) and not accepts_any:
        raise UnsupportedMediaType(f"Content-Type must be application/json, got {declared or 'none'}")
    coding = request.headers.get("content-encoding", "identity").lower()
    if coding != "identity":
        raise UnsupportedMediaType(f"Content-Encoding {coding} is not supported; send the body uncompressed")


class JsonBody(Generic[T]):
    """Decoder of one request type. Strict: no numbers in strings, no unknown fields. A field of another route or of
    an unsupported feature is refused by name unless it requests nothing (`is_neutral`). Integers may be written
    ``4.0``. ``takes_any_type``: accepts any declared media type, for APIs whose clients declare none.
    ``is_optional``: no body is the same as an empty object; for routes whose media type `AdminGate` has checked.
    ``nested``: a field, and the record of its objects, which are checked for unknown fields like the body itself."""

    media_type: ClassVar[str] = "application/json"

    def __init__(
        self, record: type[T], *, nested: tuple[str, type[msgspec.Struct]] | None = None, takes_any_type: bool = False,
        is_optional: bool = False,
    ):
        self.record = record
        self._takes_any_type, self._is_optional = takes_any_type, is_optional
        self._decode = msgspec.json.Decoder(record).decode
        self._fields = names_of(record)
        self._nested, self._nested_fields = (nested[0], names_of(nested[1])) if nested else ("", frozenset[str]())

    async def read(
        self, request: Request, limit: int, threads: WorkThreads, *, is_lenient: bool = False,
        most_ids: int | None = None,
    ) -> T:
        """The decoded body; raises `RequestError` (400, 408, 413 or 415). A large one is decoded on one of ``threads``;
        the request's state has its size as ``body_bytes``. ``most_ids``: token ids that a prompt may have, if known; a
        large body with a longer one is refused by counting its commas. ``is_lenient``: unknown fields are ignored;
        their names are in the request's state as ``ignored_fields``, for the response header."""
        ignored: list[str] | None = [] if is_lenient else None
        decode, state = self._decoder_for(request, ignored, most_ids), request.scope.setdefault("state", {})
        parts = await read_body(request.scope, request.receive, limit)
        state[BODY_BYTES] = size = sum(map(len, parts))
        decoded = await threads.run(request, size, partial(decode, parts))
        if ignored:
            state["ignored_fields"] = ignored
        return decoded

    def _decoder_for(
        self, request: Request, ignored: list[str] | None, most_ids: int | None
    ) -> Callable[[list[bytes]], T]:
        """Check what the head says of the body; returns what decodes its parts."""
        if not self._is_optional:
            _check_media_type(request, takes_any_type=self._takes_any_type)
        return partial(self._decode_parts, ignored=ignored, most_ids=most_ids)

    def _decode_parts(self, parts: list[bytes], ignored: list[str] | None, most_ids: int | None) -> T:
        """Empties the list, so that a large body is in memory only once."""
        body = b"".join(parts)
        parts.clear()
        if self._is_optional and not body.strip():
            body = b"{}"
        # Decoding holds the GIL: on a thread, too, it stops the event loop for as long as one call takes.
        if len(body) > AT_ONCE:
            check_num_values(body)
        return self.decode(body, ignored) if len(body) <= LARGE_BYTES else self._decode_large(body, ignored, most_ids)

    def _decode_large(self, body: bytes, ignored: list[str] | None, most_ids: int | None) -> T:
        """Decode in pieces; raises the same errors as `decode`."""
        try:
            reader = PieceReader(body, most_ids=most_ids)
            if body[reader.document.begin : reader.document.begin + 1] != b"{":
                raise msgspec.ValidationError("Expected `object`, got `array`")
            places = reader.fields(reader.document)
            if CUTTING in places and reader.text_of(places[CUTTING]).strip() != b"null":
                reader.most_ids = None
            unknown = {name: reader.decode(places[name], Any) for name in places if name not in self._fields}
            drop_fields(unknown, self._fields, ignored)
            given = {}
            if self._nested and self._nested in places and not places[self._nested].is_large:
                given = self._decode_fields(reader, places, (self._nested,), ignored)
            try:
                return reader.record(self.record, places, given)
            except msgspec.ValidationError as error:
                if "unknown field" not in str(error):
                    raise
            others = [
                name for name, place in places.items()
                if name in self._fields - given.keys() and not (name in PROMPTS and place.is_large)
            ]
            return reader.record(
                self.record, places, {**given, **self._decode_fields(reader, places, others, ignored)}
            )
        except UNREADABLE as error:
            raise self.explain(error, body[:MARK_BYTES]) from None

    def _decode_fields(
        self, reader: PieceReader, places: dict[str, Span], names: Iterable[str], ignored: list[str] | None
    ) -> dict[str, Any]:
        """Fields of a large body, decoded whole and without what `decode` drops of a small one."""
        texts, num_ignored = {name: reader.text_of(places[name]) for name in names}, len(ignored or ())
        try:
            return self._convert_fields({name: msgspec.json.decode(text) for name, text in texts.items()}, ignored)
        except msgspec.ValidationError as error:
            if not is_float_for_int(error):
                raise
        if ignored is not None:
            del ignored[num_ignored:]
        return self._convert_fields({name: decode_whole(text) for name, text in texts.items()}, ignored)

    def _convert_fields(self, document: dict[str, Any], ignored: list[str] | None) -> dict[str, Any]:
        self._drop_inner(document, ignored)
        kinds = {f.encode_name: (f.name, f.type) for f in msgspec.structs.fields(self.record)}
        found = {}
        for name, value in document.items():
            own_name, kind = kinds[name]
            with within_field(name):
                found[own_name] = msgspec.convert(value, kind, str_keys=True)
        return found

    def decode(self, body: bytes, ignored: list[str] | None = None) -> T:
        """Decode ``body``; raises `RequestError`, with the field's name if one is wrong. Unknown fields are appended to
        ``ignored`` instead if it is given."""
        if not body.strip():
            raise RequestError("the body is empty; send a JSON object")
        # One strict pass for valid bodies; only bodies with unknown fields, or integers in an odd form, pay for others.
        try:
            return self._decode(body)
        except UNREADABLE as error:
            if not isinstance(error, msgspec.ValidationError):
                raise self.explain(error, body) from None
            has_floats = is_float_for_int(error)
            if not has_floats and "unknown field" not in str(error):
                raise self.explain(error, body) from None
        return self._decode_known(body, ignored, has_floats=has_floats)

    def _decode_known(self, body: bytes, ignored: list[str] | None, *, has_floats: bool) -> T:
        """Second pass over a body with unknown fields: drop those that request nothing, refuse or ignore the others.
        With ``has_floats`` numbers without a remainder are integers."""
        if ignored is not None:
            ignored.clear()
        try:
            document = decode_whole(body) if has_floats else msgspec.json.decode(body)
            # A JSON object: otherwise the strict pass would have reported another error. Fields are deleted in place.
            drop_fields(document, self._fields, ignored)
            self._drop_inner(document, ignored)
            # JSON object keys are strings; ``str_keys`` converts those of ``dict[int, ...]`` fields.
            return msgspec.convert(document, self.record, str_keys=True)
        except UNREADABLE as error:
            if has_floats or not isinstance(error, msgspec.ValidationError) or not is_float_for_int(error):
                raise self.explain(error, body) from None
        return self._decode_known(body, ignored, has_floats=True)

    def explain(self, error: Exception, body: bytes) -> RequestError:
        """The error for the client, of one of `UNREADABLE`. ``body``: the whole one, to name a wrong entry of
        ``logit_bias``, or only its begin."""
        match error:
            case msgspec.ValidationError():
                return _explain(error, self.record, body)
            case RecursionError():
                return RequestError("the body is nested too deeply")
            case UnicodeDecodeError():
                return RequestError("the body is not valid UTF-8")
        return RequestError(WITH_MARK if body.startswith(BYTE_ORDER_MARKS) else f"the body is not valid JSON: {error}")

    def _drop_inner(self, document: dict[str, Any], ignored: list[str] | None) -> None:
        inner = document.get(self._nested)
        for item in inner if isinstance(inner, list) else [inner]:
            if self._nested_fields and isinstance(item, dict):
                drop_fields(item, self._nested_fields, ignored, within=self._nested + ".")
        drop_inner_fields(document, self.record, ignored)


def _explain(error: msgspec.ValidationError, record: type[msgspec.Struct], body: bytes) -> RequestError:
    """Convert msgspec's error to a `RequestError` that starts with the field's path, in JSON terms."""
    text = str(error)
    part = _PART.match(text)
    if part is not None:
        kinds = ", ".join(_choices_at(record, part["path"]))
        return UnsupportedFeature(
            f"{part['path']}: {part['kind']!r} is not supported; it must be one of {kinds}", param=part["path"]
        )
    where = _WHERE.search(text)
    path = _name_entry(where["path"], body) if where else ""
    reason = text[: where.start()] if where else text
    owner = re.split(r"[.\[]", path, maxsplit=1)[0]
    if owner in RESTRICTED:
        return UnsupportedFeature(f"this value of {owner} is not supported: {DEFERRED[owner]}", param=owner)
    missing = re.search(r"missing required field `([^`]*)`", reason)
    if missing is not None:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return RequestError(f"{path} is required", param=path)
    unknown = _UNKNOWN.search(reason)
    if unknown is not None:
        path = f"{path}.{unknown['name']}" if path else unknown["name"]
        return RequestError(f"unknown field {path!r}", param=path)
    reason = _explain_value(reason, record, path)
    return RequestError(f"{path}: {reason}" if path else f"the body: {reason}", param=path or None)


def _explain_value(reason: str, record: type[msgspec.Struct], path: str) -> str:
    """The reason of an error, with the allowed values in words."""
    invalid = _INVALID.match(reason)
    choices = _choices_at(record, path) if invalid is not None else []
    if choices and invalid is not None:
        given = reason[invalid.end() :]
        reason = f"must be {'one of ' if len(choices) > 1 else ''}{', '.join(choices)}; got{given}"
    pattern = _PATTERN.match(reason)
    if pattern is not None:
        words = next((words for known, words in IN_WORDS.items() if repr(known) == pattern["pattern"]), None)
        reason = f"must have {words}" if words else reason
    return reason.replace("`", "").replace("Expected", "expected")


def _name_entry(path: str, body: bytes) -> str:
    """The path; within a ``logit_bias`` that of its first wrong entry, by its key, which msgspec's errors lack."""
    if path.removeprefix(SAMPLING + ".") not in (BIAS, BIAS + "[...]"):
        return path
    path = path.removesuffix("[...]")
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:  # a number that is too large for any type, which only the typed decoder's path names
        return path
    for name in path.split("."):
        found = found[name]
    for key, value in found.items() if isinstance(found, dict) else ():
        try:
            msgspec.convert({key: value}, LogitBias, str_keys=True)
        except msgspec.ValidationError:
            return f"{path}[{key[:64]!r}]"
    return path


def _choices_at(record: type[msgspec.Struct], path: str) -> list[str]:
    """The literals allowed at a path of a record, such as ``messages[...].role``, and the tags of records; empty if
    unknown. Unions contribute those of all their members."""
    found: list[inspect.Type] = [inspect.type_info(record)]
    tags: list[str] = []
    for name in re.findall(r"[^.\[\]]+", path):
        parts = alternatives(found)
        tags = [str(part.tag) for part in parts if isinstance(part, inspect.StructType) and part.tag_field == name]
        found = [
            field.type
            for part in parts if isinstance(part, inspect.StructType)
            for field in part.fields if field.encode_name == name
        ]
        found += [part.item_type for part in parts if isinstance(part, inspect.ListType)]
    return tags + [
        str(value) for part in alternatives(found) if isinstance(part, inspect.LiteralType) for value in part.values
    ]


@dataclass(frozen=True)
class Endpoint:
    """``response`` is the msgspec type of the 200 response (None: plain text), ``event`` that of a stream event, sent
    as ``event_media``. ``errors`` are statuses besides 200 (500 is always possible). ``is_admin``: needs `AdminGate`.
    ``aliases`` are further paths. The document has the first sentence of the handler's docstring."""

    path: str
    handler: Handler
    tag: str
    response: Any = None
    _: dataclasses.KW_ONLY
    methods: tuple[str, ...] = ("GET",)
    body: JsonBody[Any] | None = None
    event: Any = None
    event_media: str = "text/event-stream"
    query: Query | None = None
    errors: tuple[int, ...] = ()
    is_admin: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """What it does, for users."""
        first, end, _ = " ".join((self.handler.__doc__ or "").replace("``", "`").split()).partition(". ")
        return first + end.strip()

    def expand(self) -> Iterator[Endpoint]:
        """One endpoint per path."""
        for path in (self.path, *self.aliases):
            yield dataclasses.replace(self, path=path, aliases=())


def post(path: str, handler: Handler, tag: str, response: Any = None, **options: Any) -> Endpoint:
    """An endpoint for POST."""
    return Endpoint(path, handler, tag, response, methods=("POST",), **options)

"""`JsonBody`: reads a request body within a bound and decodes it into one record type; every complaint names the
field.

`Endpoint`: one route as data: where, what it reads, what it answers. Routing and the OpenAPI document are made from
it."""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import inspect
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from headrace.base.errors import RequestError, UnsupportedFeature
from headrace.serving.http.protocol.fields import ASK_WHEN_EMPTY, DEFERRED, MEDIA, RESTRICTED
from headrace.serving.http.transport.errors import BodyTooLarge, BodyTooSlow, UnsupportedMediaType

T = TypeVar("T", bound=msgspec.Struct)
GAP_TIMEOUT_S = 60.0
NESTED = "sampling_params"

MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""What files begin with that are written on Windows."""
_WHERE = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")
_PART = re.compile(r"^Invalid (?:enum )?value '(?P<kind>.*)' - at `\$\.(?P<path>.*content\[\d+\]\.type)`$", re.DOTALL)


async def read_body(request: Request, limit: int) -> bytes:
    """The body, at most ``limit`` bytes of it whether its length was declared or it comes in chunks."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise BodyTooLarge(f"the body has {declared} bytes; at most {limit} are taken")
    chunks, size, has_more = [], 0, True
    while has_more:
        try:
            async with asyncio.timeout(GAP_TIMEOUT_S):
                message = await request.receive()
        except TimeoutError:
            raise BodyTooSlow(f"nothing of the body came for {GAP_TIMEOUT_S:g} s; {size} bytes had come") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk, has_more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > limit:
            raise BodyTooLarge(f"the body has more than {limit} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _check_media_type(request: Request, *, is_lenient: bool) -> None:
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_any_served = is_lenient and "origin" not in request.headers  # pages of other sites can send all but JSON unasked
    if (
        not is_any_served and declared != "application/json"
        and not (declared.startswith("application/") and declared.endswith("+json"))
    ):
        raise UnsupportedMediaType(f"Content-Type must be application/json, got {declared or 'none'}")
    coding = request.headers.get("content-encoding", "identity").lower()
    if coding != "identity":
        raise UnsupportedMediaType(f"Content-Encoding {coding} is not taken; send the body uncompressed")


class JsonBody(Generic[T]):
    """Decoder of one request type. Strict: no number in a string, no unknown field; a known field of a feature that is
    not served is refused by its name unless it asks for nothing (null, false or empty). ``is_lenient``: whatever type
    is declared, for dialects whose clients declare none."""

    def __init__(self, record: type[T], *, nested: type[msgspec.Struct] | None = None, is_lenient: bool = False):
        self.record = record
        self._is_lenient = is_lenient
        self._decode = msgspec.json.Decoder(record).decode
        self._fields = _fields_of(record)
        self._nested_fields = _fields_of(nested) if nested else frozenset()

    async def read(self, request: Request, limit: int) -> T:
        """The decoded body; raises `RequestError` (400, 413 or 415)."""
        _check_media_type(request, is_lenient=self._is_lenient)
        return self.decode(await read_body(request, limit))

    async def read_optional(self, request: Request, limit: int) -> T:
        """The decoded body, of whatever declared type; no body is the same as an empty object."""
        body = await read_body(request, limit)
        return self.decode(body if body.strip() else b"{}")

    def decode(self, body: bytes) -> T:
        """The record in ``body``."""
        if not body.strip():
            raise RequestError("the body is empty; send a JSON object")
        try:
            return self._decode(body)
        except msgspec.ValidationError as error:
            if "unknown field" not in str(error):
                raise _explain(error, self.record) from None
        except msgspec.DecodeError as error:
            if body.startswith(MARKS):
                raise RequestError("the body begins with a byte order mark; send it as UTF-8 without one") from None
            raise RequestError(f"the body is not valid JSON: {error}") from None
        except UnicodeDecodeError:
            raise RequestError("the body is not valid UTF-8") from None
        except RecursionError:
            raise RequestError("the body is nested too deeply") from None
        return self._decode_loosely(body)

    def _decode_loosely(self, body: bytes) -> T:
        """Second look at a body with unknown fields: drop those that ask for nothing, name the others."""
        try:
            document = msgspec.json.decode(body)
            _refuse_fields(document, self._fields)
            inner = document.get(NESTED)
            for item in inner if isinstance(inner, list) else [inner]:
                if self._nested_fields and isinstance(item, dict):
                    _refuse_fields(item, self._nested_fields, within=NESTED + ".")
            return msgspec.convert(document, self.record, str_keys=True)
        except msgspec.ValidationError as error:
            raise _explain(error, self.record) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"the body is not valid JSON: {error}") from None
        except RecursionError:
            raise RequestError("the body is nested too deeply") from None


def _fields_of(record: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(f.encode_name for f in msgspec.structs.fields(record))


def _refuse_fields(document: dict[str, Any], known: frozenset[str], *, within: str = "") -> None:
    for name in [n for n in document if n not in known]:
        value = document[name]
        if name not in DEFERRED:
            raise _unknown_field(name, known, within)
        if value is not None and value is not False and (value not in ([], {}) or name in ASK_WHEN_EMPTY):
            raise UnsupportedFeature(f"{within}{name} is not supported: {DEFERRED[name]}", param=within + name)
        del document[name]


def _unknown_field(name: str, known: frozenset[str], within: str = "") -> RequestError:
    near = get_close_matches(name[:64], known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return RequestError(f"unknown field {within + name[:64]!r}{hint}", param=within + name[:64])


def _explain(error: msgspec.ValidationError, record: type[msgspec.Struct]) -> RequestError:
    """msgspec's complaint as ours: the field first, in words of JSON."""
    text = str(error)
    part = _PART.match(text)
    if part is not None:
        return UnsupportedFeature(f"{part['path']}: {part['kind']!r} is not supported: {MEDIA}", param=part["path"])
    where = _WHERE.search(text)
    path = where["path"] if where else ""
    reason = text[: where.start()] if where else text
    owner = re.split(r"[.\[]", path, maxsplit=1)[0]
    if owner in RESTRICTED:
        return UnsupportedFeature(f"this {owner} is not supported: {DEFERRED[owner]}", param=owner)
    missing = re.search(r"missing required field `([^`]*)`", reason)
    if missing is not None:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return RequestError(f"{path} is required", param=path)
    unknown = _UNKNOWN.search(reason)
    if unknown is not None:
        path = f"{path}.{unknown['name']}" if path else unknown["name"]
        return RequestError(f"unknown field {path!r}", param=path)
    if reason.startswith("Invalid enum value"):
        choices = _choices_at(record, path)
        reason = (
            f"must be {'one of ' if len(choices) > 1 else ''}{', '.join(choices)}; "
            f"got{reason.removeprefix('Invalid enum value')}"
            if choices else reason
        )
    reason = reason.replace("`", "").replace("Expected", "expected")
    return RequestError(f"{path}: {reason}" if path else f"the body: {reason}", param=path or None)


def _choices_at(record: type[msgspec.Struct], path: str) -> list[str]:
    """The words that may stand at a path of a record, as msgspec tells paths; none where it is not known."""
    found: list[inspect.Type] = [inspect.type_info(record)]
    for name in re.findall(r"[^.\[\]]+", path):
        parts = _alternatives(found)
        found = [
            field.type
            for part in parts if isinstance(part, inspect.StructType)
            for field in part.fields if field.encode_name == name
        ]
        found += [part.item_type for part in parts if isinstance(part, inspect.ListType)]
    return [
        str(value) for part in _alternatives(found) if isinstance(part, inspect.LiteralType) for value in part.values
    ]


def _alternatives(types: list[inspect.Type]) -> list[inspect.Type]:
    return [part for found in types for part in (found.types if isinstance(found, inspect.UnionType) else (found,))]


Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """``answer`` is the msgspec type of the 200 answer (None: plain text). ``event`` is the type of an event
    when the route can stream, as ``event_media``. ``errors`` are statuses beside 200 (500 is always possible).
    ``is_admin``: concerns the server and not its caller alone; see `AdminGate`."""

    path: str
    handler: Handler
    doc: str
    tag: str
    methods: tuple[str, ...] = ("GET",)
    body: JsonBody[Any] | None = None
    answer: Any = None
    event: Any = None
    event_media: str = "text/event-stream"
    query: dict[str, dict[str, Any]] | None = None
    errors: tuple[int, ...] = ()
    is_admin: bool = False

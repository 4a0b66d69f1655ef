"""`FormBody`: reads a body of ``multipart/form-data`` (RFC 7578) within bounds and decodes it into one record type."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request

from headrace.base.errors import RequestError, UnsupportedFeature
from headrace.serving.http.protocol.fields import DEFERRED
from headrace.serving.http.transport.endpoint import JsonBody, T
from headrace.serving.http.transport.errors import UnsupportedMediaType

FORM = "multipart/form-data"
MOST_PARTS = 64
MOST_HEADER = 4096
MOST_TEXT = 1 << 16
"""Bytes of a part without a file."""
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(r';\s*name=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.IGNORECASE)
DISPOSITION = "content-disposition:"


class FormBody(JsonBody[T]):
    """Decoder of one request type. The value of a part is text, or bytes for fields in ``files``; those in ``lists``
    may occur several times, also with ``[]`` behind their names."""

    media_type = FORM

    def __init__(self, record: type[T], *, files: frozenset[str], lists: frozenset[str] = frozenset()):
        super().__init__(record)
        self._files, self._lists = files, lists

    def _decoder_for(
        self, request: Request, ignored: list[str] | None, most_ids: int | None
    ) -> Callable[[list[bytes]], T]:
        declared = request.headers.get("content-type", "")
        boundary = _BOUNDARY.search(declared)
        if declared.partition(";")[0].strip().lower() != FORM or boundary is None:
            raise UnsupportedMediaType(f"Content-Type must be {FORM} with a boundary, got {declared[:100] or 'none'}")
        return partial(self._decode_form, boundary=(boundary[1] or boundary[2]).encode(), ignored=ignored)

    def _decode_form(self, parts: list[bytes], boundary: bytes, ignored: list[str] | None) -> T:
        body = b"".join(parts)
        parts.clear()
        known = {field.encode_name for field in msgspec.structs.fields(self.record)}
        found: dict[str, Any] = {}
        for name, value in split_form(body, boundary):
            plain = name.removesuffix("[]") if name.removesuffix("[]") in self._lists else name
            if plain not in known and name.removesuffix("[]") in DEFERRED:
                raise UnsupportedFeature(
                    f"{name} is not supported: {DEFERRED[name.removesuffix('[]')]}", param=name[:64]
                )
            if plain not in known and ignored is not None:
                ignored.append(name[:64])
                continue
            if plain in found and plain not in self._lists:
                raise RequestError(f"{name} occurs twice", param=name[:64])
            one = value if plain in self._files else _read_text(name, value)
            if plain in self._lists:
                found.setdefault(plain, []).append(one)
            elif one or plain in self._files:  # forms send fields that were left empty
                found[plain] = one
        return self.convert(found)

    def convert(self, found: dict[str, Any]) -> T:
        """The record of these values; numbers and flags are texts in a form. Raises `RequestError`."""
        try:
            return msgspec.convert(found, self.record, strict=False)
        except msgspec.ValidationError as error:
            raise self.explain(error, b"") from None


def split_form(body: bytes, boundary: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and values of the parts of a form. Raises `RequestError` for a body that is none."""
    mark = b"\r\n--" + boundary
    at = 0 if body.startswith(mark[2:]) else body.find(mark) + 2
    if at < 2 and not body.startswith(mark[2:]):
        raise RequestError("the body is no form: its boundary does not occur")
    at += len(mark) - 2
    for _ in range(MOST_PARTS):
        if body[at : at + 2] == b"--":
            return
        start = body.find(b"\r\n\r\n", at, at + MOST_HEADER)
        end = body.find(mark, max(start + 2, at))
        if start < 0 or end < 0 or body[at : at + 2] != b"\r\n":
            raise RequestError("the body is a broken or truncated form")
        yield _read_name(body[at:start].decode("utf-8", "replace")), body[start + 4 : end]
        at = end + len(mark)
    raise RequestError(f"the form has more than {MOST_PARTS} parts")


def _read_name(headers: str) -> str:
    """A part's name, in quotes or, as .NET writes it, without; other headers may have parameters of that name."""
    for line in headers.split("\r\n"):
        name = _NAME.search(line) if line.lower().startswith(DISPOSITION) else None
        if name is not None:
            return name[1] if name[2] is None else name[2]
    raise RequestError("a part of the form has no name")


def _read_text(name: str, value: bytes) -> str:
    if len(value) > MOST_TEXT:
        raise RequestError(f"{name} has {len(value)} bytes; at most {MOST_TEXT} are accepted", param=name[:64])
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise RequestError(f"{name} is not valid UTF-8", param=name[:64]) from None

"""The lines of a batch: requests read, answers written, and which are answered already. Refuses: answering."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from headrace.base.errors import ConfigError, RequestError

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MAX_LINE_BYTES = 64 << 20
MAX_ID = 512


class BatchLine(msgspec.Struct):
    """One request of the input. What else stands in the line is ignored, as at OpenAI."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID)]
    url: str
    body: dict[str, Any]
    method: str = "POST"


@dataclass(frozen=True)
class Item:
    """A line to be answered, or what is wrong with it. ``number`` is its place in the file, from 1."""

    number: int
    line: BatchLine | None = None
    custom_id: str | None = None
    error: RequestError | None = None


@dataclass
class Answered:
    """What the output holds already: ids of requests, and numbers of lines that were no requests."""

    custom_ids: set[str]
    numbers: set[int]


def _check(line: BatchLine) -> None:
    if line.method != "POST":
        raise RequestError(f"method must be POST, got {line.method[:20]!r}", param="method")
    if line.url not in ROUTES:
        raise RequestError(f"url must be one of {', '.join(ROUTES)}, got {line.url[:100]!r}", param="url")
    if line.body.get("stream"):
        raise RequestError("a batch has no streams; leave stream out", param="body.stream")


def read_line(number: int, text: bytes, seen: set[str]) -> Item:
    """The request of a line. ``seen`` are the ids before it, to which its own is added."""
    custom_id = None
    try:
        if len(text) > MAX_LINE_BYTES:
            raise RequestError(f"the line has more than {MAX_LINE_BYTES} bytes")
        line = msgspec.json.decode(text, type=BatchLine)
        custom_id = line.custom_id
        if custom_id in seen:
            raise RequestError(f"custom_id {custom_id!r} stands in an earlier line, too", param="custom_id")
        _check(line)
    except RequestError as error:
        return Item(number, custom_id=custom_id, error=error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Item(number, error=RequestError(f"the line is no request of a batch: {error}"))
    seen.add(custom_id)
    return Item(number, line, custom_id)


def read_items(file: BinaryIO, answered: Answered) -> Iterator[Item]:
    """The lines without an answer, one at a time. Empty ones are none."""
    seen: set[str] = set()
    for number, text in enumerate(_read_lines(file), 1):
        if not text.strip() or number in answered.numbers:
            continue
        item = read_line(number, text, seen)
        if item.error is not None or item.custom_id not in answered.custom_ids:
            yield item


def _read_lines(file: BinaryIO) -> Iterator[bytes]:
    """All lines; of one that is too long the beginning."""
    while text := file.readline(MAX_LINE_BYTES + 2):
        rest = text
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 2)
        yield text


def count_lines(path: Path) -> int:
    """Lines that are not empty; raises `ConfigError` for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="input") from error


def open_output(path: Path) -> tuple[BinaryIO, Answered]:
    """The output to append to, and what it holds. The end of a line that was not written to its end is cut off; raises
    `ConfigError` for a file that is no output of a batch: nothing of it is overwritten."""
    answered = Answered(set(), set())
    try:
        file = path.open("a+b")
        file.seek(0)
        end = 0
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                break
            end += len(text)
            _note(text, answered, f"{path} line {number}")
        file.truncate(end)
        file.seek(0, os.SEEK_END)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", param="output") from error
    return file, answered


def _note(text: bytes, answered: Answered, where: str) -> None:
    try:
        record = json.loads(text)
        custom_id, error = record["custom_id"], record["error"]
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise ConfigError(
            f"{where} is not the answer to a line of a batch; choose another output", param="output"
        ) from problem
    if error and "line" in error:
        answered.numbers.add(error["line"])
    else:
        answered.custom_ids.add(custom_id)


def write_answer(item: Item, status: int, request_id: str, body: bytes) -> bytes:
    """The line of a request that was answered, if only with an error of its own."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _write(item, response, None)


def write_refusal(item: Item) -> bytes:
    """The line of one that was no request."""
    assert item.error is not None
    return _write(
        item, None,
        {"code": item.error.kind, "message": item.error.message, "param": item.error.param, "line": item.number}
    )


def _write(item: Item, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    return msgspec.json.encode(
        {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": item.custom_id, "response": response, "error": error}
    ) + b"\n"

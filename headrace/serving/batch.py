"""Files of requests in OpenAI's batch format, completed by the application's own routes without a socket. Each result
is written as soon as it is known; no line stops the others."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Protocol

import msgspec
from starlette.types import ASGIApp, Message

from headrace.base.errors import ConfigError, EngineGivenUp, RequestError

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MAX_LINE_BYTES = 64 << 20
MAX_ID = 512


class BatchLine(msgspec.Struct):
    """One request of the input. Other fields of the line are ignored, as with OpenAI."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID)]
    url: str
    body: dict[str, Any]
    method: str = "POST"


@dataclass(frozen=True)
class Item:
    """One line of the input: ``line`` if it is a valid request, else ``error``. ``number`` counts from 1.
    ``custom_id`` is None if it could not be read."""

    number: int
    line: BatchLine | None = None
    custom_id: str | None = None
    error: RequestError | None = None


@dataclass
class Completed:
    """Results that the output file already has: ``custom_ids`` of requests with a result, and ``numbers`` of input
    lines that were not valid requests. Such requests and lines are skipped when a batch is continued."""

    custom_ids: set[str]
    numbers: set[int]


def _check(line: BatchLine) -> None:
    if line.method != "POST":
        raise RequestError(f"method must be POST, got {line.method[:20]!r}", param="method")
    if line.url not in ROUTES:
        raise RequestError(f"url must be one of {', '.join(ROUTES)}, got {line.url[:100]!r}", param="url")
    if line.body.get("stream"):
        raise RequestError("a batch cannot stream; leave out stream", param="body.stream")


class SeenIds(Protocol):
    """The ids of earlier lines, such as a set."""

    def __contains__(self, custom_id: object, /) -> bool: ...

    def add(self, custom_id: str, /) -> None: ...


def read_line(number: int, text: bytes, seen: SeenIds) -> Item:
    """The request of a line. ``seen`` are the ids of earlier lines; the line's own is added."""
    custom_id = None
    try:
        if len(text) > MAX_LINE_BYTES:
            raise RequestError(f"the line has more than {MAX_LINE_BYTES} bytes")
        line = msgspec.json.decode(text, type=BatchLine)
        custom_id = line.custom_id
        if custom_id in seen:
            raise RequestError(f"custom_id {custom_id!r} is also in an earlier line", param="custom_id")
        _check(line)
    except RequestError as error:
        return Item(number, custom_id=custom_id, error=error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Item(number, error=RequestError(f"the line is not a batch request: {error}"))
    # only now: an invalid line does not reserve its id
    seen.add(custom_id)
    return Item(number, line, custom_id)


def read_items(file: BinaryIO, completed: Completed) -> Iterator[Item]:
    """The lines without a result, one at a time; empty lines are skipped."""
    seen: set[str] = set()
    for number, text in enumerate(read_lines(file), 1):
        if not text.strip() or number in completed.numbers:
            continue
        item = read_line(number, text, seen)
        if item.error is not None or item.custom_id not in completed.custom_ids:
            yield item


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """All lines of the file. Of a line longer than `MAX_LINE_BYTES` only the beginning is returned, still longer
    than the limit, so that `read_line` refuses it."""
    while text := file.readline(MAX_LINE_BYTES + 2):
        rest = text
        # 2 bytes of room for CRLF: a longer piece without a line end shows that the line is too long. The rest of the
        # line is read and dropped in pieces, so memory stays bounded.
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 2)
        yield text


def count_lines(path: Path) -> int:
    """The number of non-empty lines; raises `ConfigError` for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="input") from error


def open_output(path: Path) -> tuple[BinaryIO, Completed]:
    """Open the output for appending and read what it already has. An incomplete last line is cut off. Raises
    `ConfigError` for a file that is not the output of a batch, which is left unchanged."""
    completed = Completed(set(), set())
    try:
        # Append mode: all writes go to the end, wherever the last read was.
        file = path.open("a+b")
        file.seek(0)
        end = 0
        for number, text in enumerate(file, 1):
            # An incomplete line can only be the last one: a run was interrupted while writing it.
            if not text.endswith(b"\n"):
                break
            end += len(text)
            _note(text, completed, f"{path} line {number}")
        file.truncate(end)
        file.seek(0, os.SEEK_END)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", param="output") from error
    return file, completed


def _note(text: bytes, completed: Completed, where: str) -> None:
    try:
        record = json.loads(text)
        custom_id, error = record["custom_id"], record["error"]
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise ConfigError(f"{where} is not a batch result; choose another output", param="output") from problem
    # only `write_error` sets ``line``: its line may have no usable ``custom_id``
    if error and "line" in error:
        completed.numbers.add(error["line"])
    else:
        completed.custom_ids.add(custom_id)


def write_response(item: Item, status: int, request_id: str, body: bytes) -> bytes:
    """The output line of a request that got a response, successful or not. ``body`` is encoded JSON and is copied as
    it is."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _write(item, response, None)


def write_error(item: Item) -> bytes:
    """The output line of an input line that is not a valid request."""
    assert item.error is not None
    return _write(
        item, None,
        {"code": item.error.kind, "message": item.error.message, "param": item.error.param, "line": item.number}
    )


def _write(item: Item, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    return msgspec.json.encode(
        {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": item.custom_id, "response": response, "error": error}
    ) + b"\n"


logger = logging.getLogger(__name__)


@dataclass
class InsideResponse:
    """Status, headers (names in lower case) and body."""

    status: int
    headers: dict[str, str]
    body: bytes


class InsideClient:
    """Sends requests to an ASGI application in this process, without a socket. The scope has no `BodyWriter`, so
    whole responses pass through ``send``."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def post(self, path: str, body: bytes) -> InsideResponse:
        """Send JSON and wait for the whole response."""
        requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        response = InsideResponse(500, {}, b"")
        chunks: list[bytes] = []

        async def receive() -> Message:
            if requests:
                return requests.pop()
            await asyncio.get_running_loop().create_future()  # never disconnects; the waiting task is cancelled
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                response.status = message["status"]
                response.headers = {
                    k.decode("latin-1").lower(): v.decode("latin-1") for k, v in message.get("headers", ())
                }
            else:
                chunks.append(message.get("body", b""))

        try:
            await self._app(self._scope(path, len(body)), receive, send)
        # request edge: the application has sent a 500 and raises for the server's log
        except Exception as error:
            if not chunks:
                raise
            logger.error("%s failed", path, exc_info=error)
        response.body = b"".join(chunks)
        return response

    def _scope(self, path: str, size: int) -> dict[str, Any]:
        return {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(),
            "query_string": b"", "root_path": "", "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0),
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(size).encode())],
        }


TRIES = 20
QUEUE_FULL, UNAVAILABLE = 429, 503


@dataclass
class Tally:
    """The number of completed lines, and of those with an error."""

    completed: int = 0
    failed: int = 0


async def run_batch(
    client: InsideClient, items: Iterator[Item], output: BinaryIO, *, concurrency: int,
    advance: Callable[[], None] = lambda: None,
    is_alive: Callable[[], bool] = lambda: True,
) -> Tally:
    """Run all ``items``, at most ``concurrency`` at a time, and write results as they complete. Raises
    `EngineGivenUp` when ``is_alive`` is False: no more results will come."""
    tally = Tally()

    async def work() -> None:
        for item in items:  # all workers share the iterator, so lines are read only as they are needed
            if item.line is None:
                written, is_failed = write_error(item), True
            else:
                response = await _send(client, item, is_alive)
                written = write_response(item, response.status, response.headers.get("x-request-id", ""), response.body)
                is_failed = response.status != 200
            output.write(written)
            output.flush()  # after a crash, only an incomplete last line is lost
            tally.completed += 1
            tally.failed += is_failed
            advance()

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return tally


async def _send(client: InsideClient, item: Item, is_alive: Callable[[], bool]) -> InsideResponse:
    """The response to a request. Retried after the wait that the response asks for: while the engine restarts, which
    may take as long as loading does, and up to `TRIES` times while the queue is full; the last response is returned
    whatever its status. Raises `EngineGivenUp` if the engine has stopped for good."""
    assert item.line is not None
    body, num_left = msgspec.json.encode(item.line.body), TRIES
    while True:
        response = await client.post(item.line.url, body)
        num_left -= response.status == QUEUE_FULL
        if response.status not in (QUEUE_FULL, UNAVAILABLE) or not num_left:
            return response
        if not is_alive():
            raise EngineGivenUp(
                "the engine crashed too often and is not restarted; run the batch again to continue"
            )
        # seconds; the server never sends the date form
        wait_s = float(response.headers.get("retry-after", "1"))
        logger.info("line %d: status %d, retrying in %g s", item.number, response.status, wait_s)
        await asyncio.sleep(wait_s)

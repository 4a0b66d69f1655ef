"""The lines of a batch: requests read, answers written, and which are answered already. Refuses: answering.

`InsideClient`: asks an ASGI application without a socket, so that a batch is answered by the routes of the
server.

`run_batch`: answers the lines of a file, many at a time, each written as soon as it is known. No line stops the
others."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from starlette.types import ASGIApp, Message

from headrace.base.errors import ConfigError, EngineUnavailable, RequestError

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


logger = logging.getLogger(__name__)


@dataclass
class Answer:
    """Status, headers (names in lower case) and body."""

    status: int
    headers: dict[str, str]
    body: bytes


class InsideClient:
    """Each `post` stays connected until it is answered."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def post(self, path: str, body: bytes) -> Answer:
        """Send JSON and wait for the whole answer."""
        requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        answer = Answer(500, {}, b"")
        chunks: list[bytes] = []

        async def receive() -> Message:
            if requests:
                return requests.pop()
            await asyncio.get_running_loop().create_future()  # nobody leaves; whoever waits for that is cancelled
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {
                    k.decode("latin-1").lower(): v.decode("latin-1") for k, v in message.get("headers", ())
                }
            else:
                chunks.append(message.get("body", b""))

        try:
            await self._app(self._scope(path, len(body)), receive, send)
        # the request's edge: the application has answered 500 and tells the server, which is us
        except Exception as error:
            if not chunks:
                raise
            logger.error("%s failed", path, exc_info=error)
        answer.body = b"".join(chunks)
        return answer

    def _scope(self, path: str, size: int) -> dict[str, Any]:
        return {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(),
            "query_string": b"", "root_path": "", "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0),
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(size).encode())],
        }


TRIES = 20
FULL, UNAVAILABLE = 429, 503


@dataclass
class Tally:
    """How many lines were answered, and how many of them with an error."""

    answered: int = 0
    failed: int = 0


async def run_batch(
    client: InsideClient, items: Iterator[Item], output: BinaryIO, *, breadth: int,
    advance: Callable[[], None] = lambda: None,
    is_alive: Callable[[], bool] = lambda: True,
) -> Tally:
    """Answer all ``items``, at most ``breadth`` at a time; answers come in the order in which they are ready. Raises
    `EngineUnavailable` when ``is_alive`` says that no more will come."""
    tally = Tally()

    async def work() -> None:
        for item in items:
            if item.line is None:
                written, is_failed = write_refusal(item), True
            else:
                answer = await _ask(client, item, is_alive)
                written = write_answer(item, answer.status, answer.headers.get("x-request-id", ""), answer.body)
                is_failed = answer.status != 200
            output.write(written)
            output.flush()
            tally.answered += 1
            tally.failed += is_failed
            advance()

    await asyncio.gather(*(work() for _ in range(breadth)))
    return tally


async def _ask(client: InsideClient, item: Item, is_alive: Callable[[], bool]) -> Answer:
    """The answer to a request. While the queue is full or the engine restarts, it is asked again."""
    assert item.line is not None
    body = msgspec.json.encode(item.line.body)
    for _ in range(TRIES):
        answer = await client.post(item.line.url, body)
        if answer.status not in (FULL, UNAVAILABLE):
            break
        if not is_alive():
            raise EngineUnavailable(
                "the engine crashed too often and was given up; run the batch again to go on with it"
            )
        wait_s = float(answer.headers.get("retry-after", "1"))
        logger.info("line %d: status %d, asking again in %g s", item.number, answer.status, wait_s)
        await asyncio.sleep(wait_s)
    return answer

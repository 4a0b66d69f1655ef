"""Recorded requests: read (`read_records`), sent again (`replay`), and compared with the recording (`compare`),
whatever route they use and however a stream was split into events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import ConfigError
from headrace.base.option import Section, option
from headrace.serving.http_client import HttpClient, HttpResponse


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(Section):
    """The server and the timing."""

    base_url: str = option("http://127.0.0.1:8000", "address of the server, with or without /v1", metavar="URL")
    api_key: str | None = option(None, "sent as Authorization: Bearer KEY", metavar="KEY")
    model: str | None = option(None, "model name sent instead of the recorded one", metavar="NAME")
    speed: float = option(
        1.0, "1 keeps the recorded times between requests, 2 halves them; 0 sends as fast as the server accepts",
        low=0.0
    )
    concurrency: int | None = option(
        None, "maximum number of concurrent requests; default 16 at speed 0, else unlimited", low=1, high=65536
    )
    timeout_s: float = option(600.0, "seconds after which a request counts as failed", low=0.1)
    output_file: str | None = option(None, "write the new responses here, in the format of a recording", metavar="FILE")


logger = logging.getLogger(__name__)
NAME = "requests-*.jsonl"
MAX_LINE = 64 * 2**20  # bytes; a longer line is read in parts, each of which is skipped as invalid
NO_BODY = msgspec.Raw(b"null")


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request. ``at`` is wall-clock time; ``seconds`` to the end of the response, ``first_byte_s`` to its first
    byte. ``answer`` is the response text, with all events. Without ``body``, the request was too large to record, or
    not JSON."""

    at: float
    path: str
    body: msgspec.Raw = NO_BODY
    status: int = 0
    answer: str = ""
    seconds: float = 0.0
    first_byte_s: float = 0.0
    request_id: str = "-"
    is_answer_cut: bool = False
    is_complete: bool = True

    @property
    def has_body(self) -> bool:
        """Whether it can be sent again."""
        return bytes(self.body) != bytes(NO_BODY)


def read_records(folder: str) -> list[Record]:
    """All records of a folder or file, in order of arrival. Invalid lines, such as the last one of a killed server, are
    skipped with a warning. Raises `ConfigError` if there are none."""
    path = Path(folder)
    files = sorted(path.glob(NAME)) if path.is_dir() else [path]
    try:
        records = [record for file in files for record in _read_file(file)]
    except OSError as error:
        raise ConfigError(f"cannot read {folder}: {error.strerror}") from error
    if not records:
        raise ConfigError(f"{folder} has no recorded requests; record them with --dump-requests")
    return sorted(records, key=lambda record: record.at)


def _read_file(path: Path) -> Iterator[Record]:
    decode = msgspec.json.Decoder(Record).decode
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE):
            number += 1
            try:
                yield decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                logger.warning("%s line %d is skipped: %s", path.name, number, error)


TEXTS = frozenset(
    {"text", "content", "reasoning_content", "thinking", "response", "arguments", "partial_json", "delta", "name"}
)
"""Fields with model output. Pieces of a stream are joined per field."""
NUMBERS = frozenset({"score", "relevance_score", "embedding", "probs", "data"})

DIGITS = 3
"""Compared digits of numbers: half precision and batching change the others."""
TOKENS = ("completion_tokens", "output_tokens", "eval_count")

Output = dict[tuple[str, str], str]
"""Output text by index of the choice or item, and field."""


def output_of(answer: str) -> Output | None:
    """The output texts in a response body, whole or streamed; None if there are none to compare. Pieces of a stream
    are joined per choice and field, so it does not matter how the text was split into events."""
    found: defaultdict[tuple[str, str], str] = defaultdict(str)
    for document in _documents(answer):
        is_whole = isinstance(document, dict) and "meta_info" in document  # SGLang's frames hold all text so far
        _gather(document, found, index="0", replaces=is_whole)
    return dict(found) or None


def count_tokens(answer: str) -> int:
    """Output tokens by the response's usage; 0 without one."""
    # usage may come with several events; the last and largest is the total
    return max((n for document in _documents(answer) for n in _find_tokens(document)), default=0)


def _documents(answer: str) -> Iterator[Any]:
    """The JSON documents in a response: one for a whole response, one per event or line of a stream."""
    whole = _parse(answer)
    if whole is not None:
        yield whole
        return
    for line in answer.splitlines():
        document = _parse(line.removeprefix("data:").strip())
        if document is not None:
            yield document


def _parse(text: str) -> Any:
    try:
        parsed = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict | list) else None


def _gather(
    value: Any, found: dict[tuple[str, str], str], *, index: str, replaces: bool = False, name: str = ""
) -> None:
    if isinstance(value, dict):
        # Choices have ``index``, items of ``/v1/responses`` have ``output_index``. Nested indices are joined, such as
        # those of a choice's tool calls, so that texts of different owners stay separate.
        own = value.get("index", value.get("output_index"))
        index = f"{index}/{own}" if isinstance(own, int) else index
        for key, item in value.items():
            _gather(item, found, index=index, replaces=replaces, name=key)
    elif isinstance(value, list):
        if name in NUMBERS and all(isinstance(x, int | float) for x in value):
            # a vector, such as an embedding
            found[index, name] += str([round(x, DIGITS) for x in value])
        else:
            for item in value:
                _gather(item, found, index=index, replaces=replaces, name=name)
    elif isinstance(value, str) and name in TEXTS:
        # pieces of one field are concatenated
        found[index, name] = value if replaces else found[index, name] + value
    elif isinstance(value, float) and name in NUMBERS:
        found[index, name] += str(round(value, DIGITS))


def _find_tokens(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        yield from (n for name in TOKENS if isinstance(n := value.get(name), int))
        for item in value.values():
            yield from _find_tokens(item)
    elif isinstance(value, list):
        for item in value:
            yield from _find_tokens(item)


def is_random(record: Record) -> bool:
    """Whether a request samples without a seed, so that its output may differ each time. Parameters are in the body, in
    ``sampling_params`` (SGLang) or in ``options`` (Ollama)."""
    body = msgspec.json.decode(record.body)
    if not isinstance(body, dict):
        return False
    params = body.get("sampling_params") if isinstance(body.get("sampling_params"), dict) else body.get("options")
    fields = {**body, **(params if isinstance(params, dict) else {})}
    return fields.get("temperature") != 0 and fields.get("seed") is None and fields.get("sampling_seed") is None


@dataclass
class Comparison:
    """Counts of a replay against its recording. ``differing``: ids of requests with different output, except those
    sampled at random."""

    num_sent: int = 0
    num_unreachable: int = 0
    same_status: int = 0
    same_answer: int = 0
    different_answer: int = 0
    different_random: int = 0
    not_comparable: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    differing: list[str] = field(default_factory=list)


def compare(pairs: Sequence[tuple[Record, Record]]) -> Comparison:
    """Compare ``(recorded, replayed)`` requests. A replayed status of 0 means that there was no response."""
    result = Comparison(num_sent=len(pairs))
    for before, after in pairs:
        if not after.status:
            result.num_unreachable += 1
            continue
        if before.status != after.status:
            result.statuses[f"{before.status} -> {after.status}"] += 1
            continue
        result.same_status += 1
        _compare_answers(before, after, result)
    return result


def _compare_answers(before: Record, after: Record, result: Comparison) -> None:
    # Only whole responses are compared: a truncated one differs anyway.
    whole = before.is_complete and after.is_complete and not before.is_answer_cut and not after.is_answer_cut
    first, second = (output_of(record.answer) if whole and record.status == 200 else None for record in (before, after))
    if first is None or second is None:
        result.not_comparable += 1
    elif first == second:
        result.same_answer += 1
    elif is_random(before):
        result.different_random += 1
    else:
        result.different_answer += 1
        result.differing.append(before.request_id)


DEFAULT_CONCURRENCY = 16


def readdress(record: Record, model: str | None) -> bytes:
    """The body to send, with another model name if given."""
    body = msgspec.json.decode(record.body)
    if model is None or not isinstance(body, dict) or "model" not in body:
        return bytes(record.body)
    return msgspec.json.encode({**body, "model": model})


async def replay(
    records: Sequence[Record], options: ReplayOptions, on_response: Callable[[], None] = lambda: None
) -> list[Record]:
    """Send ``records``; returns the new responses in the same order, with status 0 for failures. Raises `ConfigError`
    when the server cannot be reached."""
    http = HttpClient(options.base_url, api_key=options.api_key, timeout_s=options.timeout_s)
    limit = options.concurrency or (DEFAULT_CONCURRENCY if not options.speed else 65536)
    room = asyncio.Semaphore(limit)
    await _reach(http)
    begin, first = time.perf_counter(), records[0].at  # `read_records` sorts by time

    async def send(record: Record) -> Record:
        if options.speed:
            # The schedule is kept against the start, so delays do not add up.
            await asyncio.sleep(max(0.0, (record.at - first) / options.speed - (time.perf_counter() - begin)))
        async with room:
            answered = await _send(http, record, options.model)
        on_response()
        return answered

    try:
        return list(await asyncio.gather(*(send(record) for record in records)))
    finally:
        http.close()


async def _reach(http: HttpClient) -> None:
    try:
        await http.send("GET", "/health")
    except OSError as error:
        raise ConfigError(http.explain(error), param="base_url") from error


async def _send(http: HttpClient, record: Record, model: str | None) -> Record:
    at, begin, answer = time.time(), time.perf_counter(), HttpResponse()
    with contextlib.suppress(OSError, ValueError):  # a partial response is kept
        await http.send("POST", record.path, readdress(record, model), response=answer)
    # A head without any body before the failure counts as no response.
    is_answered = answer.is_complete or answer.pieces
    return Record(
        at=at, path=record.path, status=answer.status if is_answered else 0,
        answer=answer.body.decode(errors="replace"), seconds=time.perf_counter() - begin,
        first_byte_s=answer.pieces[0][0] - begin if answer.pieces else 0.0, request_id=record.request_id,
        is_complete=answer.is_complete,
    )

"""Sends recorded requests again: as they came, faster, or as fast as the server takes them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import msgspec

from headrace.base.errors import ConfigError
from headrace.serving.http_client import Answer, HttpClient
from headrace.serving.replay.folder import Record
from headrace.serving.replay.options import ReplayOptions

DEFAULT_CONCURRENCY = 16


def readdress(record: Record, model: str | None) -> bytes:
    """The body to send, calling the model by another name if one is given."""
    body = msgspec.json.decode(record.body)
    if model is None or not isinstance(body, dict) or "model" not in body:
        return bytes(record.body)
    return msgspec.json.encode({**body, "model": model})


async def replay(
    records: Sequence[Record], options: ReplayOptions, on_answer: Callable[[], None] = lambda: None
) -> list[Record]:
    """The answers that the server gives now, in the order of ``records``; status 0 where none came. Raises
    `ConfigError` when there is no server."""
    http = HttpClient(options.base_url, api_key=options.api_key, timeout_s=options.timeout_s)
    most = options.concurrency or (DEFAULT_CONCURRENCY if not options.speed else 65536)
    room = asyncio.Semaphore(most)
    await _reach(http)
    begin, first = time.perf_counter(), records[0].at

    async def send(record: Record) -> Record:
        if options.speed:
            await asyncio.sleep(max(0.0, (record.at - first) / options.speed - (time.perf_counter() - begin)))
        async with room:
            answered = await _send(http, record, options.model)
        on_answer()
        return answered

    try:
        return list(await asyncio.gather(*(send(record) for record in records)))
    finally:
        http.close()


async def _reach(http: HttpClient) -> None:
    try:
        await http.send("GET", "/health")
    except OSError as error:
        raise ConfigError(
            f"no server answers at {http.root}: {str(error) or type(error).__name__}", param="base_url"
        ) from error


async def _send(http: HttpClient, record: Record, model: str | None) -> Record:
    at, begin, answer = time.time(), time.perf_counter(), Answer()
    with contextlib.suppress(OSError, ValueError):  # what came until then is the answer
        await http.send("POST", record.path, readdress(record, model), answer=answer)
    is_answered = answer.is_complete or answer.pieces
    return Record(
        at=at, path=record.path, status=answer.status if is_answered else 0,
        answer=answer.body.decode(errors="replace"), seconds=time.perf_counter() - begin,
        first_byte_s=answer.pieces[0][0] - begin if answer.pieces else 0.0, request_id=record.request_id,
        is_complete=answer.is_complete,
    )

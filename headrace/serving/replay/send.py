"""Sends recorded requests again: as they came, faster, or as fast as the server takes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import aiohttp
import msgspec

from headrace.base.errors import ConfigError
from headrace.serving.replay.folder import Record
from headrace.serving.replay.options import ReplayOptions

DEFAULT_CONCURRENCY = 16


def readdress(record: Record, model: str | None) -> bytes:
    """The body to send, calling the model by another name if one is given."""
    body = msgspec.json.decode(record.body)
    if model is None or not isinstance(body, dict) or "model" not in body:
        return bytes(record.body)
    return msgspec.json.encode({**body, "model": model})


async def replay(records: Sequence[Record], options: ReplayOptions, on_answer: Callable[[], None] = lambda: None) -> list[Record]:
    """The answers that the server gives now, in the order of ``records``; status 0 where none came. Raises `ConfigError` when
    there is no server."""
    if not options.base_url.startswith(("http://", "https://")):
        raise ConfigError(f"base_url must begin with http:// or https://, got {options.base_url!r}", param="base_url")
    root = options.base_url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    most = options.concurrency or (DEFAULT_CONCURRENCY if not options.speed else 65536)
    room = asyncio.Semaphore(most)
    timeout = aiohttp.ClientTimeout(total=options.timeout_s)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0), auto_decompress=True) as session:
        await _reach(session, root)
        begin, first = time.perf_counter(), records[0].at

        async def send(record: Record) -> Record:
            if options.speed:
                await asyncio.sleep(max(0.0, (record.at - first) / options.speed - (time.perf_counter() - begin)))
            async with room:
                answered = await _send(session, root, record, options.model)
            on_answer()
            return answered

        return list(await asyncio.gather(*(send(record) for record in records)))


async def _reach(session: aiohttp.ClientSession, root: str) -> None:
    try:
        async with session.get(root + "/health"):
            return
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConfigError(f"no server answers at {root}: {error}", param="base_url") from error


async def _send(session: aiohttp.ClientSession, root: str, record: Record, model: str | None) -> Record:
    at, begin, first_byte, chunks = time.time(), time.perf_counter(), 0.0, []
    status, is_complete = 0, False
    try:
        async with session.post(root + record.path, data=readdress(record, model), headers={"Content-Type": "application/json"}) as answer:
            status = answer.status
            async for chunk in answer.content.iter_any():
                first_byte = first_byte or time.perf_counter() - begin
                chunks.append(chunk)
            is_complete = True
    except (aiohttp.ClientError, TimeoutError):
        status = status if chunks else 0
    return Record(
        at=at, path=record.path, status=status, answer=b"".join(chunks).decode(errors="replace"), seconds=time.perf_counter() - begin,
        first_byte_s=first_byte, request_id=record.request_id, is_complete=is_complete,
    )

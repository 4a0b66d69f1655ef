"""`run_batch`: answers the lines of a file, many at a time, each written as soon as it is known. No line stops the
others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from headrace.base.errors import EngineUnavailable
from headrace.serving.batch.inside import Answer, InsideClient
from headrace.serving.batch.lines import Item, write_answer, write_refusal

logger = logging.getLogger(__name__)

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

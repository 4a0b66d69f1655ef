"""`BatchReplica`: the actor that answers shards with an engine of its own. Only bytes of msgspec go in and out. Does
not import Ray."""

from __future__ import annotations

import asyncio
import io
import logging

import msgspec

from headrace.base import env
from headrace.base.config import EngineConfig
from headrace.base.errors import HeadraceError
from headrace.base.messages import ErrorInfo
from headrace.base.server_config import ServerConfig
from headrace.service.client.client import EngineClient
from headrace.service.cluster import hand_over
from headrace.serving.batch import BatchLine, InsideClient, Item, run_batch


class ReplicaSetup(msgspec.Struct, frozen=True):
    """The arguments of a replica."""

    config: EngineConfig
    served_model_name: str | None
    log_level: str


class ShardLine(msgspec.Struct, frozen=True, array_like=True):
    """A valid line of a shard."""

    number: int
    line: BatchLine


class ShardResult(msgspec.Struct, frozen=True, array_like=True):
    """``records`` are JSON lines. With ``error`` the replica cannot go on, and there are none."""

    records: bytes = b""
    num_failed: int = 0
    error: ErrorInfo | None = None


def encode_lines(items: list[Item]) -> bytes:
    """The valid lines of a shard, for `BatchReplica.run`."""
    return msgspec.msgpack.encode([ShardLine(item.number, item.line) for item in items if item.line is not None])


def read_items_back(lines: bytes) -> list[Item]:
    """The lines that `encode_lines` has encoded."""
    return [
        Item(each.number, each.line, each.line.custom_id)
        for each in msgspec.msgpack.decode(lines, type=list[ShardLine])
    ]


class BatchReplica:
    """One engine, and the application's routes over it, without a socket."""

    def __init__(self, setup: bytes):
        self._setup = msgspec.msgpack.decode(setup, type=ReplicaSetup)
        env.set_log_level(self._setup.log_level)
        logging.basicConfig(level=self._setup.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
        self._client = EngineClient(hand_over(self._setup.config))
        self._inside: InsideClient | None = None

    async def start(self) -> bytes:
        """Load the model; returns an `ErrorInfo` or nothing."""
        from headrace.serving.http.app import create_app

        try:
            await self._client.start()
            await self._client.wait_ready()
        except HeadraceError as error:
            await self._client.close()
            return msgspec.msgpack.encode(ErrorInfo.of(error))
        self._inside = InsideClient(
            create_app(self._client, ServerConfig(served_model_name=self._setup.served_model_name))
        )
        return b""

    async def run(self, lines: bytes) -> bytes:
        """Answer a shard of `encode_lines`; returns a `ShardResult`. Several may run at a time."""
        assert self._inside is not None, "start comes first"
        items = read_items_back(lines)
        output = io.BytesIO()
        try:
            tally = await run_batch(
                self._inside, iter(items), output, concurrency=max(1, len(items)),
                is_alive=lambda: self._client.state != "stopped",
            )
        except HeadraceError as error:
            return msgspec.msgpack.encode(ShardResult(error=ErrorInfo.of(error)))
        return msgspec.msgpack.encode(ShardResult(output.getvalue(), tally.failed))

    async def stop(self) -> None:
        """End the engine."""
        await asyncio.shield(self._client.close())

"""Messages between agents: msgpack with a length prefix over asyncio streams, bounded, as any process may connect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from headrace.base.errors import TransferFailed
from headrace.service.transport import LENGTH, frame

Message = TypeVar("Message")

MAX_BYTES = 64 << 20
"""Of a message of a known peer: the logprobs of a first token may cover the vocabulary."""
MAX_HELLO_BYTES = 1 << 20
HELLO_S = 2.0
BEAT_S = 1.0
SILENCE_S = 4.0
"""A peer that says nothing for so long hangs."""


class PeerLine:
    """One end of a connection between two agents."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str):
        self.name = name
        self._reader, self._writer = reader, writer

    def send(self, message: Any) -> None:
        """Send without waiting; nothing is raised for a line that broke, as `receive` says so."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    async def receive(
        self, decode: Callable[[bytes], Message], timeout_s: float | None = None, most: int = MAX_BYTES
    ) -> Message:
        """The next message. Raises `TransferFailed` at the end of the line or for what is no message, `TimeoutError`
        after ``timeout_s``."""
        async with asyncio.timeout(timeout_s):
            try:
                length = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))[0]
                if length > most:
                    raise TransferFailed(f"{self.name} sent a message of {length} bytes")
                payload = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, OSError) as error:
                raise TransferFailed(f"the connection with {self.name} ended") from error
        try:
            return decode(payload)
        except ValueError as error:  # msgspec's errors are such
            raise TransferFailed(f"{self.name} sent what is no message: {error}") from error

    def close(self) -> None:
        """Break it."""
        self._writer.transport.abort()

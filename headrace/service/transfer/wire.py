"""Messages between agents: msgpack with a length prefix over asyncio streams, bounded, as any process may connect."""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from headrace.base.errors import TransferFailed
from headrace.base.transfer import Span
from headrace.memory.transfer.contract import AnyRegion
from headrace.service.framing import LENGTH, frame

Message = TypeVar("Message")
Result = TypeVar("Result")

MAX_BYTES = 64 << 20
"""Of a message of a known peer: the logprobs of a first token may cover the vocabulary."""
MAX_HELLO_BYTES = 1 << 20
HELLO_S = 2.0
BEAT_S = 1.0
SILENCE_S = 4.0
"""A peer that says nothing for so long hangs."""


PIECE_BYTES = 8 << 20
"""Of what has a checksum of its own."""
MOST_THREADS = 8


def split_spans(spans: Sequence[Span]) -> list[Span]:
    """The same bytes in pieces of `PIECE_BYTES` at most."""
    return [
        (start, min(PIECE_BYTES, begin + size - start)) for begin, size in spans
        for start in range(begin, begin + size, PIECE_BYTES)
    ]


class Checksums:
    """CRC-32 of pieces, on several threads: one computes a gigabyte a second."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "checksums")

    def compute(self, region: AnyRegion, begin: int, spans: Sequence[Span]) -> list[int]:
        """Of spans of a region, which count from ``begin`` on; 0 for each where the host cannot read its bytes."""
        data = region.data
        if not data.size:
            return [0] * len(spans)
        return list(self._threads.map(
            lambda span: zlib.crc32(data[begin + span[0] : begin + span[0] + span[1]].data), spans
        ))


async def run_in_thread(call: Callable[..., Result], *arguments: Any) -> Result:
    """Return what a call does that takes its time; raises `TransferFailed` too where no thread can be started."""
    try:
        return await asyncio.to_thread(call, *arguments)
    except RuntimeError as error:
        raise TransferFailed(f"the transfer agent: {error}") from error


class LineBroken(TransferFailed):
    """The connection ended by no doing of the peer, as far as can be seen: it may still be there."""


class PeerLine:
    """One end of a connection between two agents."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str):
        self.name = name
        self._reader, self._writer = reader, writer
        self._length: int | None = None  # of the message whose rest is still to come

    def send(self, message: Any) -> None:
        """Send without waiting; nothing is raised for a line that broke, as `receive` says so."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    async def receive(
        self, decode: Callable[[bytes], Message], timeout_s: float | None = None, most: int = MAX_BYTES
    ) -> Message:
        """The next message. Raises `TransferFailed` when the peer has ended the line, or for what is no message,
        `LineBroken` when the network has, and `TimeoutError` after ``timeout_s``; a message of which a part has come by
        then is the next one still."""
        async with asyncio.timeout(timeout_s):
            try:
                if self._length is None:
                    self._length = int(LENGTH.unpack(await self._reader.readexactly(LENGTH.size))[0])
                if self._length > most:
                    raise TransferFailed(f"{self.name} sent a message of {self._length} bytes")
                payload = await self._reader.readexactly(self._length)
            except asyncio.IncompleteReadError as error:
                raise TransferFailed(f"the connection with {self.name} ended") from error
            except TimeoutError as error:
                if error.errno is None:
                    raise
                raise LineBroken(f"the connection with {self.name} broke: {error}") from error
            except OSError as error:
                raise LineBroken(f"the connection with {self.name} broke: {error}") from error
        self._length = None
        try:
            return decode(payload)
        except ValueError as error:  # msgspec's errors are such
            raise TransferFailed(f"{self.name} sent what is no message: {error}") from error

    def close(self) -> None:
        """Break it."""
        self._writer.transport.abort()

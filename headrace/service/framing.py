"""Framing of what processes send each other: msgpack messages, each with a length prefix (uint32, little-endian).
Behind a request with media come the bytes of these, which are never encoded, and read into the memory they stay in.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from headrace.base.messages import ToEngine, WithData, decode_to_engine, encode

LENGTH = struct.Struct("<I")
READ_BYTES = 1 << 18
"""Most bytes of one read. It bounds how long a flood of messages holds up a step: some 30 prompts of 2,000 tokens take
6 ms."""
LARGE_BYTES = 1 << 16
"""Media from this size on are read into memory that is not zeroed first, see `_allocate`."""

Message = TypeVar("Message")


def frame(message: Any) -> bytes:
    """A message with its length prefix."""
    payload = encode(message)
    return LENGTH.pack(len(payload)) + payload


class Frames(Generic[Message]):
    """Splits a byte stream into messages. Lengths are not bounded: both ends are our own processes."""

    def __init__(self, decode: Callable[[bytearray], Message]):
        self._decode = decode
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Add received bytes; returns the messages that they complete."""
        rest, messages, begin = self._rest, [], 0
        rest += data
        while len(rest) - begin >= LENGTH.size:
            end = begin + LENGTH.size + LENGTH.unpack_from(rest, begin)[0]
            if end > len(rest):
                break
            messages.append(self._decode(rest[begin + LENGTH.size : end]))
            begin = end
            if isinstance(messages[-1], WithData):  # no message follows
                break
        del rest[:begin]
        return messages

    def take_rest(self) -> bytearray:
        """Received bytes that belong to no message yet."""
        rest, self._rest = self._rest, bytearray()
        return rest


class Buffers:
    """Memory that bytes of known ``sizes`` are read into, one after the other."""

    def __init__(self, sizes: Sequence[int]):
        self._views = [_allocate(size) for size in sizes]
        self._left = deque(view for view in self._views if len(view))

    @property
    def room(self) -> memoryview | None:
        """Where the next bytes belong; None when all are there."""
        return self._left[0] if self._left else None

    def advance(self, count: int) -> None:
        """Note that ``count`` bytes were written to `room`."""
        rest = self._left[0][count:]
        if len(rest):
            self._left[0] = rest
        else:
            self._left.popleft()

    def fill(self, data: bytes | bytearray) -> memoryview:
        """Copy bytes that were read elsewhere; returns those that are left over."""
        rest = memoryview(data)
        while len(rest) and (room := self.room) is not None:
            count = min(len(rest), len(room))
            room[:count] = rest[:count]
            self.advance(count)
            rest = rest[count:]
        return rest

    @property
    def data(self) -> list[Any]:
        """What was read, read-only: a `memoryview` for each size."""
        return [view.toreadonly() for view in self._views]


def read_all(line: socket.socket, sizes: Sequence[int]) -> list[Any]:
    """Read so many bytes each from a blocking socket, as `Buffers.data`; `ConnectionResetError` if it ends before."""
    buffers = Buffers(sizes)
    while (room := buffers.room) is not None:
        count = line.recv_into(room)
        if not count:
            raise ConnectionResetError("the other end is closed")
        buffers.advance(count)
    return buffers.data


def _allocate(size: int) -> memoryview:
    """Memory that is not filled with zeros, which would take as long as reading."""
    if size < LARGE_BYTES:
        return memoryview(bytearray(size))
    import numpy as np  # here, as it takes a while, and few have media

    return np.empty(size, np.uint8).data


class RequestFrames:
    """Splits what an engine receives into messages: `Frames`, and the data behind requests with media."""

    def __init__(self) -> None:
        self._frames: Frames[ToEngine | WithData] = Frames(decode_to_engine)
        self._request: WithData | None = None  # whose data are being read
        self._buffers = Buffers([])

    @property
    def room(self) -> memoryview | None:
        """Where the next bytes are to be read to, without a copy; None for `feed`."""
        return self._buffers.room

    def advance(self, count: int) -> list[ToEngine]:
        """Note that ``count`` bytes were read into `room`; returns the message that they complete, if any."""
        if count:
            self._buffers.advance(count)
        return self._take_whole()

    def feed(self, data: bytes) -> list[ToEngine]:
        """Add received bytes; returns the messages that they complete."""
        found: list[ToEngine] = []
        while True:
            for message in self._frames.feed(data):
                if isinstance(message, WithData):
                    self._request, self._buffers = message, Buffers(message.sizes)
                else:
                    found.append(message)
            if self._request is None:
                return found
            data = bytes(self._buffers.fill(self._frames.take_rest()))
            found += self._take_whole()
            if self._request is not None:
                return found

    def _take_whole(self) -> list[ToEngine]:
        if self._request is None or self._buffers.room is not None:
            return []
        whole, self._request = self._request.join(self._buffers.data), None
        self._buffers = Buffers([])
        return [whole]

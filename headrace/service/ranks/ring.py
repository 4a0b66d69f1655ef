"""A ring of messages in shared memory: one writer, several readers in other processes; each gets every message.

Layout: a line of 64 bytes for the writer, whose first word is ``head``, the number of bytes written so far; a line for
each reader, with its ``cursor`` (bytes read so far) and whether it sleeps; then ``capacity`` bytes of data. A frame is
8 bytes of header and its payload, padded to 8 bytes: length (the highest bit: the message goes on in the next frame),
and a CRC-32 that begins with the frame's position. The checksum is what makes a frame valid, so nothing depends on the
order in which processors make stores visible: a reader that sees ``head`` before the bytes reads them again.

Readers poll for a moment, then announce that they sleep and wait for their eventfd. The announcement and ``head`` are
not ordered either, so a wake-up may be lost; a sleep therefore ends after `SLEEP_MS`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
import sys
import time
import zlib
from collections.abc import Callable

import msgspec

from headrace.base.errors import ConfigError, EngineUnavailable

CAPACITY = 4 << 20
"""Bytes of data: room for a plan with a prompt of 800 000 tokens."""
LINE_WORDS, WORD_BYTES = 8, 8
FRAME = struct.Struct("<II")
GOES_ON = 1 << 31
SLEEP_MS = 10
"""Longest sleep of a reader before it looks itself; see above."""
WRITER_PAUSE_S = 2e-4
WRITE_TIMEOUT_S = 300.0
SPIN_CPU_S, SPIN_GPU_S = 5e-5, 1e-3
"""How long a reader polls before it sleeps: on a CPU it takes the time from ranks that compute on the same cores."""
TORN_S = 1.0
"""A frame whose checksum is wrong for so long is broken, and not only late."""


class RingPlace(msgspec.Struct, frozen=True, array_like=True):
    """What a reader needs to open its end: inherited descriptors, of the memory and of its eventfd."""

    memory: int
    waker: int
    reader: int
    num_readers: int
    capacity: int


class _Map:
    """The shared memory, as words of the header and bytes of data."""

    def __init__(self, memory: int, num_readers: int, capacity: int):
        self.memory, self.capacity = memory, capacity
        header = WORD_BYTES * LINE_WORDS * (1 + num_readers)
        self._map = mmap.mmap(memory, header + capacity)
        whole = memoryview(self._map)
        self.words, self.data = whole[:header].cast("Q"), whole[header:]
        whole.release()
        self.most = capacity // 4 - FRAME.size  # payload of a frame: a writer never waits for the whole ring

    def close(self) -> None:
        self.words.release()
        self.data.release()
        self._map.close()
        os.close(self.memory)


def _check_capacity(capacity: int) -> None:
    if capacity < 128 or capacity % 32:
        raise ValueError(f"the capacity of a ring is a multiple of 32, and at least 128; got {capacity}")


class RingWriter:
    """The writing end; creates the ring. Not thread-safe."""

    def __init__(self, num_readers: int, capacity: int = CAPACITY):
        if sys.platform != "linux":
            raise ConfigError("several ranks need Linux; leave it at 1", param="tensor_parallel_size")
        _check_capacity(capacity)
        self._num_readers, self._head = num_readers, 0
        memory = os.memfd_create("headrace-ring", os.MFD_CLOEXEC)
        os.ftruncate(memory, WORD_BYTES * LINE_WORDS * (1 + num_readers) + capacity)
        self._map = _Map(memory, num_readers, capacity)
        self._wakers = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(num_readers)]

    def place(self, reader: int) -> RingPlace:
        """Where reader ``reader`` finds its end; its process has to inherit both descriptors, or get copies."""
        return RingPlace(self._map.memory, self._wakers[reader], reader, self._num_readers, self._map.capacity)

    def write(
        self, message: bytes, check: Callable[[], None] = lambda: None, timeout_s: float = WRITE_TIMEOUT_S
    ) -> None:
        """Append a message of any size. While a reader is a ring behind, waits and calls ``check``, which may raise;
        `EngineUnavailable` after ``timeout_s`` seconds. The ring cannot be used after an error."""
        rest = memoryview(message)
        while True:
            part, rest = rest[: self._map.most], rest[self._map.most :]
            self._write_frame(part, bool(rest), check, timeout_s)
            if not rest:
                return

    def close(self) -> None:
        """Free the memory and close the descriptors."""
        self._map.close()
        for waker in self._wakers:
            os.close(waker)

    def _write_frame(
        self, payload: memoryview, goes_on: bool, check: Callable[[], None], timeout_s: float
    ) -> None:
        data, capacity = self._map.data, self._map.capacity
        size = FRAME.size + -(-len(payload) // 8) * 8
        self._await_room(size, check, timeout_s)
        place = self._head % capacity
        checksum = zlib.crc32(payload, self._head & 0xFFFFFFFF)
        FRAME.pack_into(data, place, len(payload) | (GOES_ON if goes_on else 0), checksum)
        begin = (place + FRAME.size) % capacity
        num_first = min(len(payload), capacity - begin)
        data[begin : begin + num_first] = payload[:num_first]
        data[: len(payload) - num_first] = payload[num_first:]
        self._head += size
        self._map.words[0] = self._head
        for reader, waker in enumerate(self._wakers):
            if self._map.words[LINE_WORDS * (1 + reader) + 1]:
                with contextlib.suppress(BlockingIOError):  # 2 ** 64 - 2 unread wake-ups
                    os.eventfd_write(waker, 1)

    def _await_room(self, size: int, check: Callable[[], None], timeout_s: float) -> None:
        deadline = None
        while self._head + size - self._slowest() > self._map.capacity:
            check()
            now = time.monotonic()
            deadline = deadline or now + timeout_s
            if now > deadline:
                raise EngineUnavailable(f"a rank has read no command for {timeout_s:.0f} seconds")
            time.sleep(WRITER_PAUSE_S)

    def _slowest(self) -> int:
        cursors = (self._map.words[LINE_WORDS * (1 + reader)] for reader in range(self._num_readers))
        return min(cursors, default=self._head)


class RingReader:
    """A reading end, in another process or thread; takes over the descriptors of its place."""

    def __init__(self, place: RingPlace, spin_s: float = SPIN_CPU_S):
        self._map = _Map(place.memory, place.num_readers, place.capacity)
        self._line = LINE_WORDS * (1 + place.reader)
        self._cursor = self._map.words[self._line]
        self._waker, self._spin_s = place.waker, spin_s
        self._poll = select.poll()
        self._poll.register(place.waker, select.POLLIN)
        self._parts: list[bytes] = []

    def receive(self, wait_s: float) -> bytes | None:
        """The next message, or None when it does not come within ``wait_s`` seconds."""
        deadline = time.monotonic() + wait_s
        while self._await_frame(deadline):
            part, goes_on = self._take_frame()
            self._parts.append(part)
            if not goes_on:
                message, self._parts = b"".join(self._parts), []
                return message
        return None

    def close(self) -> None:
        """Close the descriptors."""
        self._map.close()
        os.close(self._waker)

    def _await_frame(self, deadline: float) -> bool:
        words, cursor = self._map.words, self._cursor
        if words[0] != cursor:
            return True
        spin_end = min(time.monotonic() + self._spin_s, deadline)
        while time.monotonic() < spin_end:
            if words[0] != cursor:
                return True
            os.sched_yield()
        words[self._line + 1] = 1
        try:
            while words[0] == cursor:
                rest_s = deadline - time.monotonic()
                if rest_s <= 0:
                    return False
                if self._poll.poll(min(SLEEP_MS, rest_s * 1e3)):
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._waker)
            return True
        finally:
            words[self._line + 1] = 0

    def _take_frame(self) -> tuple[bytes, bool]:
        deadline = time.monotonic() + TORN_S
        while (frame := self._read_frame()) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the frame at {self._cursor} of the command ring is broken")
        payload, goes_on = frame
        self._cursor += FRAME.size + -(-len(payload) // 8) * 8
        self._map.words[self._line] = self._cursor
        return payload, goes_on

    def _read_frame(self) -> tuple[bytes, bool] | None:
        """The payload at the cursor and whether the message goes on; None if not all of it is visible yet."""
        data, capacity = self._map.data, self._map.capacity
        place = self._cursor % capacity
        length, checksum = FRAME.unpack_from(data, place)
        goes_on, length = bool(length & GOES_ON), length & ~GOES_ON
        if length > self._map.most:
            return None
        begin = (place + FRAME.size) % capacity
        num_first = min(length, capacity - begin)
        payload = bytes(data[begin : begin + num_first]) + bytes(data[: length - num_first])
        if zlib.crc32(payload, self._cursor & 0xFFFFFFFF) != checksum:
            return None
        return payload, goes_on

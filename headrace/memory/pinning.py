"""`register`: tells the driver of memory that a GPU copies from and to. `Pinning` does so on a thread, as it takes a
second for every few gigabytes. Refuses: owning that memory. `PinnedReserve` has pinned memory before it is needed.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 * 2**20
"""Bytes that are registered at a time: meanwhile launches of others wait."""


PIECE_BYTES = 2 << 20
"""Bytes that a `PinnedReserve` pins at a time, for the same reason."""
NEW_S, PAUSES = 1e-4, 4
"""Seconds that pinning takes at least, and how many times as long it is paused then: launches of others wait meanwhile.
Memory that torch has already takes less."""
QUIET_S = 0.1
"""Seconds without a piece being taken, after which more are pinned: what needs them, and its launches, go first."""


def register(address: int, num_bytes: int) -> Any | None:
    """Pin memory; returns the driver's error, None without one."""
    error = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
    if int(error) == 0:
        return None
    _forget_error()
    return error


def _forget_error() -> None:
    """The runtime keeps a call's error for the thread, and torch would report it of the next kernel that it launches.
    torch has no function for that; this finds the library that torch has loaded."""
    with suppress(OSError):  # linked into torch: then it stays
        ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}").cudaGetLastError()


class Pinning:
    """Of ``memory`` [N] uint8 on the host, from its beginning on. Pinned memory is copied faster, and beside
    computation; the rest can be copied too. ``populate(begin, num_bytes)`` commits the memory, without changing it: the
    driver would do so far more slowly, while launches wait."""

    def __init__(self, memory: torch.Tensor, device: torch.device, populate: Callable[[int, int], None]):
        self._memory, self._device, self._populate = memory, device, populate
        self._ends = threading.Event()
        self.num_bytes = 0  # pinned
        threading.Thread(target=self._run, name="pinning", daemon=True).start()

    def end(self) -> None:
        """Unpin, without waiting for it. No copy may be under way."""
        self._ends.set()

    def split(self, begin: int, num_bytes: int) -> Iterator[tuple[int, int]]:
        """The same bytes as ``(begin, bytes)``, cut where one copy may not go on."""
        end = begin + num_bytes
        while begin < end:
            size = min(end, (begin // CHUNK_BYTES + 1) * CHUNK_BYTES) - begin
            yield begin, size
            begin += size

    def _run(self) -> None:
        torch.cuda.set_device(self._device.index or 0)
        addresses = []
        for begin in range(0, self._memory.numel(), CHUNK_BYTES):
            if self._ends.is_set():
                break
            size = min(CHUNK_BYTES, self._memory.numel() - begin)
            self._populate(begin, size)
            address = self._memory.data_ptr() + begin
            error = register(address, size)
            if error is not None:
                logger.warning("the driver pins no more memory of transfers (%s): they are slower", error)
                break
            addresses.append(address)
            self.num_bytes = begin + size
        self._ends.wait()
        for address in addresses:
            torch.cuda.cudart().cudaHostUnregister(address)


def pin_new(num_bytes: int) -> torch.Tensor:
    """Pinned memory [num_bytes] uint8, of torch: when it is dropped, the next of about the same size need not be
    pinned, once copies from it are done."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class PinnedReserve:
    """Up to ``num_pieces`` pieces of `PIECE_BYTES` of pinned memory that are ready when they are needed: ``pin`` is
    called for them on a thread, with pauses, from the beginning on and some time after some were taken. For any
    thread."""

    def __init__(self, num_pieces: int, pin: Callable[[int], torch.Tensor] = pin_new):
        self._num_pieces, self._pin = num_pieces, pin
        self._pieces: deque[torch.Tensor] = deque()
        self._is_short, self._is_closed, self._has_begun = threading.Event(), False, False
        self._is_short.set()
        self._thread = threading.Thread(target=self._refill, name="pinned-reserve", daemon=True)
        self._thread.start()

    @property
    def num_ready(self) -> int:
        """Pieces that are there now."""
        return len(self._pieces)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Memory [num_bytes] uint8 of the caller's own: a piece, or what is pinned now where a piece is too small or
        none is left."""
        if num_bytes > PIECE_BYTES:
            return self._pin(num_bytes)
        try:
            piece = self._pieces.popleft()
        except IndexError:
            piece = self._pin(PIECE_BYTES)  # whole: it may be one of the reserve when it has been dropped
        self._is_short.set()
        return piece[:num_bytes]

    def close(self) -> None:
        """Pin no more, and drop what is left. Idempotent."""
        self._is_closed = True
        self._is_short.set()
        self._thread.join()
        self._pieces.clear()

    def _refill(self) -> None:
        while self._is_short.wait() and not self._is_closed:
            self._is_short.clear()
            if self._has_begun and self._pieces and self._is_short.wait(QUIET_S):
                continue
            self._has_begun = True
            while len(self._pieces) < self._num_pieces and not self._is_closed:
                began = time.monotonic()
                try:
                    self._pieces.append(self._pin(PIECE_BYTES))
                except RuntimeError as error:
                    logger.warning("no more memory is pinned ahead of adapters: %s", error)
                    return
                seconds = time.monotonic() - began
                if seconds > NEW_S:  # launches of others waited
                    time.sleep(PAUSES * seconds)

"""`register`: tells the driver of memory that a GPU copies from and to. `Pinning` does so on a thread, as it takes a
second for every few gigabytes. Refuses: owning the memory.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 * 2**20
"""Bytes that are registered at a time: meanwhile launches of others wait."""


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

"""`SharedMemory`: agents of one host map each other's regions in host memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Literal

import numpy as np

from headrace.base.errors import TransferFailed
from headrace.memory.transfer.contract import AnyRegion, Copy, Region, refuse_unknown
from headrace.memory.transfer.door import Door, take_descriptor

MOST_THREADS = 8
"""That copy at a time: one thread does not fill the memory's bandwidth."""


class SharedDestination:
    """A peer's region, mapped. It stays valid when the peer dies, as mapped memory does."""

    def __init__(self, region: AnyRegion, peer: Region):
        self._region, self.peer = region, peer
        self._threads = _create_threads()

    def write(self, copies: Sequence[Copy]) -> None:
        """See `Destination`."""
        for copy in copies:
            self._region.check(copy.begin, copy.num_bytes)
            self.peer.check(copy.target, copy.num_bytes)
        try:
            list(self._threads.map(self._write, copies))
        except (MemoryError, RuntimeError, ValueError) as error:
            # Others began that may still run, or wait for a thread.
            self._threads.shutdown(cancel_futures=True)
            self._threads = _create_threads()
            raise TransferFailed(f"a copy to the peer's memory failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """See `Destination`."""
        self._threads.shutdown()
        self.peer.close()

    def _write(self, copy: Copy) -> None:
        source = self._region.data[copy.begin : copy.begin + copy.num_bytes]
        np.copyto(self.peer.data[copy.target : copy.target + copy.num_bytes], source)


def _create_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "copies")


class SharedMemory:
    """See `TransferBackend`."""

    memory: ClassVar[Literal["host"]] = "host"

    def __init__(self, region: AnyRegion, options: Mapping[str, str]):
        refuse_unknown(options, ())
        self._region, self._door = region, Door(region)

    def handle(self) -> bytes:
        """See `TransferBackend`."""
        return self._door.handle

    def connect(self, handle: bytes) -> SharedDestination:
        """See `TransferBackend`."""
        descriptor, num_bytes = take_descriptor(handle)
        try:
            if os.fstat(descriptor).st_size < num_bytes:
                raise TransferFailed("the peer's memory is smaller than it said")
            return SharedDestination(self._region, Region(descriptor, num_bytes))
        except (OSError, TransferFailed) as error:
            os.close(descriptor)
            if isinstance(error, TransferFailed):
                raise
            raise TransferFailed(f"the peer's memory cannot be mapped: {error}") from error

    def close(self) -> None:
        """See `TransferBackend`."""
        self._door.close()

"""`PeerLane`: copies between a device's pools and the region that the engine shares with its transfer agent.

Refuses: peers, and which bytes of the region are free; moves say where.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
import torch

from headrace.base.step import Arrival, PageMove
from headrace.memory.moving import failed
from headrace.memory.paging import PageCopier

logger = logging.getLogger(__name__)


class _Copying(NamedTuple):
    """A move on a GPU, the event behind it, and the device memory that it passes through."""

    move: PageMove
    done: torch.cuda.Event
    staging: torch.Tensor


class PeerLane:
    """On a CPU moves end when they are started. On a GPU pages leave by way of device memory, gathered in order of the
    current stream, so that steps launched later may overwrite them; copies run beside the steps on a stream of their
    own."""

    def __init__(self, device: torch.device):
        self._device = device
        self._copier: PageCopier | None = None
        self._region = torch.empty(0, dtype=torch.uint8)
        self._epoch = 0
        self._pinned = 0  # address that the driver was told of
        self._ended: list[Arrival] = []
        self._copying: list[_Copying] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def attach(self, copier: PageCopier | None) -> None:
        """Copy from and to other pools from now on; None for none. No move may be under way."""
        self._copier = copier

    def map(self, data: np.ndarray, epoch: int) -> None:
        """Use another region, uint8; moves of other epochs fail from now on. Those under way end with the old one."""
        ended = [*self._ended, *(Arrival(copying.move.ticket) for copying in self._copying)]
        self.reset()
        self._ended = ended  # only a reset of the executor forgets tickets: whoever opened these still waits
        self._unpin()
        self._region, self._epoch = torch.from_numpy(data), epoch
        if self._stream is not None:
            error = torch.cuda.cudart().cudaHostRegister(self._region.data_ptr(), self._region.numel(), 0)
            if int(error) == 0:
                self._pinned = self._region.data_ptr()
            else:
                logger.warning("the driver does not pin the memory of transfers (%s): they are slower", error)

    def start(self, move: PageMove) -> None:
        """See `headrace.memory.moving.Lane`."""
        epoch, begin = (int(part) for part in move.peer.split())
        copier = self._copier
        if copier is None or epoch != self._epoch:
            self._ended.append(failed(move))
            return
        width = copier.page_bytes(move.group)
        rows = self._region[begin : begin + move.num_pages * width].view(move.num_pages, width)
        try:
            if self._stream is None:
                self._copy(copier, move, rows)
                self._ended.append(Arrival(move.ticket))
            else:
                self._launch(copier, move, rows, self._stream)
        except torch.OutOfMemoryError:
            logger.warning("no device memory to move %d pages by; they are computed again", move.num_pages)
            self._ended.append(failed(move))

    def poll(self) -> list[Arrival]:
        """See `headrace.memory.moving.Lane`."""
        while self._copying and self._copying[0].done.query():
            self._ended.append(Arrival(self._copying.pop(0).move.ticket))
        ended, self._ended = self._ended, []
        return ended

    def reset(self) -> None:
        """See `headrace.memory.moving.Lane`."""
        if self._stream is not None:
            self._stream.synchronize()
        self._copying.clear()
        self._ended.clear()

    def close(self) -> None:
        """See `headrace.memory.moving.Lane`."""
        self.reset()
        self._unpin()
        self._region = torch.empty(0, dtype=torch.uint8)

    def _copy(self, copier: PageCopier, move: PageMove, rows: torch.Tensor) -> None:
        if move.source == "device":
            copier.gather(move.group, move.source_pages, rows, move.target_pages)
        else:
            copier.scatter(move.group, move.target_pages, rows, move.source_pages)

    def _launch(self, copier: PageCopier, move: PageMove, rows: torch.Tensor, stream: torch.cuda.Stream) -> None:
        current = torch.cuda.current_stream(self._device)
        staging = torch.empty(rows.shape, dtype=torch.uint8, device=self._device)
        if move.source == "device":
            self._copy(copier, move, staging)
        stream.wait_stream(current)  # also before pages are written: steps launched before may still read them
        with torch.cuda.stream(stream):
            if move.source == "device":
                rows.copy_(staging, non_blocking=True)
            else:
                staging.copy_(rows, non_blocking=True)
                self._copy(copier, move, staging)
            done = torch.cuda.Event()
            done.record(stream)
        staging.record_stream(stream)
        self._copying.append(_Copying(move, done, staging))

    def _unpin(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
            self._pinned = 0

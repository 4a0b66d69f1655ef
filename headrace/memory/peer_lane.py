"""`PeerLane`: copies between a device's pools and the region that the engine shares with its transfer agent.

Refuses: peers, and which bytes of the region are free; moves say where.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from headrace.base.step import Arrival, PageMove
from headrace.memory.head_rows import HeadRows, count_heads
from headrace.memory.moving import failed
from headrace.memory.paging import PageCopier
from headrace.memory.pinning import Pinning
from headrace.memory.transfer.contract import AnyRegion
from headrace.parallel.share import Share

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
ARRIVING_BYTES, MOST_ARRIVING = 256 << 20, 2
"""Of pages that have come to a GPU: bytes that are copied into its pools behind one step, 0.2 ms of an H200's, and how
many such copies may not have ended. All at once, a long prompt's pages would keep the tokens of others waiting."""


class _Copying(NamedTuple):
    """Pages on their way on a GPU, and the event behind them. ``arrival``: how their move ends then; None where others
    of its pages follow."""

    arrival: Arrival | None
    done: torch.cuda.Event
    is_arriving: bool = False


class _Arriving(NamedTuple):
    """Pages ``[begin, end)`` of a move that are still to be copied from memory of the GPU into its pools."""

    move: PageMove
    begin: int
    end: int


class PeerLane:
    """Rows of the region have the heads of all ranks (`HeadRows`); this one copies its own: ``shares`` by cache group,
    by default all. Of a head that several ranks hold, the first one's leaves: ``leaves`` by group.

    On a CPU moves end when they are started. On a GPU pages leave in order of the current stream, so that steps
    launched later may overwrite them: into the region, where it is memory of the GPU, else by way of device memory, and
    copies to and from the host run beside the steps on a stream of their own. From the region of a GPU pages come piece
    by piece, one a `poll`, and so one a step."""

    def __init__(
        self, device: torch.device, shares: Sequence[Share] | None = None, leaves: Sequence[bool] | None = None
    ):
        self.device, self._shares, self._leaves = device, shares, leaves
        self._heads: list[HeadRows] = []
        self._passage = torch.empty(0, dtype=torch.uint8)
        self._copier: PageCopier | None = None
        self._region = torch.empty(0, dtype=torch.uint8)
        self.find_region: Callable[[], None] = lambda: None
        """Called for a move in a region that is not mapped here: may `map` it."""
        self._epoch = 0
        self._pinning: Pinning | None = None
        self._ended: list[Arrival] = []
        self._copying: list[_Copying] = []
        self._arriving: deque[_Arriving] = deque()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def attach(self, copier: PageCopier | None) -> None:
        """Copy from and to other pools from now on; None for none. No move may be under way. Kernels are compiled here.
        Raises `ConfigError` for pools whose heads are divided and cannot be told apart."""
        self._copier = copier
        if copier is not None:
            shares = self._shares or [Share.whole(count_heads(parts)) for parts in copier.parts]
            self._heads = [HeadRows(parts, share) for parts, share in zip(copier.parts, shares, strict=True)]
            for group in range(len(self._heads) if self._stream is not None else 0):
                if copier.page_bytes(group):
                    copier.warm_up(group, self._own_rows(1, copier.page_bytes(group)))

    @property
    def page_bytes(self) -> list[int]:
        """Of a row by cache group; they stay when pools are replaced."""
        return [heads.num_bytes for heads in self._heads]

    @property
    def head_counts(self) -> list[int]:
        """By cache group, the kv heads that a row has apart."""
        return [heads.share.size for heads in self._heads]

    def map(self, region: AnyRegion | None, epoch: int) -> None:
        """Use another region, or none; moves of other epochs fail from now on. Those under way end with the old one."""
        ended = [*self._ended, *(copying.arrival for copying in self._copying if copying.arrival is not None)]
        ended += [failed(arriving.move) for arriving in self._arriving if arriving.end == arriving.move.num_pages]
        self.reset()
        self._ended = ended  # only a reset of the executor forgets tickets: whoever opened these still waits
        self._drop_region()
        self._epoch = epoch
        if region is None:
            return
        if region.data.size:
            self._region = torch.from_numpy(region.data)
            if self._stream is not None:
                self._pinning = Pinning(self._region, self.device, region.populate)
        else:
            self._region = torch.as_tensor(region, device=self.device)

    def start(self, move: PageMove) -> None:
        """See `headrace.memory.moving.Lane`."""
        epoch, begin = (int(part) for part in move.peer.split())
        if epoch != self._epoch:
            self.find_region()
        copier = self._copier
        if copier is None or epoch != self._epoch:
            self._ended.append(failed(move))
            return
        width = self._heads[move.group].num_bytes
        rows = self._region[begin : begin + move.num_pages * width].view(move.num_pages, width)
        try:
            if move.source == "device" and self._leaves is not None and not self._leaves[move.group]:
                self._ended.append(Arrival(move.ticket))
            elif self._stream is None:
                self._copy(copier, move, rows)
                self._ended.append(Arrival(move.ticket))
            elif rows.is_cuda and move.source == "device":
                self._copy(copier, move, rows)
                self._record(Arrival(move.ticket))
            elif rows.is_cuda:
                self._divide(move)
            else:
                self._launch(copier, move, begin, self._stream)
        except torch.OutOfMemoryError:
            logger.warning("no device memory to move %d pages by; they are computed again", move.num_pages)
            self._ended.append(failed(move))

    def poll(self) -> list[Arrival]:
        """See `headrace.memory.moving.Lane`."""
        while self._copying and self._copying[0].done.query():
            arrival = self._copying.pop(0).arrival
            if arrival is not None:
                self._ended.append(arrival)
        if self._arriving and sum(copying.is_arriving for copying in self._copying) < MOST_ARRIVING:
            self._copy_next()
        ended, self._ended = self._ended, []
        return ended

    def reset(self) -> None:
        """See `headrace.memory.moving.Lane`."""
        for copying in self._copying:
            copying.done.synchronize()
        self._copying.clear()
        self._arriving.clear()
        self._ended.clear()

    def close(self) -> None:
        """See `headrace.memory.moving.Lane`."""
        self.reset()
        self._drop_region()

    def _divide(self, move: PageMove) -> None:
        size = max(1, ARRIVING_BYTES // max(1, self._heads[move.group].num_bytes))
        for begin in range(0, move.num_pages, size):
            self._arriving.append(_Arriving(move, begin, min(begin + size, move.num_pages)))

    def _copy_next(self) -> None:
        move, begin, end = self._arriving.popleft()
        width, offset = self._heads[move.group].num_bytes, int(move.peer.split()[1])
        rows = self._region[offset + begin * width : offset + end * width].view(end - begin, width)
        try:
            assert self._copier is not None, "pools are replaced when no move is under way"
            self._copy(self._copier, move, rows, begin)
        except torch.OutOfMemoryError:
            logger.warning("no device memory to move %d pages by; they are computed again", move.num_pages)
            self._arriving = deque(arriving for arriving in self._arriving if arriving.move is not move)
            self._record(failed(move), is_arriving=True)  # behind what still reads the region under this ticket
            return
        self._record(Arrival(move.ticket) if end == move.num_pages else None, is_arriving=True)

    def _copy(self, copier: PageCopier, move: PageMove, rows: torch.Tensor, first: int = 0) -> None:
        """Between the pages of a move from its ``first`` on and the rows that they have in the region."""
        heads, leaves = self._heads[move.group], move.source == "device"
        pages = (move.source_pages if leaves else move.target_pages)[first : first + len(rows)]
        own_bytes = copier.page_bytes(move.group)
        # Through memory that stays in a CPU's caches; on a GPU all at once.
        size = len(pages) if rows.is_cuda or heads.is_plain else max(1, PIECE_BYTES // max(1, own_bytes))
        for begin in range(0, len(pages), size):
            some, part = pages[begin : begin + size], rows[begin : begin + size]
            places = list(range(len(some)))
            own = part if heads.is_plain else self._own_rows(len(some), own_bytes)
            if leaves:
                copier.gather(move.group, some, own, places)
            if not heads.is_plain:
                (heads.to_peers if leaves else heads.from_peers)(own, part)
            if not leaves:
                copier.scatter(move.group, some, own, places)

    def _own_rows(self, count: int, own_bytes: int) -> torch.Tensor:
        """Rows of the pool on their way; on a CPU always the same memory, as the system clears new pages first."""
        size = count * own_bytes
        if self.device.type != "cpu":
            return torch.empty((count, own_bytes), dtype=torch.uint8, device=self.device)
        if self._passage.numel() < size:
            self._passage = torch.empty(size, dtype=torch.uint8)
        return self._passage[:size].view(count, own_bytes)

    def _launch(self, copier: PageCopier, move: PageMove, begin: int, stream: torch.cuda.Stream) -> None:
        assert self._pinning is not None
        current = torch.cuda.current_stream(self.device)
        width = self._heads[move.group].num_bytes
        staging = torch.empty(move.num_pages * width, dtype=torch.uint8, device=self.device)
        rows = staging.view(move.num_pages, width)
        pieces = [
            (staging[start - begin : start - begin + size], self._region[start : start + size])
            for start, size in self._pinning.split(begin, staging.numel())
        ]
        if move.source == "device":
            self._copy(copier, move, rows)
        stream.wait_stream(current)  # also before pages are written: steps launched before may still read them
        with torch.cuda.stream(stream):
            for on_device, on_host in pieces:
                if move.source == "device":
                    on_host.copy_(on_device, non_blocking=True)
                else:
                    on_device.copy_(on_host, non_blocking=True)
            if move.source != "device":
                self._copy(copier, move, rows)
            self._record(Arrival(move.ticket))
        staging.record_stream(stream)

    def _record(self, arrival: Arrival | None, *, is_arriving: bool = False) -> None:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        self._copying.append(_Copying(arrival, done, is_arriving))

    def _drop_region(self) -> None:
        if self._pinning is not None:
            self._pinning.end()
            self._pinning = None
        self._region = torch.empty(0, dtype=torch.uint8)

"""`HostPages`: pages in host memory, one slab per cache group; `HostLane`: copies between them and a device's pools.

Refuses: which page holds what (the scheduler knows). A row of a slab is a page with all its layers.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from headrace.base.cache import CacheGroup
from headrace.base.step import Arrival, PageMove
from headrace.memory.moving import failed
from headrace.memory.paging import PageCopier
from headrace.memory.pinning import register

logger = logging.getLogger(__name__)

SYSTEM_PAGE = 4096
CHUNK_BYTES = 64 * 2**20
"""Bytes of a slab that are registered with the driver at a time: meanwhile launches of others wait."""
BUSY_S, BUSY_PAUSES = 0.1, 9
"""For so long after a look for moves, which every step takes, steps count as running; then a chunk is followed by a
pause of so many times what registering it took."""
LOAD_BYTES = 2 * 32 * 2**20
"""Device memory through which pages come from the host: while one half is filled, the other is scattered."""


class HostPages:
    """``rows[g]`` [host pages, page bytes] uint8, committed as they are written. For a GPU the driver is told of them
    in the background (pinned memory is copied faster, and beside computation). Until then a row is not `is_usable`: it
    is cleared meanwhile, and nothing may be written to it."""

    def __init__(self, groups: list[CacheGroup], page_bytes: list[int], device: torch.device):
        self.rows: list[torch.Tensor] = []
        self._usable: list[int] = []  # by group: rows before it are usable
        self._chunks: list[int] = []  # by group: rows of a chunk, within which one copy may extend
        self._maps: list[mmap.mmap] = []
        self._is_closing = False
        for group, width in zip(groups, page_bytes, strict=True):
            stride = -(-width // SYSTEM_PAGE) * SYSTEM_PAGE  # whole system pages: chunks are registered apart
            num_bytes = max(SYSTEM_PAGE, group.host_pages * stride)
            slab = mmap.mmap(-1, num_bytes)
            slab.madvise(mmap.MADV_HUGEPAGE)
            self._maps.append(slab)
            flat = torch.frombuffer(slab, dtype=torch.uint8)
            self.rows.append(flat[: group.host_pages * stride].view(group.host_pages, stride)[:, :width])
            self._chunks.append(max(1, CHUNK_BYTES // max(1, stride)))
            # A group without layers in this pipeline stage has no bytes: there is nothing to register.
            self._usable.append(group.host_pages if device.type != "cuda" or not width else 0)
        self._registered: list[int] = []
        self._busy_until = 0.0
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            self._thread = threading.Thread(target=self._register, args=(device,), name="host-pages", daemon=True)
            self._thread.start()

    def is_usable(self, group: int, pages: list[int]) -> bool:
        """Whether these rows can be read and written now."""
        return max(pages, default=0) < self._usable[group]

    def runs(self, group: int, pages: list[int]) -> list[tuple[int, int, int]]:
        """Runs of consecutive rows that one copy may cover: ``(index in pages, first row, count)``."""
        found: list[tuple[int, int, int]] = []
        chunk = self._chunks[group]
        is_dense = self.rows[group].is_contiguous()
        for index, page in enumerate(pages):
            if found and is_dense and page % chunk:
                at, first, count = found[-1]
                if page == first + count:
                    found[-1] = at, first, count + 1
                    continue
            found.append((index, page, 1))
        return found

    def note_step(self) -> None:
        """A step runs: it should not wait for the driver much."""
        self._busy_until = time.monotonic() + BUSY_S

    def _pause(self, seconds: float) -> None:
        """After a chunk whose registration took ``seconds``."""
        limit = time.monotonic() + BUSY_PAUSES * seconds
        while not self._is_closing and (now := time.monotonic()) < min(limit, self._busy_until):
            time.sleep(min(limit - now, BUSY_S / 4))

    def _register(self, device: torch.device) -> None:
        torch.cuda.set_device(device.index or 0)
        for group, rows in enumerate(self.rows):
            for begin in range(self._usable[group], len(rows), self._chunks[group]):
                if self._is_closing:
                    return
                end = min(len(rows), begin + self._chunks[group])
                # Touched first: the driver would fault the memory in itself, far slower, while others' launches wait.
                rows[begin:end].zero_()
                address, size = rows[begin].data_ptr(), (end - begin) * rows.stride(0)
                began = time.monotonic()
                error = register(address, size)
                if error is not None:
                    logger.warning(
                        "the driver pins no more host memory (%s): %d of %d host pages are used", error, begin,
                        len(rows)
                    )
                    return
                self._registered.append(address)
                self._usable[group] = end
                self._pause(time.monotonic() - began)

    def close(self) -> None:
        """Free the memory; no copy may be under way."""
        self._is_closing = True
        if self._thread is not None:
            self._thread.join()
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._registered.clear()
        self.rows.clear()
        self._maps.clear()  # unmapped with the last tensor that refers to them


class HostLane:
    """Copies between the host's pages and those of a CPU's pools. Reading them happens on a thread; writing does not,
    as the device's page may change with the plan that writes it."""

    def __init__(self, host: HostPages, wake: Callable[[], None]):
        self._host, self._wake = host, wake
        self._copier: PageCopier | None = None
        self._thread = ThreadPoolExecutor(1, "host-pages")
        self._ended: list[Arrival] = []
        self._reading: dict[Future[None], PageMove] = {}

    def attach(self, copier: PageCopier | None) -> None:
        """Copy from and to other pools from now on; None for none. No move may be under way."""
        self._copier = copier

    def start(self, move: PageMove) -> None:
        """See `headrace.memory.moving.Lane`."""
        copier = self._copier
        if copier is None:
            self._ended.append(failed(move))
        elif move.target == "host":
            copier.gather(move.group, move.source_pages, self._host.rows[move.group], move.target_pages)
            self._ended.append(Arrival(move.ticket))
        else:
            reading = self._thread.submit(self._read, copier, move)
            self._reading[reading] = move
            reading.add_done_callback(lambda _: self._wake())

    def _read(self, copier: PageCopier, move: PageMove) -> None:
        with torch.inference_mode():
            copier.scatter(move.group, move.target_pages, self._host.rows[move.group], move.source_pages)

    def poll(self) -> list[Arrival]:
        """See `headrace.memory.moving.Lane`."""
        ended, self._ended = self._ended, []
        for reading in [reading for reading in self._reading if reading.done()]:
            move = self._reading.pop(reading)
            error = reading.exception()
            if error is not None:
                logger.error("pages did not come from the host: %s", error)
            ended.append(Arrival(move.ticket) if error is None else failed(move))
        return ended

    def reset(self) -> None:
        """See `headrace.memory.moving.Lane`."""
        for reading in self._reading:
            reading.exception()  # waits
        self._reading.clear()
        self._ended.clear()

    def close(self) -> None:
        """See `headrace.memory.moving.Lane`."""
        self._thread.shutdown(wait=True)
        self.reset()
        self._copier = None


@dataclass
class _Copies:
    """Moves of one direction, oldest first, each with the event behind it and the staging rows that it uses. Their
    events are recorded on ``stream``."""

    stream: torch.cuda.Stream
    moves: list[tuple[PageMove, torch.cuda.Event, list[int]]] = field(default_factory=list)


class GpuHostLane:
    """Copies between the host's pages and those of a GPU's pools, on streams of their own.

    Pages to be written are first gathered into device memory, in order of the main stream: the steps that follow may
    overwrite them while the copy engine still works. Pages that are read go through device memory too, and are
    scattered behind the steps that were launched before: these may still use the pages.
    """

    def __init__(self, host: HostPages, groups: list[CacheGroup], page_bytes: list[int], device: torch.device):
        self._host, self._device = host, device
        self._copier: PageCopier | None = None
        self._outgoing = _Copies(torch.cuda.Stream(device))
        self._incoming = _Copies(torch.cuda.Stream(device))
        self._ended: list[Arrival] = []
        self._staging = [
            torch.empty((group.store_pages, width), dtype=torch.uint8, device=device)
            for group, width in zip(groups, page_bytes, strict=True)
        ]
        self._free = [list(range(group.store_pages - 1, -1, -1)) for group in groups]
        # at least a page of the largest group each
        half = max([LOAD_BYTES // 2, *page_bytes])
        self._halves = [
            (stream, torch.empty(half, dtype=torch.uint8, device=device))
            for stream in (self._incoming.stream, torch.cuda.Stream(device))
        ]

    def attach(self, copier: PageCopier | None) -> None:
        """See `HostLane`. The kernels are compiled here, on the null pages."""
        self._copier = copier
        if copier is not None:
            for group, rows in enumerate(self._staging):
                if rows.numel():
                    copier.warm_up(group, rows)

    @torch.inference_mode()
    def start(self, move: PageMove) -> None:
        """See `headrace.memory.moving.Lane`."""
        copier = self._copier
        host_pages = move.target_pages if move.target == "host" else move.source_pages
        is_full = move.target == "host" and move.num_pages > len(self._free[move.group])
        if copier is None or is_full or not self._host.is_usable(move.group, host_pages):
            self._ended.append(failed(move))
        elif not copier.page_bytes(move.group):
            self._ended.append(Arrival(move.ticket))
        else:
            try:
                (self._write if move.target == "host" else self._read)(copier, move)
            except RuntimeError:
                self._synchronize()  # what was begun of it
                raise

    def _write(self, copier: PageCopier, move: PageMove) -> None:
        free, staging, rows = self._free[move.group], self._staging[move.group], self._host.rows[move.group]
        places = sorted(free[-move.num_pages :])  # consecutive ones where possible
        copier.gather(move.group, move.source_pages, staging, places)
        outgoing = self._outgoing
        outgoing.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(outgoing.stream):
            for index, first, count in self._host.runs(move.group, move.target_pages):
                for at, place, length in _consecutive(places, index, count):
                    begin = first + at - index
                    rows[begin : begin + length].copy_(staging[place : place + length], non_blocking=True)
            self._record(outgoing, move, places)
        del free[-move.num_pages :]

    def _read(self, copier: PageCopier, move: PageMove) -> None:
        width, rows = copier.page_bytes(move.group), self._host.rows[move.group]
        size = len(self._halves[0][1]) // width
        main = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._incoming.stream):
            targets, places = copier.upload(move.target_pages), copier.upload(list(range(size)))
        for stream, _ in self._halves:
            stream.wait_stream(main)
            stream.wait_stream(self._incoming.stream)  # of the upload
        for number, begin in enumerate(range(0, move.num_pages, size)):
            stream, buffer = self._halves[number % 2]
            filled = buffer[: size * width].view(size, width)
            pages = move.source_pages[begin : begin + size]
            with torch.cuda.stream(stream):  # in order of the stream: the half's last pages are scattered by then
                for index, first, count in self._host.runs(move.group, pages):
                    filled[index : index + count].copy_(rows[first : first + count], non_blocking=True)
                copier.scatter_uploaded(move.group, targets[begin : begin + size], filled, places[: len(pages)])
        other = self._halves[1][0]
        targets.record_stream(other)
        places.record_stream(other)
        self._incoming.stream.wait_stream(other)
        self._record(self._incoming, move, [])

    def _record(self, copies: _Copies, move: PageMove, places: list[int]) -> None:
        event = torch.cuda.Event()
        event.record(copies.stream)
        copies.moves.append((move, event, places))

    def poll(self) -> list[Arrival]:
        """See `headrace.memory.moving.Lane`."""
        self._host.note_step()
        ended, self._ended = self._ended, []
        for copies in (self._outgoing, self._incoming):
            while copies.moves and copies.moves[0][1].query():
                move, _, places = copies.moves.pop(0)
                self._free[move.group] += reversed(places)
                ended.append(Arrival(move.ticket))
        return ended

    def reset(self) -> None:
        """See `headrace.memory.moving.Lane`."""
        self._synchronize()
        self.poll()

    def _synchronize(self) -> None:
        for stream in (self._outgoing.stream, *(stream for stream, _ in self._halves)):
            stream.synchronize()

    def close(self) -> None:
        """See `headrace.memory.moving.Lane`."""
        self.reset()
        self._copier = None
        self._staging.clear()
        self._halves.clear()


def _consecutive(places: list[int], begin: int, count: int) -> list[tuple[int, int, int]]:
    """Runs of consecutive numbers in ``places[begin : begin + count]``: ``(index, first number, length)``."""
    found: list[tuple[int, int, int]] = []
    for index in range(begin, begin + count):
        if found and places[index] == found[-1][1] + found[-1][2]:
            at, first, length = found[-1]
            found[-1] = at, first, length + 1
        else:
            found.append((index, places[index], 1))
    return found

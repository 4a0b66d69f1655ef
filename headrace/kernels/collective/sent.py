"""`SentSums`: sums of large tensors that copy engines write into peers' memory while multiprocessors compute something
else.

A mailbox has a ring of bytes for them, with as many sums under way as fit. A peer reads what it was sent at some point
of its own stream, and the place may be written again only behind that. Nobody says when: a rank that has read what a
peer sent for sum n knows that the peer had come as far as sending it, and so had read all that it reads before; other
collectives tell the same. `Ring` counts this on the host, alike on all ranks, as it follows from the order of calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from ctypes import c_size_t, c_uint64, c_void_p
from dataclasses import dataclass

import torch

from headrace.kernels.collective.calls import TYPES, VECTOR, Call, Kernels, Sent, Sum, is_aligned
from headrace.kernels.collective.parts import MOST_WIDTH, shape_row
from headrace.kernels.cuda_source import call_driver

FLAGS = 64
"""Sums that can be under way at once: each has a flag for every peer."""
MARKS = 1 << 16
"""Different values of flags, a multiple of `FLAGS`. A flag is set by a copy too, from a table of all values."""
ALIGNMENT = 256


@dataclass(frozen=True)
class Place:
    """Of a sum: its number, its first byte in the ring and one past its last; ``num_read``: how many sums had been read
    when it was sent."""

    number: int
    begin: int
    end: int
    num_read: int

    @property
    def mark(self) -> int:
        """What its flags are set to."""
        return self.number % MARKS + 1


class Ring:
    """Places of sums in ``capacity`` bytes. They are read in the order in which they were sent; those that are left out
    never are, as where a step failed."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._held: deque[Place] = deque()  # may not be written yet
        self._num_sent = self._num_read = 0

    @property
    def is_held(self) -> bool:
        """Whether any place may not be written yet."""
        return bool(self._held)

    def take(self, num_bytes: int) -> Place | None:
        """A place for the next sum; None, and no such sum, where peers may still read what is there."""
        begin = self._find(num_bytes)
        if begin is None or len(self._held) == FLAGS:
            return None
        place = Place(self._num_sent, begin, begin + num_bytes, self._num_read)
        self._held.append(place)
        self._num_sent += 1
        return place

    def read(self, place: Place) -> None:
        """What peers sent for that sum has been read here."""
        assert place.number >= self._num_read, "sums are read in their order"
        self._num_read = place.number + 1
        self._free(place.num_read)  # each peer had sent this sum, so it had read all that it reads before

    def meet(self) -> None:
        """All peers had come as far as this rank is now, before anything that is sent from now on."""
        self._free(self._num_read)

    def _free(self, num_read: int) -> None:
        while self._held and self._held[0].number < num_read:
            self._held.popleft()

    def _find(self, size: int) -> int | None:
        if not self._held:
            return 0 if size <= self._capacity else None
        first, last = self._held[0], self._held[-1]
        if last.begin < first.begin:  # they go round the end
            return last.end if last.end + size <= first.begin else None
        if last.end + size <= self._capacity:
            return last.end
        return 0 if size <= first.begin else None


class Sending:
    """A sum under way, see `headrace.kernels.collective.BegunSum`: ``x``, its place in the ring, and the event behind
    this rank's own copies."""

    def __init__(self, sums: SentSums, x: torch.Tensor, place: Place, copied: torch.cuda.Event):
        self.x, self.place, self.copied = x, place, copied
        self._sums = sums

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `BegunSum`."""
        assert x is self.x
        self._sums.add(self)
        return x

    def reduce_add_norm(
        self, x: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `BegunSum`."""
        assert x is self.x
        is_alike = weight.dtype == stream.dtype == x.dtype and stream.stride(1) == 1
        if not is_alike or not is_aligned(stream) or not is_aligned(weight):
            return None
        self._sums.add(self, stream, weight, eps, offset)
        return x, stream


class SentSums:
    """See `headrace.kernels.collective.LargeSums`. Of ``mailboxes`` flags begin at ``start``, and the ring follows."""

    def __init__(self, kernels: Kernels, call: Call, mailboxes: Sequence[int], start: int, capacity: int):
        self._kernels, self._call, self._mailboxes = kernels, call, mailboxes
        self._flags_at, self._slots_at = start, start + room_for(kernels.ranks, 0)
        self._ring = Ring(capacity)
        self._stream = torch.cuda.Stream(kernels.device)
        self._marks = torch.arange(1, MARKS + 1, dtype=torch.int32, device=kernels.device)

    def begin(self, x: torch.Tensor) -> Sending | None:
        """See `LargeSums`."""
        width = x.shape[-1] * x.element_size()
        if x.dtype not in TYPES or x.dim() != 2 or not x.is_contiguous() or not x.numel() or x.data_ptr() % VECTOR:
            return None
        # numbers of sums are the host's, and would be the same in each replay of a graph
        if width % VECTOR or width > MOST_WIDTH * VECTOR or torch.cuda.is_current_stream_capturing():
            return None
        peers = [peer for peer in range(len(self._mailboxes)) if peer != self._call.rank]
        place = self._ring.take(len(peers) * _align(x.nbytes))
        if place is None:
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._kernels.device))
        for peer in peers:
            self._copy(peer, self._slots_at + place.begin, _align(x.nbytes), x.data_ptr(), x.nbytes)
        mark = self._marks.data_ptr() + 4 * (place.mark - 1)
        for peer in peers:  # behind all data
            self._copy(peer, self._find_flags(place), 4, mark, 4)
        return Sending(self, x, place, self._stream.record_event())

    def meet(self) -> None:
        """All ranks do something together on their current streams."""
        if self._ring.is_held and not torch.cuda.is_current_stream_capturing():
            self._ring.meet()

    def _copy(self, peer: int, slots: int, slot_bytes: int, source: int, num_bytes: int) -> None:
        """To this rank's slot among those at a place of a peer's mailbox."""
        own = self._call.rank
        target = self._mailboxes[peer] + slots + (own if own < peer else own - 1) * slot_bytes
        call_driver(
            "cuMemcpyDtoDAsync_v2", c_uint64(target), c_uint64(source), c_size_t(num_bytes),
            c_void_p(self._stream.cuda_stream),
        )

    def _find_flags(self, place: Place) -> int:
        return self._flags_at + place.number % FLAGS * 4 * (len(self._mailboxes) - 1)

    def add(
        self, sending: Sending, stream: torch.Tensor | None = None, weight: torch.Tensor | None = None,
        eps: float = 0.0, offset: float = 0.0,
    ) -> None:
        """Launch the kernel that waits for the peers' parts and overwrites ``sending.x``: with the sum, or with the
        normalised ``stream``, to which it has been added."""
        x, place = sending.x, sending.place
        rows, width = len(x), x.shape[1] * x.element_size() // VECTOR
        per_thread, threads = shape_row(width)
        # in place: a thread reads what it overwrites, and the copies have ended
        torch.cuda.current_stream(self._kernels.device).wait_event(sending.copied)
        total = Sum(
            call=self._call, x=x.data_ptr(), out=x.data_ptr(), x_stride=width * VECTOR, rows=rows, width=width,
            vectors=rows * width, eps=eps, offset=offset,
        )
        if stream is not None and weight is not None:
            total.stream, total.weight = stream.data_ptr(), weight.data_ptr()
            total.stream_stride = stream.stride(0) * stream.element_size()
        call = Sent(total, self._find_flags(place), self._slots_at + place.begin, _align(x.nbytes), place.mark)
        self._kernels.launch(f"sent_{per_thread}_{int(weight is not None)}", x.dtype, rows, threads, call)
        self._ring.read(place)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def room_for(ranks: int, capacity: int) -> int:
    """Bytes of a mailbox that flags and a ring take."""
    return _align(4 * FLAGS * (ranks - 1)) + capacity

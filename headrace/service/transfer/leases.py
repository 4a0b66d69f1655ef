"""`Leases`: which bytes of a region are taken. First fit, as leases are few and live for seconds."""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGNMENT = 64


class Leases:
    """Ranges of a region by ticket."""

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes
        self._taken: list[tuple[int, int]] = []  # (begin, end), in order
        self._by_ticket: dict[int, tuple[int, int]] = {}

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._by_ticket

    @property
    def num_taken_bytes(self) -> int:
        """Bytes under a ticket."""
        return sum(end - begin for begin, end in self._taken)

    def acquire(self, ticket: int, num_bytes: int) -> int | None:
        """The first byte of a free range, or None when there is none."""
        assert ticket not in self._by_ticket, f"ticket {ticket} has a lease"
        size, begin = -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT, 0
        for taken_begin, taken_end in self._taken:
            if taken_begin - begin >= size:
                break
            begin = taken_end
        if begin + size > self.num_bytes:
            return None
        self._by_ticket[ticket] = begin, begin + size
        insort(self._taken, (begin, begin + size))
        return begin

    def release(self, ticket: int) -> None:
        """Free a lease; unknown tickets are ignored, as a new region knows none of the old."""
        lease = self._by_ticket.pop(ticket, None)
        if lease is not None:
            del self._taken[bisect_left(self._taken, lease)]

    def clear(self) -> None:
        """The region is new."""
        self._taken.clear()
        self._by_ticket.clear()

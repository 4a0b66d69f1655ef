"""`PinnedReserve` by memory that is not pinned: when it asks for some, and what it does where there is none."""

from __future__ import annotations

import threading

import torch

from headrace.memory.pinning import PIECE_BYTES, PinnedReserve

WAIT_S = 20


class Memory:
    """What a reserve pins; after ``most`` pieces it has to wait for `refill`, and ``fails`` once there are none."""

    def __init__(self, most: int, *, fails: bool = False):
        self.sizes: list[int] = []
        self.full, self.asked_by = threading.Event(), set[str]()
        self._most, self._fails = most, fails

    def pin(self, num_bytes: int) -> torch.Tensor:
        if self._fails and len(self.sizes) == self._most:
            self.full.set()
            raise RuntimeError("no memory")
        self.sizes.append(num_bytes)
        self.asked_by.add(threading.current_thread().name)
        if len(self.sizes) == self._most and not self._fails:
            self.full.set()
        return torch.empty(num_bytes, dtype=torch.uint8)


def wait_until_ready(reserve: PinnedReserve, count: int) -> None:
    ready = threading.Event()
    for _ in range(WAIT_S * 100):
        if reserve.num_ready == count:
            return
        ready.wait(0.01)
    raise AssertionError(f"{reserve.num_ready} pieces are ready, not {count}")


def test_pieces_are_pinned_ahead_and_again():
    memory = Memory(3)
    reserve = PinnedReserve(3, memory.pin)
    wait_until_ready(reserve, 3)
    taken = [reserve.take(size) for size in (0, 5, PIECE_BYTES)]
    assert [len(piece) for piece in taken] == [0, 5, PIECE_BYTES]
    assert len({piece.untyped_storage().data_ptr() for piece in taken}) == 3
    wait_until_ready(reserve, 3)
    assert memory.sizes == [PIECE_BYTES] * 6 and memory.asked_by == {"pinned-reserve"}
    reserve.close()
    assert not reserve.num_ready


def test_what_no_piece_holds_is_pinned_for_the_caller():
    memory = Memory(0, fails=True)
    reserve = PinnedReserve(2, memory.pin)
    assert memory.full.wait(WAIT_S)
    memory._fails = False
    assert len(reserve.take(7)) == 7 and len(reserve.take(PIECE_BYTES + 1)) == PIECE_BYTES + 1
    assert memory.sizes == [PIECE_BYTES, PIECE_BYTES + 1] and memory.asked_by == {threading.current_thread().name}
    reserve.close()

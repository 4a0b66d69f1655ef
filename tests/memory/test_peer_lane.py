"""Pages between a device's pools and the region that is shared with a transfer agent."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest
import torch

from headrace.base.cache import CacheGroup, CacheSpec
from headrace.base.step import Arrival, PageMove
from headrace.kernels.late import LateKernels
from headrace.memory.paging import PageCopier
from headrace.memory.peer_lane import PeerLane, _Copying
from headrace.memory.pools import build_pool
from headrace.memory.transfer import door
from headrace.memory.transfer.contract import Region
from headrace.memory.transfer.door import Door, RegionMapping

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device_name", DEVICES)
def test_a_new_region_ends_what_was_under_way_with_the_old_one(device_name: str):
    device = torch.device(device_name)
    pool = build_pool(CacheGroup(CacheSpec("full", 3, 8, 8, "float32"), [0, 1], 12), 16, device)
    copier = PageCopier([pool], device)
    for part in pool.parts:
        part.tensor.view(torch.uint8).fill_(7)
    lane, size = PeerLane(device), 4 * copier.page_bytes(0)
    lane.attach(copier)
    old, new = Region.create(size), Region.create(size)
    lane.map(old, 5)
    lane.start(PageMove(1, 0, "device", "peer", [3, 4], [0, 1], peer="5 0"))
    lane.map(new, 6)
    lane.start(PageMove(2, 0, "device", "peer", [3], [0], peer="5 0"))
    assert sorted(lane.poll(), key=lambda arrival: arrival.ticket) == [Arrival(1), Arrival(2, [0])]
    assert old.data[: size // 2].min() == 7 and new.data.max() == 0
    lane.close()
    assert lane.poll() == []


def test_a_region_that_could_not_be_mapped_at_once_is_mapped_later(monkeypatch: pytest.MonkeyPatch):
    """For lack of descriptors, as it may be: pages are lost until then, not for ever."""
    device = torch.device("cpu")
    pool = build_pool(CacheGroup(CacheSpec("full", 3, 8, 8, "float32"), [0, 1], 12), 16, device)
    lane, copier = PeerLane(device), PageCopier([pool], device)
    for part in pool.parts:
        part.tensor.view(torch.uint8).fill_(7)
    lane.attach(copier)
    region = Region.create(copier.page_bytes(0))
    owner, mapping, take, now = Door(region), RegionMapping(lane.map), door.take_descriptor, [100.0]
    lane.find_region = mapping.retry

    def fail(handle: bytes) -> tuple[int, int]:
        raise OSError(errno.EMFILE, "too many open files")

    def move(ticket: int) -> list[Arrival]:
        lane.start(PageMove(ticket, 0, "device", "peer", [3], [0], peer="5 0"))
        return lane.poll()

    monkeypatch.setattr(door, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(door, "take_descriptor", fail)
    mapping.open(owner.handle, 5)
    assert move(1) == [Arrival(1, [0])]
    monkeypatch.setattr(door, "take_descriptor", take)
    assert move(2) == [Arrival(2, [0])], "it was tried a moment ago"
    now[0] += door.RETRY_S
    assert move(3) == [Arrival(3)] and region.data.min() == 7
    mapping.open(b"", 0)
    assert move(4) == [Arrival(4, [0])]
    owner.close()
    region.close()
    lane.close()


@pytest.mark.cuda
def test_no_step_waits_for_the_kernels_of_copies():
    device = torch.device("cuda")
    pool = build_pool(CacheGroup(CacheSpec("full", 3, 8, 8, "bfloat16"), [0, 1, 2], 12), 16, device)
    lane, region, late = PeerLane(device), torch.zeros(1 << 20, dtype=torch.uint8, device=device), LateKernels(device)
    lane.attach(PageCopier([pool], device))
    lane._region, lane._epoch = region, 1
    with late.watch():
        lane.start(PageMove(1, 0, "device", "peer", [3, 4], [0, 1], peer="1 0"))
        lane.start(PageMove(2, 0, "peer", "device", [0], [5], peer="1 0"))
        ended = []
        while len(ended) < 2:
            ended += lane.poll()
    assert late.count == 0
    lane.close()


class StepEvent:
    """Ends when the test says that the step behind it has."""

    def __init__(self) -> None:
        self.has_ended = False

    def query(self) -> bool:
        return self.has_ended

    def synchronize(self) -> None:
        self.has_ended = True


class PacedLane(PeerLane):
    """On a CPU, the way that pages come in on a GPU."""

    def start(self, move: PageMove) -> None:
        self._divide(move)

    def _record(self, arrival: Arrival | None, *, is_arriving: bool = False) -> None:
        self._copying.append(_Copying(arrival, StepEvent(), is_arriving))

    def end_steps(self) -> None:
        for copying in self._copying:
            copying.done.has_ended = True


def test_pages_of_a_prompt_come_to_a_gpu_piece_by_piece(monkeypatch):
    """At most a piece a poll, and two that have not ended; each page once and whole, and the move ends with the last. A
    region that goes takes what has not come, and nothing is under way behind it."""
    device = torch.device("cpu")
    pool = build_pool(CacheGroup(CacheSpec("full", 1, 8, 8, "float32"), [0, 1], 12), 16, device)
    copier = PageCopier([pool], device)
    lane, width = PacedLane(device), copier.page_bytes(0)
    monkeypatch.setattr("headrace.memory.peer_lane.ARRIVING_BYTES", 2 * width)
    lane.attach(copier)
    region, pages = Region.create(8 * width), [9, 3, 4, 11, 2]
    region.data[:] = torch.randint(0, 256, (8 * width,), dtype=torch.uint8).numpy()
    lane.map(region, 5)
    read = torch.empty(12, width, dtype=torch.uint8)

    def find_there() -> list[int]:
        copier.gather(0, list(range(12)), read, list(range(12)))
        rows = torch.from_numpy(region.data).view(8, width)
        return [i for i, page in enumerate(pages) if torch.equal(read[page], rows[2 + i])]

    move = PageMove(1, 0, "peer", "device", list(range(5)), pages, peer=f"5 {2 * width}")
    lane.start(move)
    assert find_there() == []
    assert lane.poll() == [] and find_there() == [0, 1]
    assert lane.poll() == [] and find_there() == [0, 1, 2, 3]
    assert lane.poll() == [] and find_there() == [0, 1, 2, 3]  # two have not ended
    lane.end_steps()
    assert lane.poll() == [] and find_there() == [0, 1, 2, 3, 4]
    lane.end_steps()
    assert lane.poll() == [Arrival(1)]
    lane.start(move)
    lane.poll()
    lane.map(None, 6)
    assert lane.poll() == [Arrival(1, list(range(5)))]
    lane.end_steps()
    assert lane.poll() == []

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    lane.map(region, 7)
    lane.start(move)
    lane.poll()
    monkeypatch.setattr(lane, "_copy", fail)
    assert lane.poll() == []  # the first piece still reads the region
    lane.end_steps()
    assert lane.poll() == [Arrival(1, list(range(5)))] and lane.poll() == []
    lane.close()

"""Pages to host memory and back: bytes of every kind of pool, in order with what overwrites them."""

from __future__ import annotations

import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from headrace.base.cache import CacheGroup, CacheSpec
from headrace.base.errors import ConfigError
from headrace.base.step import Arrival, PageMove
from headrace.memory import host, mapped, pinning
from headrace.memory.host import GpuHostLane, HostLane, HostPages
from headrace.memory.moving import PageMover
from headrace.memory.paging import PageCopier
from headrace.memory.pools import Pool, build_pool

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
HOST_PAGES, STORE_PAGES = 20, 6
SPECS = {
    "full": CacheSpec("full", 3, 8, 5, "float32"), "window": CacheSpec("sliding_window", 2, 64, 64, "bfloat16", 8),
    "latent": CacheSpec("mla", 1, 24, 16, "bfloat16"),
}


class Setup:
    def __init__(self, specs: list[CacheSpec], device: str, num_layers: int = 2):
        self.device = torch.device(device)
        self.groups = [
            CacheGroup(spec, list(range(num_layers)), 12, 0, HOST_PAGES, STORE_PAGES) for spec in specs
        ]
        self.pools: list[Pool] = [build_pool(group, 16, self.device) for group in self.groups]
        copier = PageCopier(self.pools, self.device)
        widths = [copier.page_bytes(g) for g in range(len(specs))]
        self.host = HostPages(self.groups, widths, self.device)
        self.mover = PageMover()
        self.lane = (
            HostLane(self.host, self.mover.wake) if device == "cpu"
            else GpuHostLane(self.host, self.groups, widths, self.device)
        )
        self.lane.attach(copier)
        self.mover.add("device", "host", self.lane)
        self.mover.add("host", "device", self.lane)
        self.ticket = 0
        while not all(self.host.is_usable(g, [HOST_PAGES - 1]) for g in range(len(specs))):
            time.sleep(0.01)

    def fill(self, seed: int) -> None:
        torch.manual_seed(seed)
        for pool in self.pools:
            for part in pool.parts:
                raw = part.tensor.view(torch.uint8)
                raw.copy_(torch.randint(0, 255, raw.shape, dtype=torch.uint8, device=self.device))

    def snapshot(self, group: int, page: int) -> list[torch.Tensor]:
        return [part.tensor[page].view(torch.uint8).clone() for part in self.pools[group].parts]

    def move(self, group: int, source: str, target: str, pages: list[int], targets: list[int]) -> None:
        self.ticket += 1
        self.mover.start([PageMove(self.ticket, group, source, target, pages, targets)])

    def drain(self) -> list[Arrival]:
        arrived: list[Arrival] = []
        deadline = time.monotonic() + 20
        while len(arrived) < self.ticket and time.monotonic() < deadline:
            arrived += self.mover.poll(0.5)
        self.ticket = 0
        return arrived

    def close(self) -> None:
        self.mover.close()
        self.host.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*SPECS, "all"])
def test_pages_come_back_as_they_were(name: str, device: str):
    setup = Setup(list(SPECS.values()) if name == "all" else [SPECS[name]], device)
    setup.fill(1)
    groups = range(len(setup.groups))
    wanted = {(g, page): setup.snapshot(g, page) for g in groups for page in (3, 1, 7)}
    for g in groups:
        setup.move(g, "device", "host", [3, 1, 7], [5, 6, 0])
    setup.fill(2)  # at once: steps that follow may overwrite pages that are still on their way
    assert not any(arrival.failed for arrival in setup.drain())
    for g in groups:
        setup.move(g, "host", "device", [0, 5, 6], [9, 10, 2])
    assert not any(arrival.failed for arrival in setup.drain())
    for g in groups:
        for target, source in ((9, 7), (10, 3), (2, 1)):
            for part, known in zip(setup.snapshot(g, target), wanted[g, source], strict=True):
                assert torch.equal(part, known)
    setup.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_group_without_layers_on_this_rank_has_nothing_to_move(device: str):
    setup = Setup([SPECS["full"]], device, num_layers=0)
    setup.move(0, "device", "host", [3, 1], [5, 6])
    setup.move(0, "host", "device", [5, 6], [7, 8])
    assert sorted(setup.drain(), key=lambda arrival: arrival.ticket) == [Arrival(1), Arrival(2)]
    setup.close()


@pytest.mark.cuda
def test_what_finds_no_room_on_its_way_fails_and_later_moves_do_not():
    setup = Setup([SPECS["full"]], "cuda")
    setup.move(0, "device", "host", list(range(1, 8)), list(range(7)))
    assert [len(arrival.failed) for arrival in setup.drain()] == [7]
    setup.move(0, "device", "host", [1, 2], [0, 1])
    assert setup.drain() == [Arrival(1)], "tickets count from the last drain"
    setup.close()


@pytest.mark.parametrize("device", DEVICES)
def test_copies_that_fail_end_their_moves_and_cost_no_others(device: str, monkeypatch: pytest.MonkeyPatch):
    """As those for which the device has no memory; more of them than there are places on the way."""
    setup = Setup([SPECS["full"]], device)
    setup.fill(1)
    wanted = setup.snapshot(0, 3)
    with monkeypatch.context() as patch:
        for name in ("gather", "scatter", "scatter_uploaded"):
            patch.setattr(PageCopier, name, lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("none left")))
        for _ in range(STORE_PAGES):
            setup.move(0, "device", "host", [3, 1], [5, 6])
            setup.move(0, "host", "device", [5, 6], [7, 8])
        assert [arrival.failed for arrival in setup.drain()] == [[0, 1]] * 2 * STORE_PAGES
    setup.move(0, "device", "host", [3, 1, 2, 4, 5, 6], [1, 2, 3, 4, 5, 6])
    assert setup.drain() == [Arrival(1)]
    setup.move(0, "host", "device", [1], [9])
    assert setup.drain() == [Arrival(1)]
    assert all(torch.equal(part, known) for part, known in zip(setup.snapshot(0, 9), wanted, strict=True))
    setup.close()


def test_moves_without_pools_or_lanes_fail():
    setup = Setup([SPECS["full"]], "cpu")
    setup.mover.start([PageMove(1, 0, "peer", "device", [1, 2], [3, 4])])
    assert setup.mover.poll() == [Arrival(1, [0, 1])]
    setup.lane.attach(None)
    setup.mover.start([PageMove(2, 0, "device", "host", [1], [3])])
    assert setup.mover.poll() == [Arrival(2, [0])]
    setup.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_reset_leaves_no_page_to_be_touched(device: str):
    setup = Setup([SPECS["full"]], device)
    setup.fill(1)
    setup.move(0, "device", "host", [1, 2], [0, 1])
    setup.drain()
    setup.move(0, "host", "device", [0, 1], [3, 4])
    setup.mover.reset()
    setup.fill(2)
    before = setup.snapshot(0, 3)
    time.sleep(0.05)
    assert all(torch.equal(a, b) for a, b in zip(before, setup.snapshot(0, 3), strict=True))
    assert setup.mover.poll() == []
    setup.close()


@pytest.mark.parametrize("is_busy", [False, True])
def test_pinning_leaves_the_driver_to_steps_that_run(is_busy: bool, monkeypatch: pytest.MonkeyPatch):
    times: list[float] = []

    def register(address: int, size: int, flags: int) -> int:
        times.append(time.monotonic())
        time.sleep(0.002)
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(host, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(host, "BUSY_S", 60.0 if is_busy else 0.0)
    group = CacheGroup(CacheSpec("full", 1, 8, 8, "float32"), [0], 4, host_pages=6)
    pages = HostPages([group], [4096], torch.device("cuda"))
    pages.note_step()
    deadline = time.monotonic() + 10
    while not pages.is_usable(0, [5]) and time.monotonic() < deadline:
        time.sleep(0.002)
    gaps = sorted(later - earlier for earlier, later in pairwise(times[1:]))
    assert len(times) == 6 and (gaps[0] > 0.018 if is_busy else gaps[0] < 0.018)
    pages.close()


def test_memory_that_the_driver_does_not_pin_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch):
    """The runtime would report it of the next kernel that this thread launches."""
    library, asked = SimpleNamespace(last=0, cudaGetLastError=lambda: forget()), []

    def forget() -> int:
        asked.append(library.last)
        library.last = 0
        return asked[-1]

    def refuse(address: int, size: int, flags: int) -> int:
        library.last = 2
        return 2

    def open_library(name: str) -> SimpleNamespace:
        assert name == "libcudart.so.12"
        return library

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=refuse))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(pinning.ctypes, "CDLL", open_library)
    with pytest.raises(ConfigError, match=r"the driver cannot pin 0\.0 GiB of host memory \(2\): lower hot_host_gb"):
        mapped._Pinned(4096)
    assert asked == [2] and library.last == 0
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0))
    assert pinning.register(4096, 4096) is None and len(asked) == 1


@pytest.mark.cuda
def test_a_refused_registration_is_forgotten_on_a_gpu():
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    torch.zeros(1, device="cuda")
    assert pinning.register(memory.data_ptr(), len(memory)) is None
    assert pinning.register(memory.data_ptr(), len(memory)) is not None, "it was pinned before"
    assert int(torch.ones(3, device="cuda").sum()) == 3
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

"""What carries pages between regions: bytes arrive where they should, and nowhere else."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from memory.transfer_packages import is_usable

from headrace.base.errors import ConfigError, PluginError, TransferFailed
from headrace.memory.transfer import mooncake, nixl
from headrace.memory.transfer.contract import TRANSFER_BACKENDS, Copy, Region, create_backend, split_backend
from headrace.memory.transfer.device_region import DeviceCopies, DriverError
from headrace.memory.transfer.door import Door, take_descriptor

SIZE = 1 << 20
BACKENDS = ["shared-memory", "faulty", "nixl", "mooncake"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if not is_usable(request.param):
        pytest.skip(f"{request.param} is not installed, or lacks libraries of the system")
    return request.param


@pytest.fixture
def regions() -> Iterator[tuple[Region, Region]]:
    pair = Region.create(SIZE), Region.create(SIZE)
    yield pair
    for region in pair:
        region.close()


def test_all_backends_are_tested_here():
    assert set(TRANSFER_BACKENDS.names()) == {*BACKENDS, "cuda-ipc"}  # that one in test_cuda_ipc.py


def test_bytes_arrive_where_they_should(backend, regions):
    source, target = regions
    here, there = create_backend(backend, source), create_backend(backend, target)
    destination = here.connect(there.handle())
    generator = np.random.default_rng(0)
    source.data[:] = generator.integers(0, 256, SIZE, dtype=np.uint8)
    expected = np.zeros(SIZE, dtype=np.uint8)
    copies = [Copy(0, 1000, 1), Copy(5, 4096, 70_000), Copy(300_000, 200_000, 65_536), Copy(SIZE - 10, SIZE - 10, 10)]
    for copy in copies:
        expected[copy.target : copy.target + copy.num_bytes] = source.data[copy.begin : copy.begin + copy.num_bytes]
    destination.write(copies)
    assert (target.data == expected).all()
    destination.write([Copy(10, 10, 100)])  # a second time, over the same connection
    assert (target.data[10:110] == source.data[10:110]).all()
    destination.close()
    here.close()
    there.close()


@pytest.mark.parametrize("copy", [
    Copy(0, SIZE - 5, 10), Copy(SIZE - 5, 0, 10), Copy(-1, 0, 10), Copy(0, -1, 10), Copy(0, 0, SIZE + 1),
])
def test_writes_outside_of_a_region_are_refused(backend, regions, copy):
    source, target = regions
    here, there = create_backend(backend, source), create_backend(backend, target)
    destination = here.connect(there.handle())
    source.data[:] = 1
    with pytest.raises(TransferFailed, match=r"outside"):
        destination.write([copy])
    assert not target.data.any()
    destination.close()
    here.close()
    there.close()


@pytest.mark.parametrize("fault", ["copy", "thread"])
def test_a_failed_write_leaves_no_copy_behind(fault, regions, monkeypatch):
    source, target = regions
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    destination = create_backend("shared-memory", source).connect(create_backend("shared-memory", target).handle())
    source.data[:] = 1
    copyto, start, began, told = np.copyto, threading.Thread.start, threading.Event(), threading.Event()

    def copy_slowly(there, here):
        if len(here) == 1:
            began.wait(5)
            raise MemoryError("no memory for a copy")
        began.set()
        told.wait(0.3)
        copyto(there, here)

    def start_one(thread):
        if thread.name.endswith("_1"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(np, "copyto", copy_slowly)
    copies = [Copy(0, 0, 1), Copy(1, 100, 50), Copy(2, 200, 50)]
    if fault == "thread":
        monkeypatch.setattr(threading.Thread, "start", start_one)
        copies = copies[1:]
    with pytest.raises(TransferFailed, match=r"no memory for a copy|can't start new thread"):
        destination.write(copies)
    seen = target.data.copy()
    told.set()  # from now on another request may own these bytes
    monkeypatch.undo()
    destination.write([Copy(0, 4096, 10)])  # the next one finds threads again
    seen[4096:4106] = 1
    destination.close()
    assert (target.data == seen).all()


class Library:
    """NIXL's agent and Mooncake's engine in one: of two copies one fails, the other is written until `may_end`."""

    def __init__(self):
        self.may_end, self.is_asked = threading.Event(), threading.Event()

    def initialize_xfer(self, *arguments: object) -> str:
        return "transfer"

    def transfer(self, transfer: object) -> str:
        return "ERR"

    def get_xfer_descs(self, descriptions: object, kind: str) -> object:
        return descriptions

    def release_xfer_handle(self, transfer: object) -> None:
        self.is_asked.set()
        if not self.may_end.is_set():
            raise ValueError("the transfer is active")

    def transfer_submit_write(self, session: str, here: int, there: int, num_bytes: int) -> int:
        return num_bytes

    def transfer_check_status(self, batch: int) -> int:
        self.is_asked.set()
        return -1 if batch == 1 or self.may_end.is_set() else 0

    def batch_transfer_sync_write(self, *arguments: object) -> int:
        self.is_asked.set()
        return -1


@pytest.mark.parametrize("kind", ["nixl", "mooncake"])
def test_a_write_of_which_a_part_failed_returns_when_the_others_have_ended(kind: str, regions):
    library, ended = Library(), list[TransferFailed]()
    if kind == "nixl":
        peer = nixl._Handle("peer", b"", 0, SIZE)
        destination = nixl._NixlDestination(library, regions[0], peer, "peer", (ValueError,))
    else:
        destination = mooncake._MooncakeDestination(library, regions[0], mooncake._Handle("peer", 0, SIZE))

    def write() -> None:
        with pytest.raises(TransferFailed, match="could not write") as caught:
            destination.write([Copy(0, 0, 1), Copy(1, 1, 2)])
        ended.append(caught.value)

    thread = threading.Thread(target=write)
    thread.start()
    assert library.is_asked.wait(10)
    thread.join(0.2)
    is_early = not thread.is_alive()
    library.may_end.set()
    thread.join(10)
    assert ended and not is_early


def test_a_failed_copy_between_gpus_is_told_when_those_before_it_have_ended():
    calls: list[str] = []

    class Driver:
        def enter(self) -> None:
            pass

        def call(self, name, *arguments):
            calls.append(name)
            if calls.count("cuMemcpyDtoDAsync_v2") == 2:
                raise DriverError("an address that is none")

    copies = DeviceCopies(Driver())
    with pytest.raises(TransferFailed, match="an address that is none"):
        copies.copy([(0, 0, 1), (1, 1, 1), (2, 2, 1)])
    assert calls[1:] == ["cuMemcpyDtoDAsync_v2"] * 2 + ["cuStreamSynchronize"]


def test_a_handle_that_is_none_is_refused(backend, regions):
    here = create_backend(backend, regions[0])
    with pytest.raises(TransferFailed):
        here.connect(b"\xc1 no handle")
    here.close()


def test_shared_memory_of_a_backend_that_ended_is_not_found(regions):
    here, there = (create_backend("shared-memory", region) for region in regions)
    handle = there.handle()
    there.close()
    with pytest.raises(TransferFailed, match="must be on this host"):
        here.connect(handle)
    here.close()


def test_memory_that_cannot_be_mapped_fails_the_connection_and_is_given_back(regions, monkeypatch):
    here, there = (create_backend("shared-memory", region) for region in regions)
    open_before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("mmap.mmap", lambda *_: (_ for _ in ()).throw(OSError("out of address space")))
    with pytest.raises(TransferFailed, match="out of address space"):
        here.connect(there.handle())
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) > open_before and time.monotonic() < deadline:
        time.sleep(0.01)  # the door's thread closes its end of the line a little later
    assert len(os.listdir("/proc/self/fd")) == open_before
    here.close()
    there.close()


def test_a_door_outlasts_a_lack_of_descriptors(regions, monkeypatch):
    accept, failures = socket.socket.accept, iter([OSError(errno.EMFILE, "too many open files")] * 2)

    def fail_twice(listener):
        error = next(failures, None)
        if error is not None:
            raise error
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_twice)
    door = Door(regions[0])
    descriptor, size = take_descriptor(door.handle)
    os.close(descriptor)
    assert size == SIZE
    door.close()


def test_backend_options():
    assert split_backend("nixl?backends=UCX,POSIX&x=") == ("nixl", {"backends": "UCX,POSIX", "x": ""})
    with pytest.raises(ConfigError, match=r"NAME\?OPTION=VALUE"):
        split_backend("nixl?backends")
    region = Region.create(4096)
    with pytest.raises(ConfigError, match="unknown option 'speed'"):
        create_backend("shared-memory?speed=9", region)
    with pytest.raises(PluginError, match=r"known: .*shared-memory"):
        create_backend("carrier-pigeon", region)
    region.close()


def test_regions_check_their_bounds():
    region = Region.create(4096)
    region.check(0, 4096)
    with pytest.raises(TransferFailed, match="outside"):
        region.check(4000, 97)
    region.close()


def test_memory_is_committed_beforehand_and_unchanged():
    region = Region.create(1 << 20)
    region.data[5] = 7
    view = region.data
    region.populate(0, 1 << 20)
    assert os.stat(f"/proc/self/fd/{region.descriptor}").st_blocks * 512 == 1 << 20
    assert view[5] == 7 and view.sum() == 7
    region.close()
    region.populate(0, 4096)  # of a thread that has not heard of it yet
    assert view[5] == 7, "what refers to it keeps it"


def test_committing_memory_holds_up_no_other_thread():
    region, size = Region.create(256 << 20), 256 << 20
    thread = threading.Thread(target=region.populate, args=(0, size))
    began, num_turns = time.monotonic(), 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        num_turns += 1
    elapsed = time.monotonic() - began
    region.close()
    if elapsed < 0.02:
        pytest.skip("a kernel that does not commit memory beforehand, or does so in no time")
    assert num_turns >= 5

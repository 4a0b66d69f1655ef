"""Pages on disk and in stores: what is written comes back, and whatever goes wrong costs a miss."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from headrace.base.cache import CacheGroup, CacheSpec
from headrace.base.errors import ConfigError
from headrace.base.step import Arrival, PageMove
from headrace.memory.host import HostPages
from headrace.memory.moving import PageMover
from headrace.memory.storage import StoreOptions, disk, lane
from headrace.memory.storage.checked import CheckedStore
from headrace.memory.storage.disk import DiskStore
from headrace.memory.storage.lane import StorageLane

WIDTH = 100


def open_disk(folder: Path, capacity: int = 10**6, place: int = 0, num_places: int = 1) -> DiskStore:
    return DiskStore(StoreOptions(place, num_places, folder, capacity))


def page(number: int) -> memoryview:
    return memoryview(bytes([number]) * WIDTH)


def read(store: DiskStore, name: str) -> bytes | None:
    buffer = bytearray(WIDTH)
    return bytes(buffer) if store.get([name], [memoryview(buffer)]) == [True] else None


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_pages_survive_a_restart(tmp_path: Path):
    store = open_disk(tmp_path)
    assert store.put(["a-0-11", "a-0-22"], [page(1), page(2)]) == [True, True]
    assert store.exists(["a-0-22", "a-0-33"]) == [True, False]
    store.close()
    store = open_disk(tmp_path)
    assert read(store, "a-0-11") == bytes(page(1)) and read(store, "a-0-33") is None


def test_the_folder_is_never_larger_than_told_and_keeps_what_was_used_last(tmp_path: Path):
    store = open_disk(tmp_path, capacity=5 * (WIDTH + 64) + 10)
    for number in range(5):
        store.put([f"a-0-{number:02}"], [page(number)])
    assert read(store, "a-0-00")
    for number in range(5, 8):
        store.put([f"a-0-{number:02}"], [page(number)])
        assert size_of(tmp_path) <= 5 * (WIDTH + 64) + 10
    assert [has for has in store.exists([f"a-0-{n:02}" for n in range(8)])] == [1, 0, 0, 0, 1, 1, 1, 1]
    store.close()
    store = open_disk(tmp_path, capacity=2 * (WIDTH + 64))
    assert size_of(tmp_path) <= 2 * (WIDTH + 64) and store.exists(["a-0-07"]) == [True]


def test_files_that_are_being_written_leave_no_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store, writev = open_disk(tmp_path, capacity=WIDTH + 64), os.writev
    meanwhile: list[list[bool]] = []

    def write(descriptor: int, buffers: list[bytes]) -> int:
        meanwhile.append(store.put(["a-0-22"], [page(2)]))
        return writev(descriptor, buffers)

    monkeypatch.setattr(disk.os, "writev", write)
    assert store.put(["a-0-11"], [page(1)]) == [True] and meanwhile == [[False]]
    monkeypatch.undo()
    assert store.put(["a-0-22"], [page(2)]) == [True] and size_of(tmp_path) <= WIDTH + 64


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "grow", "another's", "delete"])
def test_a_damaged_page_is_a_miss_and_is_removed(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture):
    store, other = open_disk(tmp_path), open_disk(tmp_path / "other")
    store.put(["a-0-11"], [page(1)])
    other.put(["a-0-22"], [page(2)])
    (path,) = tmp_path.glob("place-0/*/*.page")
    (foreign,) = (tmp_path / "other").rglob("*.page")
    raw = bytearray(path.read_bytes())
    raw[80] ^= 1
    if damage == "delete":
        path.unlink()
    else:
        broken = {"flip": raw, "cut": raw[:90], "empty": b"", "grow": raw + b"x", "another's": foreign.read_bytes()}
        path.write_bytes(broken[damage])
    with caplog.at_level(logging.WARNING):
        assert read(store, "a-0-11") is None
    assert store.exists(["a-0-11"]) == [False] and not list(tmp_path.glob("place-0/*/*.page"))
    assert len(caplog.records) == (damage != "delete")
    assert store.put(["a-0-11"], [page(3)]) == [True] and read(store, "a-0-11") == bytes(page(3))


def test_a_page_outlasts_a_shortage_of_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = open_disk(tmp_path)
    store.put(["a-0-11"], [page(1)])
    with monkeypatch.context() as shortage:
        def refuse(path: Path, *args: object, **kwargs: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        shortage.setattr(Path, "open", refuse)
        assert read(store, "a-0-11") is None
    assert store.exists(["a-0-11"]) == [True] and read(store, "a-0-11") == bytes(page(1))


def test_the_whole_folder_may_be_deleted_while_in_use(tmp_path: Path):
    store = open_disk(tmp_path / "cache")
    store.put(["a-0-11"], [page(1)])
    for path in sorted((tmp_path / "cache").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (tmp_path / "cache").rmdir()
    assert read(store, "a-0-11") is None
    assert store.put(["a-0-22"], [page(2)]) == [True] and read(store, "a-0-22") == bytes(page(2))


def test_a_full_disk_costs_one_line_and_is_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    store = open_disk(tmp_path)
    calls = []

    def fill(*_: object) -> int:
        calls.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", fill)
    with caplog.at_level(logging.WARNING):
        assert store.put([f"a-0-{n}1" for n in range(5)], [page(n) for n in range(5)]) == [False] * 5
    assert len(caplog.records) == len(calls) == 1 and "No space left" in caplog.text
    assert not list(tmp_path.rglob("*.p*")), "nothing half-written stays"
    monkeypatch.undo()
    later = time.monotonic() + disk.PAUSE_S + 1
    monkeypatch.setattr(disk.time, "monotonic", lambda: later)
    assert store.put(["a-0-11"], [page(1)]) == [True]


def test_on_a_disk_that_is_smaller_than_allowed_later_pages_replace_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, writev, now = open_disk(tmp_path), os.writev, time.monotonic()

    def write(descriptor: int, buffers: list[bytes]) -> int:
        if size_of(tmp_path) >= 2 * (WIDTH + 64):
            raise OSError(errno.ENOSPC, "No space left on device")
        return writev(descriptor, buffers)

    monkeypatch.setattr(disk.os, "writev", write)
    monkeypatch.setattr(disk.time, "monotonic", lambda: now)
    names, pages = [f"a-0-{number}1" for number in range(5)], [page(number) for number in range(5)]
    assert store.put(names[:3], pages[:3]) == [True, True, False]
    now += disk.PAUSE_S + 1
    assert store.put(names[3:], pages[3:]) == [True, True]
    assert store.exists(names) == [False, False, False, True, True] and read(store, names[4]) == bytes(pages[4])
    monkeypatch.undo()
    later = time.monotonic() + disk.FULL_S + disk.PAUSE_S + 2
    monkeypatch.setattr(disk.time, "monotonic", lambda: later)
    assert store.put(names[:1], pages[:1]) == [True] and store.exists(names[3:]) == [True, True]


def test_files_that_cannot_be_deleted_count_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    size = disk._HEADER.size + len(page(0))
    store = open_disk(tmp_path, capacity=2 * size)
    assert store.put(["a-0-11", "a-0-22"], [page(1), page(2)]) == [True, True]

    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "PAUSE_S", 0.0)
        patch.setattr(Path, "unlink", refuse)
        for _ in range(3):
            assert store.put(["a-0-33"], [page(3)]) == [False]
    assert store.exists(["a-0-11", "a-0-22", "a-0-33"]) == [True, True, False]
    assert store.put(["a-0-33"], [page(3)]) == [True] and store.exists(["a-0-11"]) == [False]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.page")) == 2 * size


def test_two_servers_cannot_share_a_folder(tmp_path: Path):
    store = open_disk(tmp_path)
    with pytest.raises(ConfigError, match="in use by another server"):
        open_disk(tmp_path)
    store.close()
    open_disk(tmp_path).close()


def test_a_folder_that_was_deleted_belongs_to_who_takes_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The lock goes with the folder: whoever had it must notice."""
    monkeypatch.setattr(disk, "PAUSE_S", 0.0)
    first = open_disk(tmp_path / "cache")
    first.put(["a-0-11"], [page(1)])
    shutil.rmtree(tmp_path / "cache")
    second = open_disk(tmp_path / "cache")
    assert second.put(["a-0-22"], [page(2)]) == [True]
    with caplog.at_level(logging.WARNING):
        assert first.put(["a-0-33"], [page(3)]) == [False] and read(first, "a-0-11") is None
    assert "in use by another server now" in caplog.text
    assert sorted(path.name for path in tmp_path.rglob("*.page")) == ["a-0-22.page"]
    second.close()
    assert first.put(["a-0-33"], [page(3)]) == [True]  # free again, with what is in it
    assert read(first, "a-0-22") == bytes(page(2)) and first.exists(["a-0-11"]) == [False]
    with pytest.raises(ConfigError, match="another server"):
        open_disk(tmp_path / "cache")
    first.close()


class Shelf:
    """A store that keeps what it was given."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}

    def exists(self, names: list[str]) -> list[bool]:
        return [name in self.pages for name in names]

    def get(self, names: list[str], buffers: list[memoryview]) -> list[bool]:
        for name, buffer in zip(names, buffers, strict=True):
            buffer[:] = self.pages.get(name, bytes(len(buffer)))
        return self.exists(names)

    def put(self, names: list[str], buffers: list[memoryview]) -> list[bool]:
        self.pages.update(zip(names, map(bytes, buffers), strict=True))
        return [True] * len(names)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("damage", ["bit", "other page", "zeros", "trailer"])
def test_a_page_that_comes_damaged_from_a_remote_store_is_a_miss(damage: str, caplog: pytest.LogCaptureFixture):
    shelf = Shelf()
    store = CheckedStore(shelf)
    assert store.put(["a", "b"], [page(1), page(2)]) == [True, True]
    buffers = [bytearray(WIDTH), bytearray(WIDTH), bytearray(WIDTH)]
    assert store.get(["b", "c", "a"], [memoryview(b) for b in buffers]) == [True, False, True]
    assert buffers[0] == page(2) and buffers[2] == page(1) and not caplog.text
    broken = bytearray(shelf.pages["a"])
    if damage == "bit":
        broken[17] ^= 4
    elif damage == "trailer":
        broken[-1] ^= 1
    shelf.pages["a"] = {"other page": shelf.pages["b"], "zeros": bytes(len(broken))}.get(damage, bytes(broken))
    buffer = bytearray(WIDTH)
    assert store.get(["a"], [memoryview(buffer)]) == [False] and not any(buffer)
    assert caplog.text.count("came damaged") == 1


def test_places_of_a_larger_run_are_removed(tmp_path: Path):
    for place in range(3):
        store = open_disk(tmp_path, place=place, num_places=3)
        store.put(["a-0-11"], [page(1)])
        store.close()
    open_disk(tmp_path, num_places=1).close()
    assert [path.name for path in tmp_path.iterdir()] == ["place-0"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        open_disk(tmp_path / "file")


class MemoryStore:
    """What a plug-in may be: slow, failing, forgetful."""

    def __init__(self, options: StoreOptions | None = None):
        self.pages: dict[str, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def _pass(self) -> None:
        self.gate.wait()
        if self.error is not None:
            raise self.error

    def exists(self, names: list[str]) -> list[bool]:
        self._pass()
        return [name in self.pages for name in names]

    def get(self, names: list[str], buffers: list[memoryview]) -> list[bool]:
        self._pass()
        for name, buffer in zip(names, buffers, strict=True):
            buffer[:] = self.pages.get(name, b"\xff" * len(buffer))
        return [name in self.pages for name in names]

    def put(self, names: list[str], buffers: list[memoryview]) -> list[bool]:
        self._pass()
        self.pages.update({name: bytes(buffer) for name, buffer in zip(names, buffers, strict=True)})
        return [True] * len(names)

    def close(self) -> None:
        pass


class Setup:
    def __init__(self, *stores: object):
        group = CacheGroup(CacheSpec("full", 1, 8, 8, "float32"), [0], 4, 0, 8, 8)
        self.host = HostPages([group], [WIDTH], torch.device("cpu"))
        self.mover = PageMover()
        self.lane = StorageLane(self.host, list(stores), "model", self.mover.wake)
        for pair in (("host", "storage"), ("storage", "host"), ("storage", "")):
            self.mover.add(*pair, self.lane)
        self.rows = self.host.rows[0]
        for number in range(8):
            self.rows[number] = number

    def move(self, source: str, target: str, pages: list[int], keys: str, wait_s: float = 10.0) -> list[Arrival]:
        sources, targets = (pages, []) if source == "host" else ([], pages)
        names = [key.encode() for key in keys]
        self.mover.start([PageMove(1, 0, source, target, sources, targets, names)])
        return self.mover.poll(wait_s)


def test_pages_go_to_all_stores_and_come_from_the_first_that_has_them():
    first, second = MemoryStore(), MemoryStore()
    setup = Setup(first, second)
    assert setup.move("host", "storage", [1, 2, 3], "abc") == [Arrival(1)]
    assert len(first.pages) == len(second.pages) == 3
    del first.pages["model-0-62"]
    assert setup.move("storage", "", [], "abcd") == [Arrival(1, [3])]
    assert setup.move("storage", "host", [4, 5, 6], "abc") == [Arrival(1)]
    assert [int(setup.rows[n][0]) for n in (4, 5, 6)] == [1, 2, 3]
    assert setup.move("storage", "host", [4, 7], "bz") == [Arrival(1, [1])]
    assert int(setup.rows[7][0]) == 7, "a page that did not come is not touched"
    setup.lane.rename("other")
    assert setup.move("storage", "", [], "a") == [Arrival(1, [0])]
    setup.mover.close()


def test_nothing_is_read_into_host_memory_that_is_still_to_be_cleared(monkeypatch: pytest.MonkeyPatch):
    store = MemoryStore()
    setup = Setup(store)
    setup.move("host", "storage", [1, 2], "ab")
    monkeypatch.setattr(setup.host, "is_usable", lambda group, pages: max(pages) < 5)
    assert setup.move("storage", "host", [4, 5], "ab") == [Arrival(1, [0, 1])] and int(setup.rows[4][0]) == 4
    assert setup.move("storage", "host", [3, 4], "ab") == [Arrival(1)] and int(setup.rows[4][0]) == 2
    setup.mover.close()


def test_a_store_that_raises_has_failed():
    store = MemoryStore()
    setup = Setup(store)
    store.error = RuntimeError("unplugged")
    for source, target in (("host", "storage"), ("storage", "host"), ("storage", "")):
        assert setup.move(source, target, [1, 2] if target or source == "host" else [], "ab") == [Arrival(1, [0, 1])]
    store.error = None
    assert setup.move("host", "storage", [1], "a") == [Arrival(1)]
    setup.mover.close()


@pytest.mark.parametrize("broken", [0, 1])
def test_a_store_that_raises_costs_nothing_of_others(broken: int):
    stores = MemoryStore(), MemoryStore()
    setup = Setup(*stores)
    stores[broken].error = RuntimeError("unplugged")
    assert setup.move("host", "storage", [1, 2], "ab") == [Arrival(1)]
    assert setup.move("storage", "", [], "abc") == [Arrival(1, [2])]
    assert setup.move("storage", "host", [5, 6], "ab") == [Arrival(1)]
    assert [int(setup.rows[n][0]) for n in (5, 6)] == [1, 2]
    assert [len(store.pages) for store in stores] == [2 * broken, 2 - 2 * broken]
    setup.mover.close()


def test_a_store_that_answers_for_other_pages_than_asked_has_none(caplog: pytest.LogCaptureFixture):
    store = MemoryStore()
    setup = Setup(store)
    setup.move("host", "storage", [1, 2], "ab")
    store.exists = lambda names: [True]  # type: ignore[method-assign]
    assert setup.move("storage", "", [], "ab") == [Arrival(1, [0, 1])] and "a page store failed" in caplog.text
    setup.mover.close()


def test_a_store_that_hangs_touches_nothing_when_it_wakes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lane, "GET_TIMEOUT_S", 0.05)
    monkeypatch.setattr(lane, "PAUSE_S", 0.1)
    store = MemoryStore()
    setup = Setup(store)
    setup.move("host", "storage", [1], "a")
    store.gate.clear()
    began = time.monotonic()
    assert setup.move("storage", "host", [5], "a") == [Arrival(1, [0])] and time.monotonic() - began < 5
    setup.rows[5] = 42  # the page has been given to another prefix
    store.gate.set()
    time.sleep(0.2)
    assert int(setup.rows[5][0]) == 42
    assert setup.move("storage", "host", [6], "a") == [Arrival(1)] and int(setup.rows[6][0]) == 1
    setup.mover.close()


def test_with_all_threads_stuck_moves_fail_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lane, "EXISTS_TIMEOUT_S", 0.02)
    monkeypatch.setattr(lane, "PAUSE_S", 0.0)
    store = MemoryStore()
    setup = Setup(store)
    store.gate.clear()
    for _ in range(lane.MOST_STUCK):
        assert setup.move("storage", "", [], "a") == [Arrival(1, [0])]
    began = time.monotonic()
    for _ in range(20):
        assert setup.move("storage", "", [], "a") == [Arrival(1, [0])]
    assert time.monotonic() - began < 0.3
    store.gate.set()
    setup.mover.close()


def test_a_store_that_was_too_slow_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lane, "EXISTS_TIMEOUT_S", 0.2)
    monkeypatch.setattr(lane, "PAUSE_S", 1.0)
    fast, slow = MemoryStore(), MemoryStore()
    setup = Setup(fast, slow)
    setup.move("host", "storage", [1], "a")
    slow.gate.clear()
    assert setup.move("storage", "", [], "b") == [Arrival(1, [0])], "asked, and late"
    began = time.monotonic()
    for _ in range(20):
        assert setup.move("storage", "", [], "ab") == [Arrival(1, [1])], "the other store answers"
    assert time.monotonic() - began < 0.2
    slow.gate.set()
    slow.pages["model-0-62"] = b"x"
    time.sleep(1.0)
    assert setup.move("storage", "", [], "b") == [Arrival(1)]
    setup.mover.close()


def test_threads_that_hang_in_one_store_leave_others_to_the_next(monkeypatch: pytest.MonkeyPatch):
    """As many requests at once as there are threads find a store that hangs; the store before it has their pages."""
    monkeypatch.setattr(lane, "EXISTS_TIMEOUT_S", 0.2)
    fast, slow = MemoryStore(), MemoryStore()
    setup, before = Setup(fast, slow), threading.active_count()
    setup.move("host", "storage", [1], "a")
    slow.gate.clear()
    setup.mover.start([PageMove(10 + n, 0, "storage", "", [], [], [b"b"]) for n in range(lane.NUM_READERS)])
    late: list[Arrival] = []
    while len(late) < lane.NUM_READERS:
        late += setup.mover.poll(5.0)
    assert {end.ticket: end.failed for end in late} == {10 + n: [0] for n in range(lane.NUM_READERS)}
    for _ in range(3):
        assert setup.move("storage", "host", [5], "a") == [Arrival(1)] and int(setup.rows[5][0]) == 1
        setup.rows[5] = 5
    slow.gate.set()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before, "threads that were replaced have ended"
    setup.mover.close()


def test_writes_that_hang_do_not_hold_up_reads():
    store = MemoryStore()
    setup = Setup(store)
    setup.move("host", "storage", [1], "a")
    hung = threading.Event()
    store.put = lambda names, buffers: hung.wait() and []  # type: ignore[method-assign]
    moves = [PageMove(10 + n, 0, "host", "storage", [n], [], [b"xyzuvw"[n : n + 1]]) for n in range(6)]
    setup.mover.start(moves)
    began = time.monotonic()
    assert setup.move("storage", "", [], "ab") == [Arrival(1, [1])]
    assert setup.move("storage", "host", [5], "a") == [Arrival(1)] and int(setup.rows[5][0]) == 1
    assert time.monotonic() - began < 0.5
    hung.set()
    setup.mover.reset()
    setup.mover.close()


def test_a_reset_voids_what_is_on_its_way():
    store = MemoryStore()
    setup = Setup(store)
    setup.move("host", "storage", [1], "a")
    store.gate.clear()
    setup.mover.start([PageMove(9, 0, "storage", "host", [], [5], [b"a"])])
    setup.mover.reset()
    store.gate.set()
    time.sleep(0.1)
    assert int(setup.rows[5][0]) == 5 and setup.mover.poll() == []
    setup.mover.close()

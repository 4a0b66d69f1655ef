"""Mooncake Store: against a master of its own where the package works, and against a stand-in with its statuses."""

from __future__ import annotations

import ctypes
import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from headrace.base.errors import ConfigError
from headrace.memory.storage import StoreOptions, mooncake
from headrace.memory.storage.checked import CheckedStore
from headrace.memory.storage.isolated import IsolatedStore
from headrace.memory.storage.mooncake import MooncakeStore, read_config, read_size


def pages(*contents: bytes) -> list[memoryview]:
    return [memoryview(bytearray(content)) for content in contents]


class StandIn:
    """`MooncakeDistributedStore` with the statuses that 0.3.13 gave, in this process."""

    capacity, is_up, setup_status = 1000, True, 0

    def setup(self, *arguments: object, **options: object) -> int:
        self.pages: dict[str, bytes] = {}
        self.registered: list[tuple[int, int]] = []
        return self.setup_status

    def register_buffer(self, address: int, size: int) -> int:
        self.registered.append((address, size))
        return 0

    def _check(self, address: int, size: int) -> None:
        assert any(begin <= address and address + size <= begin + length for begin, length in self.registered)

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [int(name in self.pages) if self.is_up else -900 for name in names]

    def batch_put_from(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        return [self._put(*each) for each in zip(names, addresses, sizes, strict=True)]

    def _put(self, name: str, address: int, size: int) -> int:
        self._check(address, size)
        if not self.is_up:
            return -900
        if sum(map(len, self.pages.values())) + size > self.capacity:
            return -200
        self.pages[name] = ctypes.string_at(address, size)
        return 0

    def batch_get_into(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        return [self._get(*each) for each in zip(names, addresses, sizes, strict=True)]

    def _get(self, name: str, address: int, size: int) -> int:
        self._check(address, size)
        if not self.is_up:
            return -900
        if name not in self.pages:
            return -704
        if size < len(self.pages[name]):
            return -600
        ctypes.memmove(address, self.pages[name], len(self.pages[name]))
        return len(self.pages[name])

    def close(self) -> int:
        return 0


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MooncakeStore:
    module = ModuleType("mooncake.store")
    module.MooncakeDistributedStore = type("Fresh", (StandIn,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    monkeypatch.setattr(mooncake, "STAGE_BYTES", 100)
    return MooncakeStore(StoreOptions(config={"master_server_address": "host:50051"}))


def test_pages_pass_through_registered_memory(store: MooncakeStore):
    contents = [bytes([n]) * 40 for n in range(5)]
    names = [f"p{n}" for n in range(5)]
    assert store.put([*names, "large"], pages(*contents, b"x" * 101)) == [True] * 5 + [False]
    assert store.exists(["p4", "large"]) == [True, False]
    buffers = pages(*[b"\0" * 40] * 5)
    assert store.get(names[::-1], buffers) == [True] * 5
    assert [bytes(buffer) for buffer in buffers] == contents[::-1]


def test_pages_that_lack_or_are_of_another_size_are_not_there(store: MooncakeStore):
    store.put(["a", "b"], pages(b"1" * 40, b"2" * 40))
    buffers = pages(b"." * 40, b"." * 30, b"." * 50)
    assert store.get(["lacks", "a", "b"], buffers) == [False, False, False]
    assert {bytes(buffer) for buffer in buffers} == {b"." * 40, b"." * 30, b"." * 50}


def test_a_store_that_is_full_takes_no_more(store: MooncakeStore):
    many = [f"p{n}" for n in range(30)]
    assert store.put(many, pages(*[b"x" * 40] * 30)) == [True] * 25 + [False] * 5


def test_a_master_that_is_away_is_an_error(store: MooncakeStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(StandIn, "is_up", False)
    one = ["a"], pages(b"1")
    for call in (lambda: store.exists(one[0]), lambda: store.put(*one), lambda: store.get(*one)):
        with pytest.raises(RuntimeError, match="the master does not answer"):
            call()
    monkeypatch.setattr(StandIn, "is_up", True)
    assert store.put(["a"], pages(b"1")) == [True]


def test_a_cluster_that_cannot_be_joined_is_a_configuration_error(
    store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(StandIn, "setup_status", -1)
    with pytest.raises(ConfigError, match=r"cannot join the store of host:1 as 127\.0\.0\.1: status -1"):
        MooncakeStore(StoreOptions(config={"master_server_address": "host:1"}))


@pytest.mark.parametrize(("text", "size"), [(7, 7), ("4GB", 4 << 30), ("1.5 MiB", 3 << 19), ("0", 0), ("2k", 2048)])
def test_sizes(text: int | str, size: int):
    assert read_size(text) == size


@pytest.mark.parametrize("config", [
    {}, {"master_server_address": 5}, {"master_server_address": "h:1", "local_buffer_size": "much"},
    {"master_server_address": "h:1", "address": "h:1"},
])
def test_a_wrong_configuration_is_refused_with_an_example(config: dict[str, object]):
    with pytest.raises(ConfigError, match=r"master_server_address.*global_segment_size") as caught:
        read_config(config)
    assert caught.value.param == "remote_cache_config"


def _has_mooncake() -> bool:
    """Whether the package works here: its library needs others of the system."""
    if importlib.util.find_spec("mooncake") is None:
        return False
    return subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True).returncode == 0


@pytest.fixture
def master() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A master, and its address."""
    if not _has_mooncake():
        pytest.skip("mooncake is not installed, or lacks libraries of the system")
    found = importlib.util.find_spec("mooncake")
    assert found is not None and found.origin is not None
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        ports = first.getsockname()[1], second.getsockname()[1]
    command = [Path(found.origin).parent / "mooncake_master", f"-rpc_port={ports[0]}", f"-metrics_port={ports[1]}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", ports[0])) == 0:
                break
        time.sleep(0.05)
    yield f"127.0.0.1:{ports[0]}", process
    process.kill()
    process.wait()


def test_two_engines_share_the_pages_of_a_cluster(master: tuple[str, subprocess.Popen[bytes]]):
    address, process = master
    config = {"master_server_address": address, "global_segment_size": "64MB"}
    stores = [CheckedStore(IsolatedStore("mooncake", StoreOptions(n, 2, config=config))) for n in range(2)]
    size = 3 << 20
    contents = [bytes([n + 1]) * size for n in range(6)]
    names = [f"p{n}" for n in range(6)]
    assert stores[0].put(names, pages(*contents)) == [True] * 6
    assert stores[1].exists([*names, "other"]) == [True] * 6 + [False]
    buffers = pages(*[bytes(size)] * 6)
    assert stores[1].get(names, buffers) == [True] * 6
    assert [bytes(buffer) for buffer in buffers] == contents
    process.kill()
    process.wait()
    with pytest.raises(RuntimeError, match="the master does not answer"):
        stores[1].exists(names)
    for store in stores:
        store.close()

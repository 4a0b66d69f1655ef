"""A remote store in a process of its own: what it stores comes back, and its death, its errors and its silence cost the
engine nothing but pages."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.base.errors import ConfigError
from headrace.memory.storage import PAGE_STORES, StoreOptions, isolated
from headrace.memory.storage.isolated import IsolatedStore, StoreDied

PLUGIN = """
import os, time
from pathlib import Path

class Store:
    plugin_api = 1

    def __init__(self, options):
        self.folder = Path(options.config["folder"])
        if options.config.get("breaks"):
            raise OSError("no such cluster")
        if options.config.get("waits"):
            (self.folder / f"waits-{os.getpid()}").touch()
            time.sleep(600)

    def exists(self, names):
        if "hang" in names:
            time.sleep(60)
        if "crash" in names:
            os.abort()
        if "short" in names:
            return [True]
        return [(self.folder / name).exists() for name in names]

    def get(self, names, buffers):
        has = self.exists(names)
        for name, buffer, is_there in zip(names, buffers, has):
            if is_there:
                buffer[:] = (self.folder / name).read_bytes()
        return has

    def put(self, names, buffers):
        for name, buffer in zip(names, buffers):
            (self.folder / name).write_bytes(buffer)
        return [True] * len(names)

    def close(self):
        (self.folder / "closed").touch()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the plug-in ``shelf`` keeps its pages."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "page_shelf.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    PAGE_STORES.add("shelf", "page_shelf:Store", is_out_of_tree=True)
    (tmp_path / "pages").mkdir()
    return tmp_path / "pages"


@pytest.fixture
def store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IsolatedStore]:
    monkeypatch.setattr(isolated, "RESTART_S", 0.1)
    store = IsolatedStore("shelf", StoreOptions(config={"folder": str(folder)}))
    yield store
    store.close()


def pages(*contents: bytes) -> list[memoryview]:
    return [memoryview(bytearray(content)) for content in contents]


def await_up(store: IsolatedStore) -> None:
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        try:
            store.exists(["x"])
            return
        except (StoreDied, RuntimeError):
            time.sleep(0.05)
    raise AssertionError("the store did not come back")


def test_pages_of_any_size_come_back(store: IsolatedStore):
    assert store.put(["a", "b", "c"], pages(b"one", b"", b"three" * 1000)) == [True] * 3
    assert store.exists(["c", "d"]) == [True, False]
    buffers = pages(b"\0" * 5000, b"....", b"\0" * 3)
    assert store.get(["c", "d", "a"], buffers) == [True, False, True]
    assert [bytes(buffer) for buffer in buffers] == [b"three" * 1000, b"....", b"one"]


def test_calls_are_divided_where_pages_do_not_fit(folder: Path):
    store = IsolatedStore("shelf", StoreOptions(config={"folder": str(folder)}), slot_bytes=10)
    contents = [bytes([n]) * 4 for n in range(5)]
    assert store.put([f"p{n}" for n in range(5)] + ["large"], pages(*contents, b"x" * 11)) == [True] * 5 + [False]
    buffers = pages(*[b"\0" * 4] * 5)
    assert store.get([f"p{n}" for n in range(5)], buffers) == [True] * 5
    assert [bytes(buffer) for buffer in buffers] == contents
    store.close()


def test_a_store_that_crashes_is_started_again_beside_its_calls(store: IsolatedStore):
    store.put(["a"], pages(b"one"))
    first = store.pid
    with pytest.raises(StoreDied, match="its process ended"):
        store.exists(["crash"])
    assert not psutil.pid_exists(first)
    await_up(store)
    assert store.pid != first and store.exists(["a"]) == [True]


def test_a_store_that_hangs_is_ended(store: IsolatedStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(isolated, "CALL_TIMEOUT_S", 0.3)
    began = time.monotonic()
    with pytest.raises(StoreDied, match="did not answer within"):
        store.exists(["hang"])
    assert time.monotonic() - began < 5
    monkeypatch.setattr(isolated, "CALL_TIMEOUT_S", 20)
    await_up(store)


def test_a_store_that_is_stopped_ends_with_its_engine(store: IsolatedStore):
    os.kill(store.pid, signal.SIGSTOP)
    process = psutil.Process(store.pid)
    store.close()
    assert not process.is_running()
    with pytest.raises(StoreDied):
        store.exists(["a"])


def test_a_stopped_store_does_not_block_calls_that_are_larger_than_its_buffer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(isolated, "CALL_TIMEOUT_S", 0.3)
    store = IsolatedStore("shelf", StoreOptions(config={"folder": str(folder)}))
    os.kill(store.pid, signal.SIGSTOP)
    asking, errors = psutil.Process(store.pid), list[StoreDied]()

    def ask() -> None:
        with pytest.raises(StoreDied) as caught:
            store.exists([f"{number:0100}" for number in range(20_000)])
        errors.append(caught.value)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(10)
    assert len(errors) == 1 and "took no call" in str(errors[0]) and not asking.is_running()
    store.close()


def test_errors_of_a_store_are_those_of_a_call(store: IsolatedStore):
    pid = store.pid
    with pytest.raises(RuntimeError, match="IsADirectoryError"):
        store.get(["."], pages(b"..."))
    with pytest.raises(RuntimeError, match="it answered for 1 of 2 pages"):
        store.exists(["short", "b"])
    assert store.exists(["b"]) == [False] and store.pid == pid


def test_a_store_is_closed_when_its_engine_ends(folder: Path):
    IsolatedStore("shelf", StoreOptions(config={"folder": str(folder)})).close()
    assert (folder / "closed").exists()


def test_a_store_that_cannot_start_is_a_configuration_error(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="cannot start: OSError: no such cluster"):
        IsolatedStore("shelf", StoreOptions(config={"folder": str(folder), "breaks": True}))
    with pytest.raises(ConfigError, match="cannot start: KeyError"):
        IsolatedStore("shelf", StoreOptions())
    monkeypatch.setattr(isolated, "START_TIMEOUT_S", 0.0)
    with pytest.raises(ConfigError, match="did not start within"):
        IsolatedStore("shelf", StoreOptions(config={"folder": str(folder)}))


ENGINE = """
import sys
from headrace.memory.storage import PAGE_STORES, StoreOptions
from headrace.memory.storage.isolated import IsolatedStore

PAGE_STORES.add("shelf", "page_shelf:Store", is_out_of_tree=True)
IsolatedStore("shelf", StoreOptions(config={"folder": sys.argv[1], "waits": True}))
"""


def test_a_store_that_is_still_joining_its_cluster_ends_with_its_engine(folder: Path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, str(folder)], env=environment)
    limit = time.monotonic() + 60
    while not (found := [path.name for path in folder.glob("waits-*")]):
        assert time.monotonic() < limit
        time.sleep(0.02)
    process = psutil.Process(int(found[0].removeprefix("waits-")))
    engine.kill()
    engine.wait()
    process.wait(30)


def list_files() -> list[str]:
    """What this process has open: sockets, nameless files, files."""
    gc.collect()  # tracebacks of expected errors
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(found)


def test_no_descriptor_and_no_process_is_left_by_stores_that_fail(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(isolated.logger, "disabled", True)  # records are kept, and refer to errors and their frames
    IsolatedStore("shelf", StoreOptions(config={"folder": str(folder)})).close()  # imports what opens files
    before, children = list_files(), psutil.Process().children()
    options = StoreOptions(config={"folder": str(folder)})
    for _ in range(3):
        store = IsolatedStore("shelf", options)
        with pytest.raises(StoreDied):
            store.exists(["crash"])
        store.close()
        with pytest.raises(ConfigError):
            IsolatedStore("shelf", StoreOptions(config={"folder": str(folder), "breaks": True}))
    start = isolated.start_process

    def start_dead(*arguments: Any) -> subprocess.Popen[bytes]:
        process = start(*arguments)
        process.kill()
        process.wait()
        return process

    def refuse(*_: Any) -> subprocess.Popen[bytes]:
        raise OSError("no memory for a process")

    for replaced in (start_dead, refuse):
        monkeypatch.setattr(isolated, "start_process", replaced)
        with pytest.raises(ConfigError, match="cannot start"):
            IsolatedStore("shelf", options)
    assert list_files() == before and psutil.Process().children() == children


def test_calls_under_way_fail_where_another_one_gives_the_store_up(store: IsolatedStore):
    """They see the end of the process at once, and never a file that was opened since."""
    errors: list[Exception] = []

    def ask(name: str) -> None:
        try:
            store.exists([name])
        except StoreDied as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=("hang",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    began = time.monotonic()
    ask("crash")
    opened = [open(os.devnull) for _ in range(40)]  # noqa: SIM115
    for thread in threads:
        thread.join(20)
    assert len(errors) == 5 and time.monotonic() - began < 10
    for file in opened:
        file.close()
    await_up(store)


def test_its_process_does_without_torch():
    code = "import sys; import headrace.memory.storage.child; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

"""Work that the ranks of a machine share: each piece is done once, and nobody waits for a process that has died."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from headrace.kernels import nvrtc
from headrace.kernels.collective import MOST_RANKS, parts
from headrace.kernels.sharing import alone

RANKS = 3
SPAWN = multiprocessing.get_context("spawn")


def compile_as_rank(folder: Path, barrier: Any, first_dies: bool) -> None:
    """Want a source when all others do. Who compiles leaves a mark; of several, the first may die of it."""

    def compile_slowly(*_: object) -> bytes:
        (folder / f"compiling-{os.getpid()}").touch()
        if first_dies and len(list(folder.glob("compiling-*"))) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        barrier.wait(60)  # of this process and the test: the others have had time to come
        return b"code"

    nvrtc._compile = compile_slowly
    (folder / f"wanting-{os.getpid()}").touch()
    assert nvrtc.compile_into(folder / "cuda" / "streams.cubin", Mock(), "streams", ()) == b"code"


@pytest.mark.parametrize("first_dies", [False, True])
def test_one_rank_compiles_and_the_others_wait_for_it(tmp_path: Path, first_dies: bool):
    """If it dies, another one takes over."""
    barrier = SPAWN.Barrier(2)
    ranks = [SPAWN.Process(target=compile_as_rank, args=(tmp_path, barrier, first_dies)) for _ in range(RANKS)]
    for rank in ranks:
        rank.start()
    while len(list(tmp_path.glob("wanting-*"))) < RANKS:
        assert all(rank.exitcode in (None, -signal.SIGKILL) for rank in ranks)
        ranks[0].join(0.02)
    barrier.wait(60)
    for rank in ranks:
        rank.join(60)
    assert sorted(rank.exitcode or 0 for rank in ranks) == [-signal.SIGKILL * first_dies, 0, 0]
    assert len(list(tmp_path.glob("compiling-*"))) == 1 + first_dies
    assert [path.name for path in (tmp_path / "cuda").iterdir()] == ["streams.cubin"]


def test_a_rank_that_cannot_lock_compiles_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: b"code")
    (tmp_path / "cuda").touch()  # in place of a folder
    assert nvrtc.compile_into(tmp_path / "cuda" / "streams.cubin", Mock(), "streams", ()) == b"code"
    with alone(tmp_path / "cuda" / "any.lock") as was_done:
        assert not was_done


def test_what_another_thread_has_done_need_not_be_done_again(tmp_path: Path):
    lock, is_in, may_end, entered = tmp_path / "a.lock", threading.Event(), threading.Event(), list[bool]()

    def enter() -> None:
        with alone(lock) as was_done:
            entered.append(was_done)
            is_in.set()
            assert may_end.wait(60)

    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(enter)
        assert is_in.wait(60)
        others = [threads.submit(enter) for _ in range(2)]
        with alone(lock, 0.05) as was_done:
            assert not was_done and entered == [False], "after a while one goes on without the lock"
        assert lock.exists(), "and leaves it to its owner"
        may_end.set()
        for thread in (first, *others):
            thread.result(60)
    assert entered == [False, True, True] and not lock.exists()
    with alone(lock) as was_done:
        assert not was_done, "nobody was waited for"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a preprocessor")
@pytest.mark.parametrize("ranks", [2, MOST_RANKS])
def test_each_kernel_is_in_the_part_that_is_loaded_for_it(ranks: int):
    text = nvrtc.read_source(parts.SOURCE)
    for number in parts.TYPES.values():
        sources = parts.list_sources(ranks, number, (9, 0))
        found: dict[str, nvrtc.Source] = {}
        for source in sources:
            defines = [option for option in source[1] if option.startswith("-D")]
            command = ["g++", "-E", "-P", "-x", "c++", *defines, "-"]
            done = subprocess.run(command, input=text, capture_output=True, check=True, timeout=60)
            names = re.findall(r"MOST_THREADS\) (\w+)\(", done.stdout.decode())
            assert names and not set(names) & set(found)
            found |= dict.fromkeys(names, source)
        assert found == {
            entry: nvrtc.describe_for(parts.SOURCE, (9, 0), **parts.list_macros(entry, ranks, number))
            for entry in parts.ENTRIES
        }

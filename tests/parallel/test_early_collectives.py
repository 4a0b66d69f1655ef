"""What ranks need when they meet is compiled before torch is there, for the GPU that the driver tells of."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from headrace.kernels import early, nvrtc
from headrace.kernels.collective import parts
from headrace.parallel.early import compile_collectives


class Driver:
    """Of one GPU with a compute capability; -1: of none."""

    def __init__(self, major: int):
        self._values = {75: major, 76: 0}

    def cuInit(self, flags: int) -> int:
        return 100 if self._values[75] < 0 else 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        return ordinal

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = self._values[attribute]
        return 0


@pytest.mark.parametrize(
    ("major", "ranks", "count"), [(9, 2, 10), (9, 8, 10), (8, 4, 10), (7, 2, 0), (9, 9, 0), (-1, 2, 0)]
)
def test_a_start_compiles_collectives_before_it_imports_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, major: int, ranks: int, count: int
):
    """Into the files that ranks look for later; one that does not compile is left to them."""
    compiled: list[tuple[str, ...]] = []

    def compile_some(library: object, text: bytes, name: str, options: tuple[str, ...]) -> bytes:
        compiled.append(options)
        if "-DPART=4" in options:
            raise nvrtc.CudaSourceError("no")
        return b"code"

    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(early, "DRIVER_FILES", (tmp_path / "driver",))
    monkeypatch.setattr(early, "ctypes", Mock(wraps=early.ctypes, CDLL=lambda name: Driver(major)))
    monkeypatch.setattr(nvrtc, "open_nvrtc", Mock)
    monkeypatch.setattr(nvrtc, "_compile", compile_some)
    compile_collectives(ranks)
    assert not any(thread.name == "collectives" for thread in threading.enumerate()), "there is no GPU"
    (tmp_path / "driver").touch()
    for turn in range(2):
        compile_collectives(ranks)
        for thread in threading.enumerate():
            if thread.name == "collectives":
                thread.join(60)
        assert len(compiled) == count + (turn and count > 0), "what is there is not compiled again"
    wanted = parts.list_sources(ranks, parts.TYPES["bfloat16"], (major, 0))
    assert len(wanted) == 10 and (not count or set(compiled) == {options for _, options in wanted})
    paths = {nvrtc.locate(Mock(), *source) for source in wanted if "-DPART=4" not in source[1]}
    assert set((tmp_path / "cuda").glob("*")) == (paths if count else set())

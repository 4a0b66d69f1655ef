"""The room that compiles C++ kernels: what is compiled again and what is not, failures, locks, and doing without."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import threading
from pathlib import Path

import pytest
import torch

from headrace.base.errors import ConfigError
from headrace.kernels.native import loading
from headrace.kernels.native.compilation import CompilationFailed, compile_library, library_path
from headrace.kernels.native.loading import NativeLibrary
from headrace.kernels.native.sources import FOLDER, included, list_units, prebuilt_path, targets
from headrace.kernels.native.toolchain import ISAS, find_compiler
from headrace.kernels.rms_norm import cpu as rms_norm
from headrace.kernels.rms_norm import reference as rms_norm_reference

COMPILER = find_compiler()
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
SCALAR, AVX2 = ISAS[:2]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder of sources of its own: one function of each of two files, one of which includes a header."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.h").write_text("#define ANSWER 41\n")
    (folder / "one.cpp").write_text('// compiled for: scalar\n#include "answer.h"\nextern "C" __attribute__((visibility("default"))) int one() { return ANSWER; }\n')
    (folder / "two.cpp").write_text('// compiled for: scalar\nextern "C" __attribute__((visibility("default"))) int two() { return 2; }\n')
    (folder / "draft.cpp").write_text("this is not C++ and nobody asked for it\n")
    return folder


def compile_for(isas, sources: Path, cache: Path) -> Path:
    return compile_library(list_units(isas, sources), COMPILER, cache)


@needs_compiler
def test_only_what_changed_is_compiled_again(sources: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    path = compile_for((SCALAR,), sources, cache)
    assert ctypes.CDLL(str(path)).one() == 41
    assert path == library_path(list_units((SCALAR,), sources), COMPILER, cache) == compile_for((SCALAR,), sources, cache)
    objects = set(cache.glob("*.o"))
    (sources / "answer.h").write_text("#define ANSWER 42\n")
    changed = compile_for((SCALAR,), sources, cache)
    assert changed != path and ctypes.CDLL(str(changed)).one() == 42 and ctypes.CDLL(str(changed)).two() == 2
    assert [p.name.split("-")[0] for p in set(cache.glob("*.o")) - objects] == ["one"]


@needs_compiler
def test_a_compiler_error_is_told_and_leaves_nothing(sources: Path, tmp_path: Path):
    (sources / "two.cpp").write_text("// compiled for: scalar\nint two() { return tow; }\n")
    with pytest.raises(CompilationFailed, match=r"two\.cpp:2:.*error.*tow"):
        compile_for((SCALAR,), sources, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so")) and not list((tmp_path / "cache").glob("*.partial"))


@needs_compiler
def test_what_dead_processes_left_is_swept(sources: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    cache.mkdir()
    dead, living, old = cache / "one-scalar-abc.o.999999999.partial", cache / f"two-scalar-abc.o.{os.getpid()}.partial", cache / "old-scalar-abc.o"
    for path in (dead, living, old):
        path.touch()
    os.utime(old, (0, 0))
    compile_for((SCALAR,), sources, cache)
    assert not dead.exists() and not old.exists() and living.exists()


@needs_compiler
def test_processes_wait_for_one_another(sources: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    cache.mkdir()
    with (cache / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = threading.Thread(target=compile_for, args=((SCALAR,), sources, cache))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive() and not list(cache.glob("*.o"))
    waiting.join(60)
    assert len(list(cache.glob("*.so"))) == 1


def test_without_a_compiler_plain_torch_serves(monkeypatch, caplog):
    monkeypatch.setattr(loading, "find_compiler", lambda: None)
    monkeypatch.delenv("HEADRACE_CPU_ISA", raising=False)
    library = NativeLibrary()
    monkeypatch.setattr(rms_norm, "NATIVE", library)
    x, weight = torch.randn(3, 20), torch.randn(20)
    for _ in range(3):
        assert torch.equal(rms_norm.rms_norm(x, weight, 1e-6), rms_norm_reference.rms_norm(x, weight, 1e-6))
    assert library.state.status == "unavailable" and "no C++ compiler" in library.state.detail
    assert len(caplog.records) == 1 and "install one" in caplog.text


@needs_compiler
def test_a_folder_that_cannot_be_written_names_the_remedy(monkeypatch, caplog):
    monkeypatch.setenv("HEADRACE_CACHE", "/proc/nowhere")
    monkeypatch.delenv("HEADRACE_CPU_ISA", raising=False)
    library = NativeLibrary()
    assert library.find() is None
    library.wait(30)
    assert library.state.status == "unavailable" and "HEADRACE_CACHE" in caplog.text


@needs_compiler
def test_a_failed_compilation_leaves_plain_torch(monkeypatch, caplog, tmp_path: Path):
    def fail(*_):
        raise CompilationFailed("kernel.cpp:7: error: no")

    monkeypatch.setattr(loading, "build_file", fail)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.delenv("HEADRACE_CPU_ISA", raising=False)
    library = NativeLibrary()
    assert library.inspect().status == "idle"
    assert library.find() is None
    library.wait(30)
    assert library.find() is None and library.state.status == "unavailable"
    assert "kernel.cpp:7: error: no" in library.state.detail and "kernel.cpp:7: error: no" in caplog.text


def test_kernels_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("HEADRACE_CPU_ISA", "off")
    library = NativeLibrary()
    assert library.inspect().status == "off" and library.find() is None and library.state.status == "off"


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("HEADRACE_CPU_ISA", "sse9")
    with pytest.raises(ConfigError, match="HEADRACE_CPU_ISA must be one of off, scalar, avx2"):
        NativeLibrary().find()


KERNELS = [(path.name, name) for path in sorted(FOLDER.glob("*.cpp")) for name in targets(path) if name != "torch"]


def test_a_shipped_library_is_named_after_its_sources(tmp_path: Path):
    (tmp_path / "a.cpp").write_text("// compiled for: scalar\n")
    before = prebuilt_path(tmp_path)
    (tmp_path / "a.cpp").write_text("// compiled for: scalar avx2\n")
    assert before.parent == tmp_path and before.suffix == ".so" and prebuilt_path(tmp_path) != before


def test_plainer_objects_are_linked_first():
    labels = [unit.label for unit in list_units(ISAS)]
    order = ["torch", *(isa.name for isa in ISAS)]
    assert labels == sorted(labels, key=order.index) and set(labels) == set(order)


@pytest.mark.parametrize("name", sorted({name for name, _ in KERNELS}))
def test_kernels_know_nothing_of_torch(name: str):
    for path in included(FOLDER / name):
        assert not re.search(r"#include <(torch|ATen|c10)", path.read_text()), path.name


@needs_compiler
@pytest.mark.parametrize(("name", "isa"), [(name, isa) for name, isa in KERNELS if isa in ("avxvnni", "avx512", "amx")])
def test_kernels_compile_where_they_cannot_run(name: str, isa: str):
    import subprocess

    flags = next(known.flags for known in ISAS if known.name == isa)
    if not COMPILER.accepts(flags):
        pytest.skip(f"the compiler knows no {isa}")
    unit = next(unit for unit in list_units(ISAS) if unit.source.name == name and unit.label == isa)
    done = subprocess.run([COMPILER.path, *unit.options, "-fsyntax-only", str(unit.source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

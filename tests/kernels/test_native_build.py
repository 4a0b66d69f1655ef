"""The room that compiles C++ kernels: what is compiled again and what is not, failures, locks, and doing without."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from headrace.base.errors import ConfigError
from headrace.kernels import native
from headrace.kernels.native import compilation, loading
from headrace.kernels.native.compilation import CompilationFailed, CompilationStopped, compile_libraries
from headrace.kernels.native.loading import NativeLibrary, cache_folder
from headrace.kernels.native.sources import FOLDER, OPERATORS, included, library, list_objects, shipped_path
from headrace.kernels.native.toolchain import ISAS, Compiler, find_compiler, machine_isas
from headrace.kernels.rowwise import cpu, reference

COMPILER = find_compiler()
ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder of sources of its own: one function of each of two files, one of which includes a header."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.h").write_text("#define ANSWER 41\n")
    (folder / "one.cpp").write_text(
        '// compiled for: scalar\n#include "answer.h"\nextern "C" __attribute__((visibility("default"))) int one() { '
        'return ANSWER; }\n'
    )
    (folder / "two.cpp").write_text(
        '// compiled for: scalar\nextern "C" __attribute__((visibility("default"))) int two() { return 2; }\n'
    )
    (folder / "draft.cpp").write_text("this is not C++ and nobody asked for it\n")
    return folder


def compile_for(isa: str, sources: Path, cache: Path) -> Path:
    return compile_libraries([library(isa, sources)], COMPILER, cache)[0]


def compiled(cache: Path) -> set[str]:
    """Which object is there, of what and for what."""
    return {path.name.rsplit("-", 1)[0] for path in cache.glob("*.o")}


@needs_compiler
def test_only_what_changed_is_compiled_again(sources: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    path = compile_for("scalar", sources, cache)
    assert ctypes.CDLL(str(path)).one() == 41
    assert path == library("scalar", sources).path(COMPILER, cache) == compile_for("scalar", sources, cache)
    objects = set(cache.glob("*.o"))
    (sources / "answer.h").write_text("#define ANSWER 42\n")
    changed = compile_for("scalar", sources, cache)
    assert changed != path and ctypes.CDLL(str(changed)).one() == 42 and ctypes.CDLL(str(changed)).two() == 2
    assert [p.name.split("-")[0] for p in set(cache.glob("*.o")) - objects] == ["one"]


@needs_compiler
def test_progress_is_reported_file_by_file(sources: Path, tmp_path: Path):
    told: list[tuple[int, int]] = []

    def report(num_done: int, num_files: int) -> None:
        told.append((num_done, num_files))

    compile_libraries([library("scalar", sources)], COMPILER, tmp_path, report)
    assert sorted(told) == [(0, 2), (1, 2), (2, 2)]
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    compile_libraries([library("scalar", sources)], COMPILER, tmp_path, report)
    assert sorted(told[3:]) == [(0, 1), (1, 1)]
    compile_libraries([library("scalar", sources)], COMPILER, tmp_path, report)
    assert len(told) == 5, "nothing was to be done"


def compile_ahead(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python -m headrace.kernels.native`` with a cache of its own."""
    environment = {**os.environ, "HEADRACE_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-m", "headrace.kernels.native"], env=environment, capture_output=True, text=True, timeout=250,
        cwd=ROOT,
    )


def test_compiling_ahead_tells_why_not(tmp_path: Path):
    done = compile_ahead(tmp_path, PATH=str(tmp_path), HEADRACE_CPU_ISA="")
    if "CPU kernels: " in done.stdout:
        pytest.skip("libraries are shipped")
    assert done.returncode == 1 and not done.stderr and len(done.stdout.splitlines()) <= 2
    assert "no C++ compiler found (g++, c++, clang++); install one" in done.stdout and "slower" in done.stdout
    failing = tmp_path / "g++"
    failing.write_text("#!/bin/sh\necho 'a.cpp:1: error: no' >&2\nexit 1\n")
    failing.chmod(0o755)
    done = compile_ahead(tmp_path, PATH=str(tmp_path), HEADRACE_CPU_ISA="scalar")
    assert done.returncode == 1 and not done.stderr and "compiling them failed: a.cpp:1: error: no" in done.stdout
    assert compile_ahead(tmp_path, HEADRACE_CPU_ISA="sse9").returncode == 1
    assert compile_ahead(tmp_path, HEADRACE_CPU_ISA="off").returncode == 0


@needs_compiler
def test_compiling_ahead_shows_progress_and_is_quick_when_done(tmp_path: Path):
    """With all objects at hand but one that takes little; compiling all takes half a minute."""
    if native.build().status != "ready" or not (objects := list(cache_folder().glob("*.o"))):
        pytest.skip("no native library, or one that was shipped")
    (tmp_path / "native").mkdir()
    for path in objects:
        if not path.name.startswith("kernels-"):
            shutil.copy(path, tmp_path / "native")
    done = compile_ahead(tmp_path)
    assert done.returncode == 0 and "compiling the CPU kernels: 1 of 1 files" in done.stdout, done.stdout + done.stderr
    done = compile_ahead(tmp_path)
    assert done.returncode == 0 and done.stdout == f"CPU kernels: {native.state().detail}\n"


@needs_compiler
def test_a_compiler_error_is_told_and_leaves_nothing(sources: Path, tmp_path: Path):
    (sources / "two.cpp").write_text("// compiled for: scalar\nint two() { return tow; }\n")
    with pytest.raises(CompilationFailed, match=r"two\.cpp:2:.*error.*tow"):
        compile_for("scalar", sources, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so")) and not list((tmp_path / "cache").glob("*.partial"))


@needs_compiler
def test_what_dead_processes_left_is_swept(sources: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    cache.mkdir()
    dead, living, old = (
        cache / "one-scalar-abc.o.999999999.partial", cache / f"two-scalar-abc.o.{os.getpid()}.partial",
        cache / "old-scalar-abc.o"
    )
    for path in (dead, living, old):
        path.touch()
    os.utime(old, (0, 0))
    compile_for("scalar", sources, cache)
    assert not dead.exists() and not old.exists() and living.exists()


@needs_compiler
def test_processes_wait_for_one_another(sources: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    cache.mkdir()
    with (cache / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = threading.Thread(target=compile_for, args=("scalar", sources, cache))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive() and not list(cache.glob("*.o"))
    waiting.join(60)
    assert len(list(cache.glob("*.so"))) == 1


def test_without_a_compiler_plain_torch_serves(monkeypatch, caplog):
    monkeypatch.setattr(loading, "find_compiler", lambda: None)
    monkeypatch.delenv("HEADRACE_CPU_ISA", raising=False)
    library = NativeLibrary()
    monkeypatch.setattr(cpu, "NATIVE", library)
    x, weight = torch.randn(3, 20), torch.randn(20)
    for _ in range(3):
        assert torch.equal(cpu.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
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
def test_a_cache_that_may_not_be_looked_at_is_as_one_that_cannot_be_written(monkeypatch, caplog, tmp_path: Path):
    stat, opened = os.stat, os.open

    def refuse(real):
        def call(path, *args, **options):
            if str(path).startswith(str(tmp_path)):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *args, **options)

        return call

    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.delenv("HEADRACE_CPU_ISA", raising=False)
    monkeypatch.setattr(os, "stat", refuse(stat))
    monkeypatch.setattr(os, "open", refuse(opened))
    library = NativeLibrary()
    assert library.find() is None
    library.wait(30)
    assert (
        library.state.status == "unavailable"
        and "cannot be written to: Permission denied; set HEADRACE_CACHE" in caplog.text
    )


@needs_compiler
def test_a_failed_compilation_leaves_plain_torch(monkeypatch, caplog, tmp_path: Path):
    def fail(*_):
        raise CompilationFailed("kernel.cpp:7: error: no")

    monkeypatch.setattr(loading, "compile_libraries", fail)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.delenv("HEADRACE_CPU_ISA", raising=False)
    library = NativeLibrary()
    assert library.inspect().status == "idle"
    assert library.find() is None
    library.wait(30)
    assert library.find() is None and library.state.status == "unavailable"
    assert "kernel.cpp:7: error: no" in library.state.detail and "kernel.cpp:7: error: no" in caplog.text


@pytest.mark.parametrize(("script", "reason"), [
    ("#!/bin/sh\nexit 0\n", "wrote nothing"), ("#!/nowhere/sh\n", "does not run: No such file"),
    ("#!/bin/sh\necho 'a.cpp:1: error: no' >&2\nexit 1\n", "a.cpp:1: error: no"),
    ("#!/bin/sh\nkill -INT $$\nsleep 60\n", "interrupted"),
])
def test_compilers_that_make_nothing_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
):
    broken = tmp_path / "g++"
    broken.write_text(script)
    broken.chmod(0o755)
    monkeypatch.setattr(compilation.shutil, "which", lambda name: None)  # without nice, which would say so itself
    with pytest.raises(CompilationFailed, match=reason):
        compile_libraries([library("scalar")], Compiler(str(broken), script), tmp_path / "cache", workers=2)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]


def test_when_compilers_are_told_to_end_no_other_begins(tmp_path: Path):
    """As by Ctrl-C, which a terminal sends to all its processes."""
    begun, interrupted = tmp_path / "begun", tmp_path / "g++"
    interrupted.write_text(f'#!/bin/sh\necho >> {begun}\nkill -INT $$\n')
    interrupted.chmod(0o755)
    with pytest.raises(CompilationStopped):
        compile_libraries([library("scalar")], Compiler(str(interrupted), "interrupted"), tmp_path / "cache", workers=1)
    assert len(library("scalar").units) > 1 and begun.read_text() == "\n"


def test_kernels_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("HEADRACE_CPU_ISA", "off")
    library = NativeLibrary()
    assert library.inspect().status == "off" and library.find() is None and library.state.status == "off"


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("HEADRACE_CPU_ISA", "sse9")
    with pytest.raises(ConfigError, match="HEADRACE_CPU_ISA must be one of off, scalar, avx2"):
        NativeLibrary().find()


KERNELS = [(sources[-1].name, name) for sources, names in list_objects().items() for name in names if name != OPERATORS]


@needs_compiler
def test_a_library_has_its_own_kernels_and_those_that_it_adds_to(tmp_path: Path):
    """And neither those of other instruction sets nor, of one source, two."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name, names in {
        "all": "scalar avx2 avx512", "best": "avx512 amx", "own": "amx", "other": "scalar avx2 avxvnni"
    }.items():
        (folder / f"{name}.cpp").write_text(f"// compiled for: {names}\n")
    (folder / "part.cpp").write_text("// compiled with: all.cpp\n")
    (folder / "binding.cpp").write_text("// compiled for: operators\n")
    parts = {
        isa.name: [([source.stem for source in unit.sources], unit.label) for unit in library(isa.name, folder).units]
        for isa in ISAS
    }
    assert parts["scalar"] == [(["part", "all"], "scalar"), (["other"], "scalar")]
    assert parts["avxvnni"] == [(["part", "all"], "avx2"), (["other"], "avxvnni")]
    assert parts["avx512"] == [(["part", "all"], "avx512"), (["best"], "avx512")]
    assert parts["amx"] == [(["part", "all"], "avx512"), (["best"], "amx"), (["own"], "amx")]
    assert [unit.sources for unit in library(OPERATORS, folder).units] == [(folder / "binding.cpp",)]


@needs_compiler
def test_a_source_compiled_with_another_is_a_part_of_its_object(sources: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    two = sources / "two.cpp"
    two.write_text(two.read_text().replace("compiled for: scalar", "compiled with: one.cpp"))
    path = compile_for("scalar", sources, cache)
    assert compiled(cache) == {"one-scalar"} and (ctypes.CDLL(str(path)).one(), ctypes.CDLL(str(path)).two()) == (41, 2)
    two.write_text(two.read_text().replace("return 2", "return 3"))
    changed = compile_for("scalar", sources, cache)
    assert changed != path and ctypes.CDLL(str(changed)).two() == 3


@needs_compiler
def test_what_two_libraries_share_is_compiled_once(sources: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    for name, names in {"one": "scalar avx512", "two": "amx"}.items():
        path = sources / f"{name}.cpp"
        path.write_text(path.read_text().replace("compiled for: scalar", f"compiled for: {names}"))
    if not COMPILER.accepts(ISAS[-1].flags):
        pytest.skip("the compiler knows no AMX")
    paths = compile_libraries([library("avx512", sources), library("amx", sources)], COMPILER, cache)
    assert len(set(paths)) == 2 and compiled(cache) == {"one-avx512", "two-amx"}


class Operators:
    """Instead of torch's: kernels are taken if their instruction set is one of ``runnable``."""

    def __init__(self, runnable: set[str]):
        self.runnable, self.used = runnable, []

    def can_run(self, level: int) -> bool:
        return ISAS[level].name in self.runnable

    def use_kernels(self, address: int) -> None:
        self.used.append(address)


@pytest.fixture
def search(monkeypatch, tmp_path: Path):
    """`search(machine, runnable, shipped=...)`: a library that has been waited for, and what was compiled for it;
    ``machine`` and ``runnable`` are what the system says, and the kernels, that there is."""
    monkeypatch.delenv("HEADRACE_CPU_ISA", raising=False)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(loading.torch.ops, "load_library", lambda path: None)

    def run(
        machine: set[str], runnable: set[str], shipped: tuple[str, ...] = (), compiler=COMPILER, refused: str = ""
    ) -> tuple[NativeLibrary, list[str]]:
        names: list[str] = []

        def compile_named(libraries, *_):
            names.extend(one.name for one in libraries)
            return [tmp_path / one.name for one in libraries]

        monkeypatch.setattr(loading, "compile_libraries", compile_named)
        monkeypatch.setattr(loading, "find_compiler", lambda: compiler)
        monkeypatch.setattr(
            loading, "machine_isas", lambda most=None: tuple(isa for isa in ISAS if isa.name in machine)
        )
        monkeypatch.setattr(loading, "find_table", lambda path: 0)
        monkeypatch.setattr(
            loading, "shipped_path", lambda name: Path("/dev/null") if name in shipped else tmp_path / "none"
        )
        monkeypatch.setattr(
            "headrace.kernels.native.toolchain.Compiler.accepts", lambda self,
            flags: not refused or refused not in flags
        )
        found = NativeLibrary()
        found._loading = Operators(runnable)
        found.wait(30)
        return found, names

    return run


ALL = {isa.name for isa in ISAS}


@needs_compiler
def test_only_what_the_machine_uses_is_compiled(search):
    library, names = search(ALL, ALL)
    assert library.state.detail == "amx" and names == [OPERATORS, "amx"]
    library, names = search({"scalar", "avx2"}, {"scalar", "avx2"})
    assert library.state.detail == "avx2" and names == [OPERATORS, "avx2"]


@needs_compiler
def test_where_the_processor_refuses_the_next_best_serves(search):
    library, names = search(ALL, ALL - {"amx"})
    assert library.state.detail == "avx512" and names == [OPERATORS, "amx", OPERATORS, "avx512"]


@needs_compiler
def test_what_the_compiler_does_not_know_is_left_out(search):
    library, names = search(ALL, ALL, refused="-mamx-tile")
    assert library.state.detail == "avx512" and names == [OPERATORS, "avx512"]


def test_shipped_libraries_need_no_compiler(search):
    library, names = search(ALL, ALL, shipped=(OPERATORS, *ALL), compiler=None)
    assert library.state.detail == "amx" and not names
    library, names = search(ALL, ALL, shipped=(OPERATORS, "scalar", "avx2"), compiler=None)
    assert library.state.detail == "avx2" and not names


def test_a_shipped_library_is_named_after_all_sources(tmp_path: Path):
    (tmp_path / "a.cpp").write_text("// compiled for: scalar\n")
    before = shipped_path("scalar", tmp_path)
    (tmp_path / "a.cpp").write_text("// compiled for: scalar avx2\n")
    assert (
        before.parent == tmp_path and before.suffix == ".so"
        and shipped_path("scalar", tmp_path) != before != shipped_path("avx2", tmp_path)
    )


@needs_compiler
def test_shipping_lays_all_libraries_beside_the_sources(sources: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    (sources / "one.cpp").write_text("// compiled for: operators\n")
    kernels = (
        "// compiled for: scalar avx2 avxvnni avx512 amx\nextern \"C\" __attribute__((visibility(\"default\"))) const "
        "int headrace_kernels;\nconst int headrace_kernels = 7;\n"
    )
    (sources / "two.cpp").write_text(kernels)
    (sources / "headrace_cpu-old-scalar.so").touch()
    names = [OPERATORS, *(isa.name for isa in ISAS if COMPILER.accepts(isa.flags))]
    assert loading.ship(sources) == [shipped_path(name, sources) for name in names]
    assert sorted(sources.glob("*.so")) == sorted(shipped_path(name, sources) for name in names)
    assert ctypes.c_int.from_address(loading.find_table(shipped_path("scalar", sources))).value == 7


def test_each_instruction_set_is_complete():
    """Its library has one object of each group of kernels, for itself or for what it adds to."""
    for isa in ISAS:
        units = library(isa.name).units
        stems = [source.stem.removesuffix(f"_{unit.label}") for unit in units for source in unit.sources]
        assert {"attention", "kernels", "pack", "packed_gather", "rope", "rows", "sample"} <= set(stems)
        labels = [unit.label for unit in units]
        assert (
            labels == sorted(labels, key=[known.name for known in ISAS].index) and set(labels) <= {isa.name, isa.base}
        )


def test_instruction_sets_up_to_one():
    machine = machine_isas()
    assert machine_isas("scalar") == (ISAS[0],) and machine[0] == ISAS[0]
    assert machine_isas("avx2") == machine[:2] and machine_isas("amx") == machine


@pytest.mark.parametrize("name", sorted({name for name, _ in KERNELS}))
def test_kernels_know_nothing_of_torch(name: str):
    for path in included(FOLDER / name):
        assert not re.search(r"#include <(torch|ATen|c10)", path.read_text()), path.name


@needs_compiler
@pytest.mark.parametrize(("name", "isa"), [(name, isa) for name, isa in KERNELS if isa in ("avxvnni", "avx512", "amx")])
def test_kernels_compile_where_they_cannot_run(name: str, isa: str):
    flags = next(known.flags for known in ISAS if known.name == isa)
    if not COMPILER.accepts(flags):
        pytest.skip(f"the compiler knows no {isa}")
    unit = next(unit for unit in library(isa).units if unit.sources[-1].name == name and unit.label == isa)
    if unit.object_path(COMPILER, cache_folder()).exists():
        return  # this compiler has compiled just this, for tests that run it
    done = subprocess.run([*unit.command(COMPILER), "-fsyntax-only"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

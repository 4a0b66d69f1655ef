"""The C++ sources, what each is compiled for, the libraries built from them, and digests of everything that an object
depends on.

A source starts with ``// compiled for: scalar avx2 avx512 amx`` (kernels: an object per instruction set, without
torch's headers), ``// compiled for: operators`` (with them), or ``// compiled with: other.cpp`` (included in that
object: parsing headers takes longer than compiling a small source).
"""

from __future__ import annotations

import hashlib
import platform
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch

from headrace.kernels.native.toolchain import ISAS, LEVELS, Compiler

FOLDER = Path(__file__).resolve().parents[2] / "csrc" / "cpu"
OPTIONS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized")
KERNEL_OPTIONS = (*OPTIONS, "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
OPERATOR_OPTIONS = (*OPTIONS, "-O1", "-DTORCH_TARGET_VERSION=0x020b000000000000")  # torch's stable ABI, as of 2.11
OPERATORS = "operators"
"""The library that torch loads; kernel libraries are named after their instruction set."""
_HEADING = re.compile(r"// compiled (for|with): ([a-z0-9_. ]+)")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Unit:
    """One object file, for ``label`` (an instruction set or `OPERATORS`): ``options`` are the compiler's, without file
    names. The last of ``sources`` gives it its name; the others are included before it."""

    sources: tuple[Path, ...]
    label: str
    options: tuple[str, ...]

    @cached_property
    def included(self) -> set[Path]:
        """The sources and every header beside them that they include, directly or not."""
        return set().union(*(included(source) for source in self.sources))

    @property
    def size(self) -> int:
        """Bytes of source text, an estimate of compile time."""
        return sum(path.stat().st_size for path in self.included)

    def command(self, compiler: Compiler) -> list[str]:
        """The compiler command, without the output name."""
        first = [part for source in self.sources[:-1] for part in ("-include", str(source))]
        return [compiler.path, *self.options, *first, "-c", str(self.sources[-1])]

    def object_path(self, compiler: Compiler, folder: Path) -> Path:
        """The path in ``folder``; its digest covers the sources and their includes, the options and the compiler, so
        that a change of any makes another file."""
        # kernels include none of torch's headers: they outlive its updates
        torch_version = torch.__version__ if self.label == OPERATORS else ""
        summed = hashlib.sha256(repr((self.label, self.options, compiler.identity, torch_version)).encode())
        for path in sorted(self.included):
            summed.update(path.name.encode() + path.read_bytes())
        return folder / f"{self.sources[-1].stem}-{self.label}-{summed.hexdigest()[:20]}.o"


@dataclass(frozen=True)
class Library:
    """A shared library of ``units``, in link order."""

    name: str
    units: tuple[Unit, ...]
    link_options: tuple[str, ...] = ("-shared", "-fPIC")

    def path(self, compiler: Compiler, folder: Path) -> Path:
        """Its path in the cache folder."""
        objects = [unit.object_path(compiler, folder).name for unit in self.units]
        summed = hashlib.sha256(repr((objects, self.link_options)).encode())
        return folder / f"headrace_cpu-{self.name}-{summed.hexdigest()[:20]}.so"


def included(source: Path) -> set[Path]:
    """The source and every header beside it that it includes, directly or not."""
    found, pending = set(), [source]
    while pending:
        path = pending.pop()
        if path not in found:
            found.add(path)
            pending += [path.parent / name for name in _INCLUDE.findall(path.read_text())]
    return found


def _heading(source: Path) -> tuple[str, tuple[str, ...]]:
    """The first line of a source: (``for`` or ``with``, labels), or empty."""
    with source.open() as lines:
        heading = _HEADING.match(lines.readline())
    return (heading[1], tuple(heading[2].split())) if heading else ("", ())


def list_objects(folder: Path = FOLDER) -> dict[tuple[Path, ...], tuple[str, ...]]:
    """The sources of each object, and the labels it is compiled for."""
    headings = {source: _heading(source) for source in sorted(folder.glob("*.cpp"))}
    return {
        (*(part for part in headings if headings[part] == ("with", (source.name,))), source): labels
        for source, (word, labels) in headings.items() if word == "for"
    }


def library(name: str, folder: Path = FOLDER) -> Library:
    """`OPERATORS`, or the kernels of an instruction set: each source compiled for it, or else for its base. Base
    objects are linked first: of an inline standard-library function in both, the linker keeps the first, which every
    CPU that can run the library supports."""
    found = list_objects(folder)
    if name == OPERATORS:
        root = Path(torch.__file__).parent
        options = (
            *OPERATOR_OPTIONS, "-isystem", str(root / "include"), "-isystem",
            str(root / "include" / "torch" / "csrc" / "api" / "include")
        )
        units = tuple(Unit(sources, OPERATORS, options) for sources, labels in found.items() if OPERATORS in labels)
        # The stable ABI lives in torch's CPU library, which the process has loaded already.
        return Library(name, units, (*Library.link_options, f"-L{root / 'lib'}", "-ltorch_cpu", "-ltorch"))
    # iterating over ISAS in order puts the base's objects first
    own, base = ISAS[LEVELS[name]], ISAS[LEVELS[name]].base
    parts = [
        (sources, isa) for isa in ISAS for sources,
        labels in found.items() if isa.name in labels and (isa is own or (isa.name == base and name not in labels))
    ]
    return Library(name, tuple(Unit(sources, isa.name, _kernel_options(isa.name)) for sources, isa in parts))


def _kernel_options(name: str) -> tuple[str, ...]:
    """The compiler options of kernels for an instruction set; HEADRACE_ISA becomes their C++ namespace."""
    isa = ISAS[LEVELS[name]]
    return (
        *KERNEL_OPTIONS, *isa.flags, f"-DHEADRACE_ISA={name}", f"-DHEADRACE_BASE={isa.base or name}",
        f"-DHEADRACE_IS_{name.upper()}"
    )


def describe_sources(folder: Path = FOLDER) -> str:
    """A digest of the sources, recomputed only after one of them was modified."""
    return _sum_files(
        tuple(
            (path, path.stat().st_mtime_ns, path.stat().st_size)
            for path in sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])
        )
    )


@lru_cache(maxsize=1)
def _sum_files(files: tuple[tuple[Path, int, int], ...]) -> str:
    """A digest of the names and contents of files (path, modification time in ns, bytes); the latter two only key the
    cache."""
    summed = hashlib.sha256()
    for path, _, _ in files:
        summed.update(path.name.encode() + path.read_bytes())
    return summed.hexdigest()[:12]


def shipped_path(name: str, folder: Path = FOLDER) -> Path:
    """The path of a library shipped with the package, compiled from exactly these sources. Through torch's stable ABI
    it works with any torch since 2.11."""
    return folder / f"headrace_cpu-{platform.machine()}-{describe_sources(folder)}-{name}.so"

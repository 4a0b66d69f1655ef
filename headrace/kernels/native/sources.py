"""The C++ sources and what each is compiled for, as its first line says; digests over all that goes into an object.

A source starts with ``// compiled for: scalar avx2 avx512 amx`` (one object per instruction set, without torch's headers)
or ``// compiled for: torch`` (one object with them).
"""

from __future__ import annotations

import hashlib
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.kernels.native.toolchain import Compiler, Isa

FOLDER = Path(__file__).resolve().parents[2] / "csrc" / "cpu"
OPTIONS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized")
KERNEL_OPTIONS = (*OPTIONS, "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
TORCH_OPTIONS = (*OPTIONS, "-O1", "-DTORCH_TARGET_VERSION=0x020b000000000000")  # torch's stable ABI, as of 2.11
_HEADING = re.compile(r"// compiled for: ([a-z0-9 ]+)")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Unit:
    """One object file to be: ``options`` are all of the compiler's but the file names."""

    source: Path
    label: str
    options: tuple[str, ...]

    def digest(self, compiler: Compiler) -> str:
        """Names the object: of the source and what it includes, the options and the compiler."""
        summed = hashlib.sha256(repr((self.label, self.options, compiler.identity, torch_headers_version(self))).encode())
        for path in sorted(included(self.source)):
            summed.update(path.name.encode() + path.read_bytes())
        return summed.hexdigest()[:20]


def torch_headers_version(unit: Unit) -> str:
    """Torch's version where its headers are compiled in, else nothing."""
    return torch.__version__ if unit.label == "torch" else ""


def included(source: Path) -> set[Path]:
    """The source and every header beside it that it includes, directly or not."""
    found, pending = set(), [source]
    while pending:
        path = pending.pop()
        if path not in found:
            found.add(path)
            pending += [path.parent / name for name in _INCLUDE.findall(path.read_text())]
    return found


def targets(source: Path) -> tuple[str, ...]:
    """What the first line of a source says that it is compiled for; nothing if it does not say."""
    with source.open() as lines:
        heading = _HEADING.match(lines.readline())
    return tuple(heading[1].split()) if heading else ()


def list_units(isas: tuple[Isa, ...], folder: Path = FOLDER) -> list[Unit]:
    """Every object of a library for these instruction sets, in the order in which they must be linked: plainest first.
    Of an inline function of the standard library that several objects hold, the linker keeps the first, which must run
    wherever the others do."""
    wanted = {source: targets(source) for source in sorted(folder.glob("*.cpp"))}
    has = tuple(f"-DHEADRACE_HAS_{isa.name.upper()}" for isa in isas)
    units = [Unit(source, "torch", (*TORCH_OPTIONS, *has, *_torch_includes())) for source in wanted if "torch" in wanted[source]]
    for isa in isas:
        options = (*KERNEL_OPTIONS, *isa.flags, f"-DHEADRACE_ISA={isa.name}", f"-DHEADRACE_IS_{isa.name.upper()}")
        units += [Unit(source, isa.name, options) for source in wanted if isa.name in wanted[source]]
    return units


def _torch_includes() -> tuple[str, ...]:
    root = Path(torch.__file__).parent / "include"
    return ("-isystem", str(root), "-isystem", str(root / "torch" / "csrc" / "api" / "include"))


def link_options() -> tuple[str, ...]:
    """The stable ABI lives in torch's CPU library, which the process has loaded already."""
    return ("-shared", "-fPIC", f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-ltorch")


def prebuilt_path(folder: Path = FOLDER) -> Path:
    """Where a library shipped with the package lies, if one is: compiled from exactly these sources, for every
    instruction set, by ``build(all_isas=True)``. Torch's stable ABI lets it work with any torch since 2.11."""
    summed = hashlib.sha256()
    for path in sorted([*folder.glob("*.cpp"), *folder.glob("*.h")]):
        summed.update(path.name.encode() + path.read_bytes())
    return folder / f"headrace_cpu-{platform.machine()}-{summed.hexdigest()[:12]}.so"

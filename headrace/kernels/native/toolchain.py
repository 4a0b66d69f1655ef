"""Compilers and instruction sets of this machine, and the flags for them."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

COMPILERS = ("g++", "c++", "clang++")
"""In order of preference."""


@dataclass(frozen=True)
class Isa:
    """An instruction set that kernels are compiled for. ``needs``: names in `torch.cpu.get_capabilities`. A kernel
    without a version for it uses that of ``base``."""

    name: str
    flags: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    base: str | None = None


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_HAS_AVX2 = ("avx2", "fma3", "f16c")
_AVX512 = (*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "bf16", "vnni")))
_HAS_AVX512 = tuple(f"avx512_{part}" for part in ("f", "bw", "vl", "dq", "bf16", "vnni"))

ISAS = (
    Isa("scalar"),
    Isa("avx2", _AVX2, _HAS_AVX2),
    Isa("avxvnni", (*_AVX2, "-mavxvnni"), (*_HAS_AVX2, "avx_vnni"), base="avx2"),
    Isa("avx512", _AVX512, _HAS_AVX512),
    Isa(
        "amx", (*_AVX512, "-mavx512vbmi", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        (*_HAS_AVX512, "avx512_vbmi", "amx_tile", "amx_bf16", "amx_int8"), base="avx512"
    ),
)
"""From slowest to fastest; each includes the ones before it, except AVX-VNNI. Same order as ``Isa`` in isa.h."""

LEVELS = {isa.name: level for level, isa in enumerate(ISAS)}


def machine_isas(most: str | None = None) -> tuple[Isa, ...]:
    """The instruction sets up to ``most`` (all if None) that torch reports for this machine, from slowest to fastest.
    What this torch does not report counts as present; the native library checks CPUID again."""
    known = torch.cpu.get_capabilities()
    isas = ISAS[: LEVELS[most] + 1] if most else ISAS
    return tuple(isa for isa in isas if all(known.get(name, True) for name in isa.needs))


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler. ``identity`` (real path, size, time) changes when another version is installed in its place."""

    path: str
    identity: str

    def accepts(self, flags: tuple[str, ...]) -> bool:
        """Whether it supports these flags; runs it on an empty source."""
        return (
            not flags
            or subprocess.run(
                [self.path, *flags, "-x", "c++", "-fsyntax-only", "/dev/null"], capture_output=True
            ).returncode == 0
        )


def find_compiler() -> Compiler | None:
    """The first of `COMPILERS` on the path, or None."""
    for name in COMPILERS:
        found = shutil.which(name)
        if found is not None:
            real = Path(found).resolve()
            status = real.stat()
            return Compiler(found, f"{real} {status.st_size} {status.st_mtime_ns}")
    return None

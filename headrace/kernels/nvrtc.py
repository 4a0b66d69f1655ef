"""Own CUDA C++ (``csrc/cuda``) compiled by the NVRTC that comes with torch into a cache on disk. Torch-free, so that a
start can compile before it has imported torch.

Refuses: loading and launching what is compiled (``cuda_source.py``). Linux only. Knows no kernel by name.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import re
import secrets
import time
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from headrace.base import env
from headrace.base.errors import HeadraceError
from headrace.kernels.sharing import alone

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).resolve().parents[1] / "csrc" / "cuda"
INCLUDE = re.compile(rb'^#include "([a-z0-9_]+\.cuh)"$', re.MULTILINE)
SERIALISED = re.compile(r"wgmma\.mma_async instructions are serialized due to [^\n]+")
"""In NVRTC's log, where products wait for each other: the result is right, but takes longer."""
CUDA_VERSION = re.compile(r"^cuda\b.*= '(\d+)\.", re.MULTILINE)
"""In torch's version.py."""

Source = tuple[str, tuple[str, ...]]
"""The name of a source without its ``.cu``, and nvcc's options, the architecture among them."""


class CudaSourceError(HeadraceError):
    """An error of NVRTC or the driver, with its message."""


def describe_for(name: str, capability: tuple[int, int], /, **macros: int) -> Source:
    """``csrc/cuda/<name>.cu`` with these macros, whose names are in capitals there, for a compute capability."""
    major, minor = capability
    specific = "a" if major >= 9 else ""  # with what only that generation has, such as wgmma
    defines = (f"-D{macro.upper()}={value}" for macro, value in macros.items())
    return name, (f"-arch=sm_{major}{minor}{specific}", "-std=c++17", *defines)


def read_source(name: str) -> bytes:
    """``csrc/cuda/<name>.cu`` with the text of what it includes."""
    return INCLUDE.sub(lambda line: (FOLDER / line[1].decode()).read_bytes(), (FOLDER / f"{name}.cu").read_bytes())


def open_nvrtc() -> ctypes.CDLL:
    """NVRTC of the nvidia packages that torch installs, or the system's; beside a torch without CUDA the newest that is
    installed. Raises `OSError` if there is none."""
    stated = _find_cuda_version()
    version = stated or "[0-9]*"
    spec = find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]
    found = [path for folder in folders for path in sorted(folder.glob(f"*/lib/libnvrtc.so.{version}"))]
    if not found:
        return ctypes.CDLL(f"libnvrtc.so.{stated}" if stated else "libnvrtc.so")
    newest = max(found, key=lambda path: [int(part) for part in path.name.split(".so.")[1].split(".")])
    # NVRTC loads its builtins by bare name, which is not on the search path: load them first
    for builtins in sorted(newest.parent.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(str(newest))


@cache
def _find_cuda_version() -> str | None:
    """The major version of CUDA that torch is built for, found without importing it; None for a torch without CUDA."""
    spec = find_spec("torch")
    text = (Path(spec.origin).parent / "version.py").read_text() if spec and spec.origin else ""
    found = CUDA_VERSION.search(text)
    return found and found[1]


def find_nvrtc() -> tuple[int, int]:
    """The version of NVRTC, without which no own kernel can be compiled. Raises `OSError` if there is none."""
    return _read_version(open_nvrtc())


def _read_version(nvrtc: ctypes.CDLL) -> tuple[int, int]:
    major, minor = c_int(), c_int()
    nvrtc.nvrtcVersion(byref(major), byref(minor))
    return major.value, minor.value


def locate(nvrtc: ctypes.CDLL, name: str, options: tuple[str, ...]) -> Path:
    """Where the cache has a source."""
    digest = hashlib.sha256(repr((read_source(name), options, *_read_version(nvrtc))).encode()).hexdigest()[:20]
    return env.cache_dir() / "cuda" / f"{name}-{digest}.cubin"


def compile_into(path: Path, nvrtc: ctypes.CDLL, name: str, options: tuple[str, ...]) -> bytes:
    """The cubin of a source, for which the cache has ``path``. Ranks want the same sources at the same time, and one of
    them compiles each while the others wait. Raises `CudaSourceError`."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    with alone(path.with_suffix(".lock")):
        with suppress(OSError):
            return path.read_bytes()
        began = time.perf_counter()
        code = _compile(nvrtc, read_source(name), name, options)
        _store(path, code)
    logger.info("compiled %s.cu in %.1f s", name, time.perf_counter() - began)
    return code


def _store(path: Path, code: bytes) -> None:
    # Written aside and renamed, which is atomic: processes may compile the same source at once, in containers that
    # share the cache even under the same process id.
    partial = path.with_suffix(f".{secrets.token_hex(8)}.partial")
    try:
        partial.write_bytes(code)
        partial.replace(path)
    except OSError as error:
        logger.warning("own CUDA C++ is compiled at every start, as it cannot be cached: %s", error)
        with suppress(OSError):
            partial.unlink()


def _compile(nvrtc: ctypes.CDLL, source: bytes, name: str, options: tuple[str, ...]) -> bytes:
    program = c_void_p()
    nvrtc.nvrtcCreateProgram(byref(program), c_char_p(source), f"{name}.cu".encode(), 0, None, None)
    failed = nvrtc.nvrtcCompileProgram(
        program, len(options), (c_char_p * len(options))(*(option.encode() for option in options))
    )
    # a cubin, not PTX: the options name a real architecture (sm_90a), so nothing is compiled when it is loaded
    log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
    code = b"" if failed else _read(nvrtc, program, "CUBIN")
    nvrtc.nvrtcDestroyProgram(byref(program))
    if failed:
        raise CudaSourceError(f"{name}.cu: {log[:2000]}")
    if serialised := SERIALISED.search(log):
        logger.warning("%s.cu is slower than it could be with this NVRTC: %s", name, serialised[0])
    return code


def _read(nvrtc: ctypes.CDLL, program: c_void_p, what: str) -> bytes:
    """The bytes that ``nvrtcGet<what>`` copies."""
    size = c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, byref(size))
    data = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, data)
    return data.raw

"""`NativeLibrary`: the loaded operators, or none yet. They and the kernels of each instruction set are libraries of
their own. Looks for shipped ones, then for cached ones, then compiles what this machine uses on a thread of its own
while plain torch serves."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.base import env
from headrace.base.errors import ConfigError
from headrace.kernels.native.compilation import CompilationFailed, CompilationStopped, compile_libraries
from headrace.kernels.native.sources import FOLDER, OPERATORS, library, shipped_path
from headrace.kernels.native.toolchain import COMPILERS, ISAS, LEVELS, Compiler, Isa, find_compiler, machine_isas

logger = logging.getLogger(__name__)

NAMESPACE = "headrace_cpu"
TABLE = "headrace_kernels"
"""What a library of kernels shows: `Kernels` of kernels.h."""
OFF = "off"
SWITCHED_OFF = "HEADRACE_CPU_ISA=off: plain torch alone"


def check_isa(name: str | None) -> str | None:
    """The name as it is; raises `ConfigError` when it is none of an instruction set."""
    if name is not None and name != OFF and name not in LEVELS:
        raise ConfigError(f"HEADRACE_CPU_ISA must be one of {', '.join([OFF, *LEVELS])}; got {name!r}")
    return name


@dataclass(frozen=True)
class NativeState:
    """``status`` is ``ready``, ``compiling``, ``idle`` (nobody asked yet), ``off`` or ``unavailable``; ``detail`` says
    what runs (the instruction set) or why not."""

    status: str
    detail: str = ""


class NativeOps:
    """The operators as attributes; each is looked up once."""

    def __getattr__(self, name: str) -> Any:
        operator = getattr(getattr(torch.ops, NAMESPACE), name).default
        setattr(self, name, operator)
        return operator


class NativeLibrary:
    """``ops`` is None until operators and kernels are loaded, and never again."""

    def __init__(self) -> None:
        self.ops: NativeOps | None = None
        self.state = NativeState("idle", "compiled or loaded when a model on a CPU first needs it")
        self._loading = NativeOps()
        self._tables: dict[str, int] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_started = False

    def find(self) -> NativeOps | None:
        """The operators, or None: then use plain torch this time. The first call starts the search."""
        if self.ops is None and not self._is_started:
            self.start()
        return self.ops

    def start(self) -> None:
        """Load what is there already; else compile in the background. Raises `ConfigError` for a wrong
        HEADRACE_CPU_ISA."""
        with self._lock:
            if self._is_started:
                return
            wanted = check_isa(env.cpu_isa())
            self._is_started = True
            if wanted == OFF:
                self.state = NativeState("off", SWITCHED_OFF)
            elif not self._load_best(wanted) and self.state.status == "idle":
                self.state = NativeState("compiling", "plain torch serves meanwhile")
                self._thread = threading.Thread(target=self._compile, args=(wanted,), name="native-build", daemon=True)
                self._thread.start()
                atexit.register(self._finish)

    def inspect(self) -> NativeState:
        """Load what is there already, but compile nothing."""
        with self._lock:
            if self._is_started or self.ops is not None:
                return self.state
            wanted = check_isa(env.cpu_isa())
            if wanted == OFF:
                return NativeState("off", SWITCHED_OFF)
            self._load_best(wanted)
            return self.state

    def wait(self, timeout: float | None = None) -> None:
        """Until the compilation, if one runs, is over."""
        self.start()
        if self._thread is not None:
            self._thread.join(timeout)

    def _finish(self) -> None:
        """At the process's end: what is compiled is for the next start, and an interpreter that ends under a thread
        that loads a library aborts. Ctrl-C ends this as if nobody had asked for it: by the system, as Python may not
        hear of a signal that a thread takes which starts a compiler (its handlers run in the main thread, and that
        sleeps on)."""
        if self._thread is None or not self._thread.is_alive():
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed, or nobody reads it
                stream.flush()
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        logger.warning(
            "CPU kernels are still being compiled, for the next start: this process ends when they are, or by Ctrl-C"
        )
        self._thread.join()

    def select(self, name: str) -> str:
        """Let the loaded operators use this instruction set at most (empty: the best), and compile it if need be;
        returns the one that they use."""
        assert self.ops is not None, "the native library is not loaded"
        self._load_best(name or check_isa(env.cpu_isa()), compiles=True)
        return self.state.detail

    def _load_best(self, most: str | None, *, compiles: bool = False) -> bool:
        """Load the best instruction set up to ``most``; unless it ``compiles``, only if that is there. The state says
        what came of it, if anything did."""
        compiler = find_compiler()
        for isa in reversed(machine_isas(most)):
            paths = [path for name in (OPERATORS, isa.name) if (path := find_library(name, compiler)) is not None]
            if len(paths) < 2:
                if compiler is None or not compiler.accepts(isa.flags):
                    continue
                if not compiles:
                    return False
                paths = compile_libraries([library(OPERATORS), library(isa.name)], compiler, cache_folder())
            if self._load(isa, *paths):
                return True
            if self.state.status == "unavailable":
                return False
        self._give_up(f"no C++ compiler found ({', '.join(COMPILERS)}); install one, for example g++")
        return False

    def _compile(self, most: str | None) -> None:
        began = time.monotonic()
        try:
            if self._load_best(most, compiles=True):
                logger.info("CPU kernels compiled in %.1f s", time.monotonic() - began)
        except CompilationStopped as error:  # by who wants this process to end, too
            self.state = NativeState("unavailable", error.message)
        except CompilationFailed as error:
            self._give_up(f"compiling them failed: {error}")
        except OSError as error:
            self._give_up(
                f"{cache_folder()} cannot be written to: {error.strerror or error}; set HEADRACE_CACHE to a folder "
                "that can"
            )

    def _load(self, isa: Isa, operators: Path, kernels: Path) -> bool:
        """Use these kernels, if the processor can."""
        try:
            torch.ops.load_library(str(operators))
            if not self._loading.can_run(LEVELS[isa.name]):
                return False
            if isa.name not in self._tables:
                self._tables[isa.name] = find_table(kernels)
        except OSError as error:
            self._give_up(f"{operators} or {kernels.name} does not load: {error}")
            return False
        self._loading.use_kernels(self._tables[isa.name])
        self.state = NativeState("ready", isa.name)
        self.ops = self._loading
        logger.info("CPU kernels: %s", isa.name)
        return True

    def _give_up(self, reason: str) -> None:
        self.state = NativeState("unavailable", reason)
        logger.warning("CPU kernels run in plain torch, which is slower: %s", reason)


NATIVE = NativeLibrary()
"""Of this process: operators are registered with torch once and for all."""


def state() -> NativeState:
    """What there is, without starting anything."""
    return NATIVE.state


def build(*, wait: bool = True, timeout: float | None = None) -> NativeState:
    """Load or compile the operators of this process, and wait for it unless told not to."""
    NATIVE.start()
    if wait:
        NATIVE.wait(timeout)
    return NATIVE.state


def find_table(kernels: Path) -> int:
    """Load a library of kernels; the address of its table, which stays. Raises OSError."""
    return ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL(str(kernels)), TABLE))


def find_library(name: str, compiler: Compiler | None) -> Path | None:
    """A library that was shipped, or compiled before."""
    shipped = shipped_path(name)
    if shipped.exists():
        return shipped
    if compiler is None:
        return None
    path = library(name).path(compiler, cache_folder())
    if not os.path.exists(path):  # False for what may not be looked at, too
        return None
    with suppress(OSError):  # a folder that others own
        path.touch()  # used: not to be swept
    return path


def ship(folder: Path = FOLDER) -> list[Path]:
    """Compile for all instruction sets that the compiler knows, and lay the libraries beside the sources, where they
    are found before anything is compiled; what was shipped of other sources goes. For those who make packages. Raises
    `CompilationFailed`."""
    compiler = find_compiler()
    if compiler is None:
        raise CompilationFailed(f"no C++ compiler found ({', '.join(COMPILERS)})")
    names = [OPERATORS, *(isa.name for isa in ISAS if compiler.accepts(isa.flags))]
    compiled = compile_libraries([library(name, folder) for name in names], compiler, cache_folder())
    shipped = [shipped_path(name, folder) for name in names]
    for path in folder.glob("*.so"):
        path.unlink()
    for source, target in zip(compiled, shipped, strict=True):
        shutil.copyfile(source, target)
    return shipped


def cache_folder() -> Path:
    """Where objects and libraries are kept."""
    return env.cache_dir() / "native"


def select_isa(name: str = "") -> str:
    """Let the loaded kernels use this instruction set at most (empty: the best), compiled if need be; returns the one
    they use. For tests and benchmarks."""
    return NATIVE.select(name)

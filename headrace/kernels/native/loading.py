"""`NativeLibrary`: finds, compiles and loads the native operators.

The operators are one shared library, the kernels of each instruction set another. Both are looked up among the shipped
libraries, then in the cache; else a background thread compiles them while plain torch serves.

Threads: `start` and `inspect` hold a lock; the compiling thread takes none. It sets ``ops`` last, when everything else
is in place, so that `find` needs no lock on the hot path.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import math
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
from headrace.kernels.native.compilation import CompilationFailed, CompilationStopped, Report, compile_libraries
from headrace.kernels.native.sources import FOLDER, OPERATORS, library, shipped_path
from headrace.kernels.native.toolchain import COMPILERS, ISAS, LEVELS, Compiler, Isa, find_compiler, machine_isas

logger = logging.getLogger(__name__)

NAMESPACE = "headrace_cpu"
TABLE = "headrace_kernels"
"""The symbol exported by a kernel library: `Kernels` of kernels.h."""
POLL_S, LOG_PERIOD_S = 0.25, 5.0
OFF = "off"
SWITCHED_OFF = "HEADRACE_CPU_ISA=off: plain torch alone"


def check_isa(name: str | None) -> str | None:
    """The name, unchanged; raises `ConfigError` unless it is None, ``off`` or an instruction set."""
    if name is not None and name != OFF and name not in LEVELS:
        raise ConfigError(f"HEADRACE_CPU_ISA must be one of {', '.join([OFF, *LEVELS])}; got {name!r}")
    return name


@dataclass(frozen=True)
class NativeState:
    """``status``: ``ready``, ``compiling``, ``idle`` (not started), ``off`` or ``unavailable``; ``detail``: the
    instruction set in use, or why there is none."""

    status: str
    detail: str = ""


class NativeOps:
    """The operators of torch's namespace `NAMESPACE` as attributes: looked up on first use, plain attributes
    afterwards, which saves torch's own lookup at every call."""

    def __getattr__(self, name: str) -> Any:
        operator = getattr(getattr(torch.ops, NAMESPACE), name).default
        setattr(self, name, operator)
        return operator


class NativeLibrary:
    """Owns the state of loading. ``ops`` is None until operators and kernels are loaded, and never afterwards."""

    def __init__(self) -> None:
        self.ops: NativeOps | None = None
        self.state = NativeState("idle", "compiled or loaded when a model on a CPU first needs it")
        self._loading = NativeOps()
        self._tables: dict[str, int] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_started = False
        self.progress = (0, 0)
        """How many of how many files are compiled; (0, 0) before it is known, and while another process compiles."""
        self._told_at = 0.0

    def find(self) -> NativeOps | None:
        """The operators, or None while they are not loaded, when the caller uses plain torch. The first call starts
        loading. Call it every time instead of keeping the result: the answer changes once, at any moment."""
        if self.ops is None and not self._is_started:
            self.start()
        return self.ops

    def start(self) -> None:
        """Load existing libraries, or compile in the background. Raises `ConfigError` for an invalid
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
                logger.info(
                    "CPU kernels are not compiled for this machine yet; that takes about half a minute, once. Until "
                    "then plain torch computes, several times slower"
                )
                self._thread = threading.Thread(target=self._compile, args=(wanted,), name="native-build", daemon=True)
                self._thread.start()
                atexit.register(self._finish)

    def inspect(self) -> NativeState:
        """Load existing libraries if nothing has been started, and return the state; compile nothing."""
        with self._lock:
            if self._is_started or self.ops is not None:
                return self.state
            wanted = check_isa(env.cpu_isa())
            if wanted == OFF:
                return NativeState("off", SWITCHED_OFF)
            self._load_best(wanted)
            return self.state

    def wait(self, timeout: float | None = None) -> None:
        """Start if nothing has been, and wait up to ``timeout`` seconds for the compilation."""
        self.start()
        if self._thread is not None:
            self._thread.join(timeout)

    def _note_progress(self, num_done: int, num_files: int) -> None:
        self.progress = (num_done, num_files)
        if time.monotonic() - self._told_at >= LOG_PERIOD_S or num_done == num_files:
            self._told_at = time.monotonic()
            logger.info("CPU kernels: %d of %d files compiled", num_done, num_files)

    def _finish(self) -> None:
        """At exit, wait for the compilation: the next start uses it, and an interpreter that exits while a thread loads
        a library aborts. Ctrl-C must still end the process, so SIGINT gets the system's default action: Python's
        handler runs in the main thread, which sleeps in the join and may never see a signal delivered to another
        thread."""
        if self._thread is None or not self._thread.is_alive():
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed, or no reader
                stream.flush()
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        logger.warning(
            "CPU kernels are still being compiled, for the next start: this process ends when they are, or by Ctrl-C"
        )
        self._thread.join()

    def select(self, name: str) -> str:
        """Limit the operators to this instruction set (empty: the best), compiling it if missing; returns the one in
        use."""
        assert self.ops is not None, "the native library is not loaded"
        self._load_best(name or check_isa(env.cpu_isa()), compiles=True)
        return self.state.detail

    def _load_best(self, most: str | None, *, compiles: bool = False) -> bool:
        """Load the best instruction set up to ``most`` and return whether that succeeded. Without ``compiles`` it
        returns False, with the state unchanged, where libraries must be compiled first."""
        compiler = find_compiler()
        for isa in reversed(machine_isas(most)):  # the fastest first
            paths = [path for name in (OPERATORS, isa.name) if (path := find_library(name, compiler)) is not None]
            if len(paths) < 2:
                if compiler is None or not compiler.accepts(isa.flags):
                    continue  # a lower instruction set may be shipped, or known to this compiler
                if not compiles:
                    return False
                wanted = [library(OPERATORS), library(isa.name)]
                paths = compile_libraries(wanted, compiler, cache_folder(), self._note_progress)
            if self._load(isa, *paths):
                return True
            # not loadable at all; otherwise the processor lacks it, and a lower one is tried
            if self.state.status == "unavailable":
                return False
        self._give_up(f"no C++ compiler found ({', '.join(COMPILERS)}); install one, for example g++")
        return False

    def _compile(self, most: str | None) -> None:
        """The compiling thread. It turns every expected failure into a state: nobody would see an exception here."""
        began = time.monotonic()
        try:
            if self._load_best(most, compiles=True):
                logger.info("CPU kernels compiled in %.1f s", time.monotonic() - began)
        except CompilationStopped as error:  # a signal that also ends this process
            self.state = NativeState("unavailable", error.message)
        except CompilationFailed as error:
            self._give_up(f"compiling them failed: {error}")
        except OSError as error:
            self._give_up(
                f"{cache_folder()} cannot be written to: {error.strerror or error}; set HEADRACE_CACHE to a folder "
                "that can"
            )

    def _load(self, isa: Isa, operators: Path, kernels: Path) -> bool:
        """Load these libraries and switch to their kernels. Returns False, with the state unchanged, if the processor
        cannot run them, and after `_give_up` if they do not load."""
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
        # last: from here on other threads call the operators
        self.ops = self._loading
        logger.info("CPU kernels: %s", isa.name)
        return True

    def _give_up(self, reason: str) -> None:
        self.state = NativeState("unavailable", reason)
        logger.warning("CPU kernels run in plain torch, which is slower: %s", reason)


NATIVE = NativeLibrary()
"""One per process: operators can be registered with torch only once."""


def state() -> NativeState:
    """The current state; starts nothing."""
    return NATIVE.state


def build(*, timeout: float = math.inf, report: Report | None = None) -> NativeState:
    """Load or compile the operators of this process and wait up to ``timeout`` seconds for them. ``report`` is called
    in this thread as files are compiled."""
    NATIVE.start()
    until, told = time.monotonic() + timeout, (0, 0)
    while NATIVE.state.status == "compiling" and (left := until - time.monotonic()) > 0:
        NATIVE.wait(min(left, POLL_S))
        if report is not None and NATIVE.progress != told:
            told = NATIVE.progress
            report(*told)
    return NATIVE.state


def find_table(kernels: Path) -> int:
    """Load a kernel library, which is never unloaded, and return the address of its table. Raises `OSError`."""
    return ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL(str(kernels)), TABLE))


def find_library(name: str, compiler: Compiler | None) -> Path | None:
    """The path of a shipped or cached library, or None."""
    shipped = shipped_path(name)
    if shipped.exists():
        return shipped
    if compiler is None:
        return None
    path = library(name).path(compiler, cache_folder())
    if not os.path.exists(path):  # False also without permission to look
        return None
    with suppress(OSError):  # another user's folder
        path.touch()  # marks it as used, for `_sweep`
    return path


def ship(folder: Path = FOLDER) -> list[Path]:
    """Compile for all instruction sets that the compiler supports and copy the libraries beside the sources, replacing
    older ones, where they are found before anything is compiled. For building wheels. Raises `CompilationFailed`."""
    compiler = find_compiler()
    if compiler is None:
        raise CompilationFailed(f"no C++ compiler found ({', '.join(COMPILERS)})")
    names = [OPERATORS, *(isa.name for isa in ISAS if compiler.accepts(isa.flags))]
    compiled = compile_libraries([library(name, folder) for name in names], compiler, cache_folder())
    shipped = [shipped_path(name, folder) for name in names]
    # older ones, for other sources, only after all new ones were compiled
    for path in folder.glob("*.so"):
        path.unlink()
    for source, target in zip(compiled, shipped, strict=True):
        shutil.copyfile(source, target)
    return shipped


def cache_folder() -> Path:
    """Where objects and libraries are kept."""
    return env.cache_dir() / "native"


def select_isa(name: str = "") -> str:
    """Limit the kernels to this instruction set (empty: the best), compiling it if missing; returns the one in use. For
    tests and benchmarks."""
    return NATIVE.select(name)

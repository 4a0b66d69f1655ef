"""`NativeLibrary`: the loaded operators, or none yet. Looks for a shipped library, then for a cached one, then compiles
one on a thread of its own while plain torch serves."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.base import env
from headrace.base.errors import ConfigError
from headrace.kernels.native.compilation import CompilationFailed, compile_library, library_path
from headrace.kernels.native.sources import list_units, prebuilt_path
from headrace.kernels.native.toolchain import COMPILERS, ISAS, Isa, find_compiler, machine_isas

logger = logging.getLogger(__name__)

NAMESPACE = "headrace_cpu"
OFF = "off"
SWITCHED_OFF = "HEADRACE_CPU_ISA=off: plain torch alone"

LEVELS = {isa.name: level for level, isa in enumerate(ISAS)}


def check_isa(name: str | None) -> str | None:
    """The name as it is; raises `ConfigError` when it is none of an instruction set."""
    if name is not None and name != OFF and name not in LEVELS:
        raise ConfigError(f"HEADRACE_CPU_ISA must be one of {', '.join([OFF, *LEVELS])}; got {name!r}")
    return name


@dataclass(frozen=True)
class NativeState:
    """``status`` is ``ready``, ``compiling``, ``idle`` (nobody asked yet), ``off`` or ``unavailable``; ``detail`` says what
    runs (the instruction set) or why not."""

    status: str
    detail: str = ""


class NativeOps:
    """The operators as attributes; each is looked up once."""

    def __getattr__(self, name: str) -> Any:
        operator = getattr(getattr(torch.ops, NAMESPACE), name).default
        setattr(self, name, operator)
        return operator


class NativeLibrary:
    """``ops`` is None until the library is loaded, and never again."""

    def __init__(self) -> None:
        self.ops: NativeOps | None = None
        self.state = NativeState("idle", "compiled or loaded when a model on a CPU first needs it")
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_started = False

    def find(self) -> NativeOps | None:
        """The operators, or None: then use plain torch this time. The first call starts the search."""
        if self.ops is None and not self._is_started:
            self.start()
        return self.ops

    def start(self) -> None:
        """Load what is there already; else compile in the background. Raises `ConfigError` for a wrong HEADRACE_CPU_ISA."""
        with self._lock:
            if self._is_started:
                return
            wanted = check_isa(env.cpu_isa())
            self._is_started = True
            if wanted == OFF:
                self.state = NativeState("off", SWITCHED_OFF)
                return
            found = self._find_file()
            if found is not None:
                self._load(found)
            elif self.state.status == "idle":
                self.state = NativeState("compiling", "plain torch serves meanwhile")
                self._thread = threading.Thread(target=self._compile, name="native-build", daemon=True)
                self._thread.start()

    def inspect(self) -> NativeState:
        """Load what is there already, but compile nothing."""
        with self._lock:
            if self._is_started or self.ops is not None:
                return self.state
            if check_isa(env.cpu_isa()) == OFF:
                return NativeState("off", SWITCHED_OFF)
            found = self._find_file()
            if found is not None:
                self._load(found)
            return self.state

    def wait(self, timeout: float | None = None) -> None:
        """Until the compilation, if one runs, is over."""
        self.start()
        if self._thread is not None:
            self._thread.join(timeout)

    def _find_file(self) -> Path | None:
        """A library to be loaded now; None when one must be compiled, or cannot be (the state says so)."""
        shipped = prebuilt_path()
        if shipped.exists():
            return shipped
        compiler = find_compiler()
        if compiler is None:
            self._give_up(f"no C++ compiler found ({', '.join(COMPILERS)}); install one, for example g++")
            return None
        path = library_path(list_units(machine_isas()), compiler, cache_folder())
        if not path.exists():
            return None
        with suppress(OSError):  # a folder that others own
            path.touch()  # used: not to be swept
        return path

    def _compile(self) -> None:
        began = time.monotonic()
        try:
            path = build_file(machine_isas())
        except CompilationFailed as error:
            self._give_up(f"compiling them failed: {error}")
            return
        except OSError as error:
            self._give_up(f"{cache_folder()} cannot be written to: {error.strerror or error}; set HEADRACE_CACHE to a folder that can")
            return
        self._load(path)
        logger.info("CPU kernels compiled in %.1f s", time.monotonic() - began)

    def _load(self, path: Path) -> None:
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            self._give_up(f"{path} does not load: {error}")
            return
        ops = NativeOps()
        wanted = env.cpu_isa()
        isa = ISAS[ops.select_isa(LEVELS[wanted] if wanted else len(ISAS))].name
        self.state = NativeState("ready", isa)
        self.ops = ops
        logger.info("CPU kernels: %s", isa)

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


def build_file(isas: tuple[Isa, ...] = ISAS, folder: Path | None = None) -> Path:
    """Compile for the given instruction sets, of which the compiler may lack some; returns the file, loads nothing."""
    compiler = find_compiler()
    if compiler is None:
        raise CompilationFailed(f"no C++ compiler found ({', '.join(COMPILERS)})")
    folder = folder or cache_folder()
    path = library_path(list_units(isas), compiler, folder)
    if path.exists():
        return path
    accepted = tuple(isa for isa in isas if compiler.accepts(isa.flags))
    built = compile_library(list_units(accepted), compiler, folder)
    if built != path:
        path.unlink(missing_ok=True)
        path.symlink_to(built.name)
    return path


def cache_folder() -> Path:
    """Where objects and libraries are kept."""
    return env.cache_dir() / "native"


def select_isa(name: str = "") -> str:
    """Let the loaded kernels use this instruction set at most (empty: the best); returns the one they use. For tests."""
    assert NATIVE.ops is not None, "the native library is not loaded"
    return ISAS[NATIVE.ops.select_isa(LEVELS[name] if name else len(ISAS))].name

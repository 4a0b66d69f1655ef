"""`compile_ahead`: kernels compiled before anything launches them, many at a time, on a machine that sees them for the
first time. They are found by a rehearsal, in which nothing is launched.

Refuses: knowing which kernels there are. Triton's only; on a machine without it there is nothing to do.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

logger = logging.getLogger(__name__)

MAX_THREADS = 8
"""A third of the work holds the interpreter: sixteen threads were no faster than eight."""

UNFILLED = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided)


class _Zeros(TorchFunctionMode):
    """Nobody fills what a launch that is not made would have: zero is a place that always exists, and a number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in UNFILLED else made


class _Unlaunched:
    """Stands for a kernel that is being compiled: a launch does nothing. One that did not compile raises why,
    always."""

    function = packed_metadata = None

    def __init__(self, error: BaseException | None = None):
        self._error = error

    def launch_metadata(self, *_: Any) -> None:
        if self._error is not None:
            raise self._error

    def run(self, *_: Any) -> None:
        return None


def _rehearsing(pool: Executor) -> Any:
    """A context in which every launch of a kernel that this process has not compiled is left out, and the kernel
    compiled on ``pool``; its end waits for all of them and puts them in their places."""
    from triton import AsyncCompileMode

    class Rehearsing(AsyncCompileMode):
        def __init__(self) -> None:
            super().__init__(pool)
            self.compiling: dict[str, Future[Any]] = {}
            self._places: list[tuple[str, Callable[[Any], None]]] = []

        def submit(
            self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None], *_: Any
        ) -> _Unlaunched:
            """``finalize_fn`` takes what shall be launched from now on. Triton 3.9 also tells how to take it back."""

            def compile_and_load() -> Any:
                kernel = compile_fn()
                assert kernel.run is not None, "reading it makes the launcher, in C, and loads the code"
                return kernel

            if key not in self.compiling:
                self.compiling[key] = pool.submit(compile_and_load)
            self._places.append((key, finalize_fn))
            stand_in = _Unlaunched()
            finalize_fn(stand_in)
            return stand_in

        def __exit__(self, *about: Any) -> None:
            for key, finalize in self._places:
                error = self.compiling[key].exception()
                finalize(self.compiling[key].result() if error is None else _Unlaunched(error))
            super().__exit__(*about)

    return Rehearsing()


def read_compiler(device: torch.device) -> None:
    """Start what Triton does before its first kernel, compiled or not: it reads itself to know its version, for a third
    of a second. Elsewhere than on a GPU there is nothing to do."""
    if not _has_compiler(device):
        return
    from triton.runtime import cache

    if hasattr(cache, "triton_key"):  # which keeps its result
        Thread(target=cache.triton_key, name="triton-key", daemon=True).start()


def compile_ahead(rehearse: Callable[[], None], about: str, device: torch.device) -> int:
    """Call ``rehearse``, which does what later steps will, on numbers that mean nothing, and compile what it would have
    launched. Returns how many kernels. Nothing is done, not even the rehearsal, if that was done before for the same
    ``about``: which model, in which sizes."""
    if not _has_compiler(device):
        return 0
    mark = _mark_of(about, device)
    if mark.exists():
        return 0
    began = time.perf_counter()
    threads = max(1, min(MAX_THREADS, torch.get_num_threads()))
    with ThreadPoolExecutor(threads, "kernels", initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        with _rehearsing(pool) as rehearsing:
            try:
                with _Zeros():
                    rehearse()
            except (RuntimeError, AssertionError, AttributeError, TypeError, ValueError) as error:
                logger.warning("kernels are compiled as they come: %s: %s", type(error).__name__, error)
            rehearsed = time.perf_counter()
        wanted = rehearsing.compiling.values()
    for failed in filter(None, [future.exception() for future in wanted]):
        logger.warning("a kernel did not compile ahead: %s: %s", type(failed).__name__, failed)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    logger.info(
        "%d kernels found in %.1f s and compiled in %.1f s", len(wanted), rehearsed - began, time.perf_counter() - began
    )
    return len(wanted)


def _has_compiler(device: torch.device) -> bool:
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    import triton

    return hasattr(triton, "AsyncCompileMode")


def _mark_of(about: str, device: torch.device) -> Path:
    """A file beside Triton's compiled kernels, so that it goes when they go."""
    import triton
    from triton import knobs

    digest = hashlib.sha256(
        "\n".join(
            (triton.__version__, torch.__version__, str(torch.cuda.get_device_capability(device)), about)
        ).encode()
    )
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return Path(knobs.cache.dir) / "headrace" / digest.hexdigest()[:32]

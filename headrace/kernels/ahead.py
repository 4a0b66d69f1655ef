"""`compile_ahead`: kernels compiled before anything launches them, many at a time, on a machine that sees them for the first
time. They are found by a rehearsal, in which launches are noted instead of made.

Refuses: knowing which kernels there are. Triton's only; on a machine without it there is nothing to do.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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


class _Notes:
    """The kernels that a rehearsal wanted, once for each set of types and constants."""

    def __init__(self) -> None:
        self.wanted: dict[tuple[str, str], Callable[[], Any]] = {}

    def take(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """See ``jit_cache_hook``, which is asked about kernels that this process has not compiled; True skips the launch."""
        data = compile["specialization_data"]
        self.wanted.setdefault((fn.name, key), lambda: fn.jit_function.preload(data))
        return True


@contextmanager
def _rehearsing() -> Iterator[_Notes]:
    from triton import knobs

    notes = _Notes()
    knobs.runtime.jit_cache_hook = notes.take
    try:
        with _Zeros():
            yield notes
    finally:
        knobs.runtime.jit_cache_hook = None


def read_compiler(device: torch.device) -> None:
    """Start what Triton does before its first kernel, compiled or not: it reads itself to know its version, for a third of a
    second. Elsewhere than on a GPU there is nothing to do."""
    if device.type != "cuda" or find_spec("triton") is None:
        return
    from triton.runtime import cache

    if hasattr(cache, "triton_key"):  # which keeps its result
        Thread(target=cache.triton_key, name="triton-key", daemon=True).start()


def compile_ahead(rehearse: Callable[[], None], about: str, device: torch.device) -> int:
    """Call ``rehearse``, which does what later steps will, on numbers that mean nothing; then compile what it would have
    launched. Returns how many kernels. Nothing is done, not even the rehearsal, if that was done before for the same
    ``about``: which model, in which sizes."""
    if device.type != "cuda" or find_spec("triton") is None:
        return 0
    mark = _mark_of(about, device)
    if mark.exists():
        return 0
    began = time.perf_counter()
    with _rehearsing() as notes:
        try:
            rehearse()
        except (RuntimeError, AssertionError, TypeError, ValueError) as error:
            logger.warning("kernels are compiled as they come: %s: %s", type(error).__name__, error)
    noted = time.perf_counter()
    _compile(list(notes.wanted.values()), device)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    logger.info("%d kernels found in %.1f s and compiled in %.1f s", len(notes.wanted), noted - began, time.perf_counter() - noted)
    return len(notes.wanted)


def _compile(wanted: list[Callable[[], Any]], device: torch.device) -> None:
    def one(compile_one: Callable[[], Any]) -> None:
        kernel = compile_one()
        assert kernel.run is not None, "reading it makes the launcher, in C, and loads the code"

    threads = max(1, min(MAX_THREADS, torch.get_num_threads()))
    with ThreadPoolExecutor(threads, "kernels", initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        for failed in filter(None, [future.exception() for future in [pool.submit(one, item) for item in wanted]]):
            logger.warning("a kernel did not compile ahead: %s: %s", type(failed).__name__, failed)


def _mark_of(about: str, device: torch.device) -> Path:
    """A file beside Triton's compiled kernels, so that it goes when they go."""
    import triton
    from triton import knobs

    digest = hashlib.sha256("\n".join((triton.__version__, torch.__version__, str(torch.cuda.get_device_capability(device)), about)).encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return Path(knobs.cache.dir) / "headrace" / digest.hexdigest()[:32]

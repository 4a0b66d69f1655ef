"""`LateKernels`: names and counts what is compiled, or planned by a library, while a step waits for it. All of that
should have been done before the first request.

Refuses: compiling. Where that happens, `note_compiled` is called, and for Triton's kernels a listener of Triton's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

import torch

logger = logging.getLogger(__name__)


class LateKernels:
    """Those of one executor, whose steps are launched in the body of `watch`. Threads beside it are not looked at."""

    def __init__(self, device: torch.device):
        self.count = 0
        if device.type == "cuda" and find_spec("triton") is not None:
            _listen()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Take note of what this thread compiles in the body."""
        token = _watching.set(self)
        try:
            yield
        finally:
            _watching.reset(token)

    def note(self, kernel: str, seconds: float) -> None:
        """One more."""
        self.count += 1
        logger.warning("a step waited %.0f ms for a kernel that was not compiled before: %s", seconds * 1e3, kernel)


_watching: ContextVar[LateKernels | None] = ContextVar("watching", default=None)


def note_compiled(kernel: str, seconds: float) -> None:
    """``kernel`` was compiled in this thread, or a library's plan for it built. Costs nothing of note outside of
    `LateKernels.watch`."""
    late = _watching.get()
    if late is not None:
        late.note(kernel, seconds)


class _Listener:
    """What Triton calls behind each compilation, before another listener that was there."""

    def __init__(self, before: Callable[..., Any] | None):
        self._before = before

    def __call__(self, *, src: Any, metadata: dict[str, Any], times: Any, cache_hit: bool, **others: Any) -> None:
        if not cache_hit:
            note_compiled(describe_kernel(metadata["name"], src), times.total / 1e6)
        if self._before is not None:
            self._before(src=src, metadata=metadata, times=times, cache_hit=cache_hit, **others)


def _listen() -> None:
    from triton import knobs

    if not isinstance(knobs.compilation.listener, _Listener):
        knobs.compilation.listener = _Listener(knobs.compilation.listener)


def describe_kernel(name: str, src: Any) -> str:
    """The name and the constants of a kernel of Triton, by which its compilations differ. ``src`` is Triton's
    ``ASTSource``; of another one the name alone."""
    names, constants = getattr(getattr(src, "fn", None), "arg_names", ()), getattr(src, "constants", {})
    told = [
        f"{names[path[0]]}={value}" for path, value in constants.items()
        if isinstance(path, tuple) and len(path) == 1 and path[0] < len(names)
    ]
    return f"{name}({', '.join(told)})"

"""Imports torch into an engine process without what only its compilers need: a third of the time it takes.

Refuses: machines with an accelerator, and versions of torch that this was not tried with; those import as usual.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

OMITTED = ("torch.export", "torch.distributed._meta_registrations", "torch._meta_registrations", "torch._native")
"""In torch's own order: the export of programs, shapes without values, which tracing needs, and kernels for GPUs. Nothing
that runs eagerly on a CPU reads them."""

WAITING = ("torch._dynamo", "torch._inductor")
"""The compilers; they count on all of it being there, and none of it imports them."""

KNOWN_VERSIONS = ("2.13",)
ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel")


def import_torch() -> None:
    """Import torch. Whoever asks later for what was omitted, or for a compiler, gets it whole."""
    if "torch" in sys.modules or not _can_omit():
        importlib.import_module("torch")
        return
    for name in OMITTED:
        sys.modules[name] = ModuleType(name)
    try:
        importlib.import_module("torch")
    finally:
        for name in OMITTED:
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:
                vars(sys.modules[parent]).pop(child, None)
    sys.meta_path.insert(0, _Completion())
    _bind_generators()


def _bind_generators() -> None:
    """What one of the omitted modules does that eager code needs, too: random generators get their metaclass."""
    binding = importlib.import_module("torch._C")
    if hasattr(binding, "_set_generator_metaclass"):
        binding._set_generator_metaclass(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)


class _Completion(MetaPathFinder):
    """Finds nothing itself: imports what was omitted before the first of `WAITING`."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname in WAITING and self in sys.meta_path:
            sys.meta_path.remove(self)
            for name in OMITTED:
                importlib.import_module(name)


def _can_omit() -> bool:
    try:
        is_known = version("torch").startswith(tuple(f"{known}." for known in KNOWN_VERSIONS))
    except PackageNotFoundError:
        return False
    return is_known and not any(Path(device).exists() for device in ACCELERATORS)

"""Imports torch into an engine process without what serving does not need: a quarter to a third of the time it takes.

Refuses: devices and versions of torch that this was not tried with; those import as usual.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Sequence
from importlib.abc import MetaPathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

OMITTED = ("torch.distributions", "torch.export", "torch.distributed._meta_registrations", "torch._meta_registrations")
"""In torch's own order: distributions, the export of programs, and shapes without values, which tracing needs. Nothing
that runs eagerly reads them."""

GPU_KERNELS = "torch._native"
"""Kernels that some versions have for GPUs alone; the last in order."""

WAITING = ("torch._dynamo", "torch._inductor")
"""The compilers; they count on all of it being there, and none of it imports them."""

KNOWN_VERSIONS = ("2.11", "2.12", "2.13")
GPUS = ("/dev/nvidiactl",)
UNKNOWN_DEVICES = ("/dev/kfd", "/dev/accel")


def import_torch() -> None:
    """Import torch. Whoever asks later for what was omitted, or for a compiler, gets it whole."""
    omitted = [] if "torch" in sys.modules else _find_omitted()
    for name in omitted:
        sys.modules[name] = ModuleType(name)
    try:
        importlib.import_module("torch")
    finally:
        for name in omitted:
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:
                vars(sys.modules[parent]).pop(child, None)
    if omitted:
        sys.meta_path.insert(0, _Completion(omitted))
        _import_on_access({name.removeprefix("torch.") for name in omitted if name.count(".") == 1})
        _bind_generators()


def _bind_generators() -> None:
    """What one of the omitted modules does that eager code needs, too: random generators get their metaclass."""
    binding = importlib.import_module("torch._C")
    if hasattr(binding, "_set_generator_metaclass"):
        binding._set_generator_metaclass(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)


def _import_on_access(names: Collection[str]) -> None:
    """Whoever takes a module for an attribute of torch, as it usually is, gets it imported."""
    torch = sys.modules["torch"]
    find = vars(torch)["__getattr__"]

    def find_or_import(name: str) -> object:
        return importlib.import_module(f"torch.{name}") if name in names else find(name)

    vars(torch)["__getattr__"] = find_or_import


class _Completion(MetaPathFinder):
    """Finds nothing itself: imports what was omitted before the first of `WAITING`."""

    def __init__(self, omitted: Sequence[str]):
        self._omitted = omitted

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname in WAITING and self in sys.meta_path:
            sys.meta_path.remove(self)
            for name in self._omitted:
                importlib.import_module(name)


def _find_omitted() -> list[str]:
    """What is there to omit, in order; nothing from torch as it is not known, or for devices that are not."""
    try:
        is_known = version("torch").startswith(tuple(f"{known}." for known in KNOWN_VERSIONS))
    except PackageNotFoundError:
        return []
    spec = find_spec("torch")
    if not is_known or spec is None or spec.origin is None or _is_there(UNKNOWN_DEVICES):
        return []
    home = Path(spec.origin).parent.parent
    names = OMITTED if _is_there(GPUS) else (*OMITTED, GPU_KERNELS)
    places = {name: home.joinpath(*name.split(".")) for name in names}
    return [name for name, place in places.items() if place.is_dir() or place.with_suffix(".py").is_file()]


def _is_there(devices: Sequence[str]) -> bool:
    return any(Path(device).exists() for device in devices)

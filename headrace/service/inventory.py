"""Tries every plug-in on this machine: families, kernels, attention backends and others, each on its own; and reads
what a model states without loading it.

Imports torch when called. Refuses: judging speed, and models' weights.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.base.cache import CACHE_BACKENDS, CACHE_POLICIES, CACHE_POOLS
from headrace.base.errors import ConfigError, PluginError
from headrace.base.registry import PLUGINS, Registry, start_plugins
from headrace.models.catalog import FAMILIES, add_out_of_tree_families, load_family
from headrace.models.generation import find_sampling_defaults

__all__ = ["Finding", "Machine", "find_machine", "find_sampling_defaults", "take_inventory"]

OK, UNAVAILABLE, BROKEN = "ok", "unavailable", "broken"
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Finding:
    """One plug-in. ``status`` is ``ok`` (loads and can serve on ``devices``), ``unavailable`` (this machine lacks what
    it needs; ``detail`` says what) or ``broken`` (should work but does not load; ``detail`` is the error)."""

    kind: str
    name: str
    status: str
    devices: tuple[str, ...] = ()
    detail: str = ""


@dataclass(frozen=True)
class Machine:
    """The machine. ``devices``: ``(device type, usual dtype, compute capability)`` of each, with which plug-ins are
    queried; ``description``: labels and values to print."""

    devices: tuple[tuple[str, str, tuple[int, int]], ...]
    description: dict[str, str]


def find_machine() -> Machine:
    """Look at the machine through torch."""
    import platform

    import psutil
    import torch

    from headrace.memory.plan import free_bytes

    devices: list[tuple[str, str, tuple[int, int]]] = [("cpu", "float32", (0, 0))]
    total = psutil.virtual_memory().total
    description = {
        "python": platform.python_version(), "torch": torch.__version__,
        "cpu": f"{_processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "memory": f"{_gib(free_bytes(torch.device('cpu')))} of {_gib(total)} GiB free",
    }
    if torch.cuda.is_available():
        devices.append(("cuda", "bfloat16", torch.cuda.get_device_capability(0)))
        free, total = torch.cuda.mem_get_info(0)
        description["cuda"] = (
            f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, {_gib(free)} of {_gib(total)} GiB free"
        )
    else:
        description["cuda"] = "no GPU that torch can use" + (
            f": there is an NVIDIA driver, but torch {torch.__version__} cannot use it; install a CUDA build of torch"
            if NVIDIA_DRIVER.exists() else ""
        )
    return Machine(tuple(devices), description)


def _processor() -> str | None:
    """The processor's name, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"


def take_inventory(machine: Machine) -> list[Finding]:
    """Try every plug-in; a broken one is reported and does not affect the others."""
    start_plugins()
    return [
        *_entries(PLUGINS.noun, PLUGINS, {device: None for device, _, _ in machine.devices}),
        *_families(machine), *_attention(machine), *_caches(machine), *_experts(machine), *_schemes(machine),
        *_drafters(machine),
        *_engine_parts(machine), *_operations(machine), _native(), _compiler(machine),
    ]


def _families(machine: Machine) -> Iterator[Finding]:
    add_out_of_tree_families()
    devices = tuple(device for device, _, _ in machine.devices)
    for entry in sorted(FAMILIES, key=lambda e: e.name):
        try:
            family = load_family(entry.name)
            models: Registry[Any] = Registry("model")
            models.add(entry.name, family.model)
            models.load(entry.name)
        except PluginError as error:
            disabled = FAMILIES.reason_against(entry.name, None) if error.__cause__ is None else None
            yield Finding("model family", entry.name, UNAVAILABLE if disabled else BROKEN, (), disabled or str(error))
            continue
        yield Finding("model family", entry.name, OK, devices, ", ".join(family.architectures))


def _attention(machine: Machine) -> Iterator[Finding]:
    from headrace.layers.attention import ATTENTION_BACKENDS
    from headrace.layers.attention.contract import AttentionGeometry

    queries = {
        device: AttentionGeometry(
            device=device, dtype=dtype, kv_dtype=dtype, capability=capability, num_heads=32, num_kv_heads=8,
            head_dim=128, value_dim=128, page_size=16,
        )
        for device, dtype, capability in machine.devices
    }
    yield from _entries("attention backend", ATTENTION_BACKENDS, queries)


def _caches(machine: Machine) -> Iterator[Finding]:
    """Kinds of caches. Families register theirs when they are loaded, so call `_families` first."""
    import headrace.memory.pools
    import headrace.scheduling.cache.groups  # noqa: F401  registers the kinds that many models have

    queries = {device: None for device, _, _ in machine.devices}
    for registry in (CACHE_POLICIES, CACHE_POOLS, CACHE_BACKENDS):
        yield from _entries(registry.noun, registry, queries)


def _schemes(machine: Machine) -> Iterator[Finding]:
    from headrace.layers.quantization import SCHEMES, SchemeQuery, StoredAs, add_installed_schemes

    add_installed_schemes()
    for name in SCHEMES.names():
        supports = SCHEMES.entry(name).supports
        stored, wanted = (supports.methods[0], "") if isinstance(supports, StoredAs) else ("", name)
        queries = {
            device: SchemeQuery(device, dtype, stored=stored, wanted=wanted) for device, dtype, _ in machine.devices
        }
        yield from _entries("quantization scheme", SCHEMES, queries, only=name)


def _engine_parts(machine: Machine) -> Iterator[Finding]:
    from headrace.base.config import engine_config
    from headrace.base.hooks import HOOKS, add_installed_hooks
    from headrace.execution.structured.library import GRAMMAR_LIBRARIES
    from headrace.service import build  # noqa: F401  registers the hooks that are here
    from headrace.service.balancing import POLICIES, add_installed_policies
    from headrace.service.coordination import COORDINATORS, add_installed_coordinators

    add_installed_hooks()
    add_installed_coordinators()
    add_installed_policies()
    queries = {device: engine_config() for device, _, _ in machine.devices}
    for registry in (HOOKS, COORDINATORS, GRAMMAR_LIBRARIES, POLICIES):
        yield from _entries(registry.noun, registry, queries)


def _experts(machine: Machine) -> Iterator[Finding]:
    from headrace.kernels.operation import KernelQuery
    from headrace.layers.moe import DISPATCHERS, EXPERTS

    queries = {device: KernelQuery(device, dtype, capability) for device, dtype, capability in machine.devices}
    for registry in (DISPATCHERS, EXPERTS):
        yield from _entries(registry.noun, registry, queries)


def _drafters(machine: Machine) -> Iterator[Finding]:
    from headrace.models.drafters.contract import DRAFT_KINDS, add_installed_kinds
    from headrace.scheduling.speculation import drafter

    add_installed_kinds()
    drafter.TEXT_DRAFTERS.add_installed(drafter.ENTRY_POINT_GROUP)
    queries = {device: None for device, _, _ in machine.devices}
    for registry in (DRAFT_KINDS, drafter.TEXT_DRAFTERS):
        yield from _entries(registry.noun, registry, queries)


def _operations(machine: Machine) -> Iterator[Finding]:
    import headrace.kernels
    from headrace.kernels.operation import KernelQuery, Operation

    queries = {device: KernelQuery(device, dtype, capability) for device, dtype, capability in machine.devices}
    packages: Registry[Any] = Registry("operation")
    for info in pkgutil.iter_modules(headrace.kernels.__path__):
        if not info.ispkg:
            continue
        packages.add(info.name, f"headrace.kernels.{info.name}")
        try:
            packages.load(info.name)
        except PluginError as error:
            yield Finding("operation", info.name, BROKEN, (), str(error))
            continue
        module = importlib.import_module(f"headrace.kernels.{info.name}")
        for name, operation in list(vars(module).items()):  # loading a solution adds its module's name
            if isinstance(operation, Operation) and not name.startswith("_"):
                yield from _entries(operation.noun, operation, queries)


def _native() -> Finding:
    """The compiled library behind all CPU kernels written in C++."""
    from headrace.kernels import native

    try:
        found = native.NATIVE.inspect()
    except ConfigError as error:
        return Finding("native kernels", "cpu", BROKEN, (), str(error))
    status = {"ready": OK, "idle": OK, "compiling": OK}.get(found.status, UNAVAILABLE)
    return Finding("native kernels", "cpu", status, ("cpu",) if status == OK else (), f"{found.status}: {found.detail}")


def _compiler(machine: Machine) -> Finding:
    """What compiles own kernels for GPUs, in whose place slower ones run without it."""
    from headrace.kernels.nvrtc import find_nvrtc

    kind, name = "kernel compiler", "nvrtc"
    devices = tuple(device for device, _, _ in machine.devices if device == "cuda")
    if not devices:
        return Finding(kind, name, UNAVAILABLE, (), "compiles kernels for NVIDIA GPUs")
    try:
        version = ".".join(map(str, find_nvrtc()))
    except OSError as error:
        install = "install a CUDA build of torch with the packages that it needs"
        return Finding(kind, name, BROKEN, (), f"slower kernels run on the GPU: {error}; {install}")
    return Finding(kind, name, OK, devices, f"{version}: compiles kernels for NVIDIA GPUs")


def _entries(kind: str, registry: Registry[Any], queries: dict[str, Any], only: str | None = None) -> Iterator[Finding]:
    for entry in (entry for entry in registry if only in (None, entry.name)):
        against = {device: registry.reason_against(entry.name, query) for device, query in queries.items()}
        devices = tuple(device for device, reason in against.items() if reason is None)
        if not devices:
            yield Finding(
                kind, entry.name, BROKEN if registry.has_failed(entry.name) else UNAVAILABLE, (),
                "; ".join(dict.fromkeys(str(r) for r in against.values()))
            )
            continue
        try:
            registry.load(entry.name)
        except PluginError as error:
            yield Finding(kind, entry.name, BROKEN, (), str(error))
            continue
        yield Finding(kind, entry.name, OK, devices, entry.doc)

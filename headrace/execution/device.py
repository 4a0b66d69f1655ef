"""Which device, in which dtype, with how many threads. Probes the machine when called, never at import."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from headrace.base import env
from headrace.base.config import NARROW_KEYS
from headrace.base.env import find_groups
from headrace.base.errors import ConfigError
from headrace.base.parallel import ParallelConfig
from headrace.kernels.operation import KernelQuery

TOPOLOGY = Path("/sys/devices/system/cpu")


def resolve_device(name: str, offset: int = 0, parallel: ParallelConfig | None = None) -> torch.device:
    """A name that `DeviceConfig` takes as a device, of GPUs the one ``offset`` places further on; raises `ConfigError`
    when it is not there. ``parallel``: the options by which there are several."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    place = int(index or 0) + offset
    if place >= count:
        found = f"there are {count} GPUs" if count else "torch finds no GPU (is this torch built for CUDA?)"
        sizes = parallel.describe_sizes() if parallel is not None else ""
        advice = f"{sizes} takes a GPU for each rank; lower it" if offset and count else "use device cpu or auto"
        wanted = f"cuda:{place}" if offset else name
        raise ConfigError(f"device {wanted!r} is not available: {found}; {advice}", param="device")
    return torch.device("cuda", place)


def take_cores(place: int, count: int) -> None:
    """Confine this thread, and those it starts, to its part of the cores it may run on: part ``place`` of ``count``,
    neighbouring cores with all their logical processors. Where there are fewer cores than parts, some share one."""
    if count == 1 or sys.platform != "linux":
        return
    cores: dict[tuple[str, ...], set[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        cores.setdefault(_core_of(cpu), set()).add(cpu)
    ordered = sorted(cores, key=lambda core: (len(core), [int(part) if part.isdigit() else -1 for part in core]))
    begin, end = (len(ordered) * i // count for i in (place, place + 1))
    os.sched_setaffinity(0, {cpu for core in ordered[begin : max(end, begin + 1)] for cpu in cores[core]})


def set_threads(threads: int | None, num_sharing: int = 1) -> int:
    """Let torch use ``threads`` CPU threads, else what OMP_NUM_THREADS says, else one per physical core it may run
    on. ``num_sharing``: processes that share the CPU quota; see `take_cores` for the cores."""
    threads = threads or env.omp_num_threads() or count_cores(num_sharing)
    torch.set_num_threads(threads)
    return threads


def resolve_dtype(name: str, config: dict[str, Any], device: torch.device) -> torch.dtype:
    """The type of weights and activations. ``auto`` is the checkpoint's (``dtype`` or ``torch_dtype`` of its
    config.json, bfloat16 when it does not say), but float32 on a CPU unless that multiplies bfloat16 in hardware."""
    if name != "auto":
        return getattr(torch, name)
    text = config.get("text_config") or {}
    stated = next((part[name] for part in (config, text) for name in ("dtype", "torch_dtype") if part.get(name)), None)
    dtype = getattr(torch, str(stated).removeprefix("torch."), None)
    # A quantised checkpoint may state a storage type (int8, float8): activations need a wider one.
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        dtype = torch.bfloat16
    if device.type != "cpu":
        return torch.float32 if dtype == torch.float64 else dtype
    return torch.bfloat16 if dtype == torch.bfloat16 and has_fast_bfloat16() else torch.float32


KV_NAMES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", NARROW_KEYS: "float8_e4m3fn"}
"""Other names of dtypes of keys and values."""


def resolve_dtypes(
    dtype: str, kv_dtype: str, config: dict[str, Any], device: torch.device, *, rounds_inputs: bool
) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of activations and of cached keys and values.

    Where products round their inputs themselves (``rounds_inputs``: weights of 8 or 4 bits on a CPU), activations in
    bfloat16 would add an error larger than theirs and save nothing that counts, so ``auto`` is float32; keys and values
    stay in the dtype of `resolve_dtype`.
    """
    usual = resolve_dtype(dtype, config, device)
    chosen = torch.float32 if dtype == "auto" and rounds_inputs and device.type == "cpu" else usual
    return chosen, usual if kv_dtype == "auto" else getattr(torch, KV_NAMES.get(kv_dtype, kv_dtype))


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, or Arm's BF16 extension)."""
    known = torch.cpu.get_capabilities()
    return any(known.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that a device or the host had no memory. On a CPU torch raises a plain RuntimeError, known
    by its text."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def count_cores(num_sharing: int = 1) -> int:
    """Physical cores that this process may use, at least 1, within its part of a container's CPU quota. Two logical
    processors of one core (SMT) count once: they share the vector units."""
    if sys.platform != "linux":
        return max(1, (os.cpu_count() or 1) // num_sharing)
    cores = {_core_of(cpu) for cpu in os.sched_getaffinity(0)}
    quota = read_quota()
    return max(1, len(cores) if quota is None else min(len(cores), int(quota / num_sharing)))


def _core_of(cpu: int) -> tuple[str, ...]:
    """Socket and core of a logical processor; where the system does not say, each counts as one."""
    folder = TOPOLOGY / f"cpu{cpu}" / "topology"
    try:
        return tuple((folder / name).read_text().strip() for name in ("physical_package_id", "die_id", "core_id"))
    except OSError:
        return (str(cpu),)


def read_quota() -> float | None:
    """CPU quota of this process in processors (1.5: one and a half), None for no limit: the least of its control group
    and those around it, for cgroup v1 and v2."""
    quotas = [_read_group(folder) for folder in find_groups("cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def _read_group(folder: Path) -> float | None:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((folder / name).read_text().strip() for name in names).split()[:2]
        except (OSError, ValueError):
            continue
        # "max" (v2) and -1 (v1) mean no limit
        return float(quota) / float(period) if quota.isdigit() and float(period) > 0 else None
    return None


def row_query(device: torch.device, **shape: int) -> KernelQuery:
    """What the operations on rows and logits (float32) must support on this device."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return KernelQuery(device.type, "float32", capability, shape)

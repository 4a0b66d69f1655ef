"""Which device, in what type, with how many threads. Probes the machine when called, never at import."""

from __future__ import annotations

from typing import Any

import torch

from headrace.base import env
from headrace.base.errors import ConfigError
from headrace.execution.cores import count_cores


def resolve_device(name: str) -> torch.device:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N`` as a device; raises `ConfigError` when it is not there."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N; got {name!r}", param="device")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        found = f"there are {count} GPUs" if count else "torch finds no GPU (is this torch built for CUDA?)"
        raise ConfigError(f"device {name!r} is not available: {found}; use device cpu or auto", param="device")
    return torch.device("cuda", int(index or 0))


def set_threads(threads: int | None) -> int:
    """Let torch use ``threads`` CPU threads, else what OMP_NUM_THREADS says, else one per physical core it may run
    on."""
    threads = threads or env.omp_num_threads() or count_cores()
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
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        dtype = torch.bfloat16
    if device.type != "cpu":
        return torch.float32 if dtype == torch.float64 else dtype
    return torch.bfloat16 if dtype == torch.bfloat16 and has_fast_bfloat16() else torch.float32


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, or Arm's BF16 extension)."""
    known = torch.cpu.get_capabilities()
    return any(known.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device had no memory; what torch raises of a CPU's has no type of its own."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)

"""`allocate_mapped`: host memory that a GPU reads and writes where it lies, over PCIe, as a tensor of the GPU.

Refuses: copies. Who reads much of it often should read a copy.
"""

from __future__ import annotations

import math
import mmap
import weakref
from typing import Any

import torch

from headrace.base.errors import ConfigError
from headrace.memory.pinning import register
from headrace.memory.pools import allocate_zeros

SYSTEM_PAGE = 4096


class _Pinned:
    """Zeros in host memory, known to the driver until no tensor refers to them. torch makes a tensor of it by the
    interface below, and keeps this object as long as that lives."""

    def __init__(self, num_bytes: int):
        size = -(-max(1, num_bytes) // SYSTEM_PAGE) * SYSTEM_PAGE
        slab = mmap.mmap(-1, size)
        slab.madvise(mmap.MADV_HUGEPAGE)
        flat = torch.frombuffer(slab, dtype=torch.uint8)
        flat.zero_()  # committed by all threads: the driver would do so on one
        address = flat.data_ptr()
        error = register(address, size)
        if error is not None:
            raise ConfigError(
                f"the driver cannot pin {size / 2**30:.1f} GiB of host memory ({error}): lower hot_host_gb",
                param="hot_host_gb"
            )
        self._flat = flat
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }
        weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, address)


def allocate_mapped(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros in host memory, pinned, as a tensor on ``device``; on a CPU plain zeros. Raises `ConfigError` where there
    is not so much."""
    if device.type != "cuda":
        return allocate_zeros(shape, dtype, device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype, device=device)
    # CUDA's unified addresses: the driver says of registered memory that its device is the current one
    with torch.cuda.device(device):
        return torch.as_tensor(_Pinned(num_bytes), device=device).view(dtype).view(shape)

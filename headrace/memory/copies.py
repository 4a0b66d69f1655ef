"""Copies between host and device that nothing waits for. On a GPU they go through pinned memory, which torch's host
allocator uses again once the copy is done; on a CPU most share memory with what is given.

Refuses: streams and events; copies are in order of the current stream.
"""

from __future__ import annotations

import numpy as np
import torch


def pin(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A pinned copy of a tensor on the host, for a GPU to read; for a CPU the tensor itself."""
    return tensor if device.type == "cpu" else tensor.pin_memory()


def to_device(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Host values on the device, in their own dtype; on a CPU the tensor itself, or one that shares the array's
    memory."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return pin(tensor, device).to(device, non_blocking=True)


def copy_to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of an array, which may be read-only, on the device; it is made once, into pinned memory."""
    if device.type == "cpu":
        return torch.from_numpy(array.copy())
    staged = torch.from_numpy(np.empty(0, array.dtype)).new_empty(array.shape, pin_memory=True)
    np.copyto(np.asarray(staged), array)
    return staged.to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host, readable once the device has passed this point of the stream (record an event behind it);
    on a CPU the tensor itself."""
    if tensor.is_cpu:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)

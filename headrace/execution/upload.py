"""One copy from host to device per step: small integer and float arrays, packed.

Refuses: waiting. On a GPU the packed array is pinned (torch's host allocator reuses it once the copy is done).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class Upload:
    """Collects named arrays, then sends them as one. Integers arrive as int64, floats as float64."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    def add(self, name: str, values: np.ndarray | Sequence[int] | Sequence[float]) -> None:
        """Add a flat array under a name of its own."""
        assert name not in self._arrays, f"{name} was added twice"
        array = np.asarray(values)
        is_float = array.dtype.kind == "f"
        self._arrays[name] = np.ascontiguousarray(array, dtype=np.float64 if is_float else np.int64)

    def send(self, device: torch.device) -> dict[str, torch.Tensor]:
        """All arrays on the device, as views of one tensor."""
        if not self._arrays:
            return {}
        # One array of 8-byte words; floats travel as their bits. `np.concatenate` copies, so the callers' arrays may
        # change once this returns.
        packed = to_device(np.concatenate([array.view(np.int64) for array in self._arrays.values()]), device)
        sent = {}
        for (name, array), part in zip(
            self._arrays.items(), packed.split([a.size for a in self._arrays.values()]), strict=True
        ):
            sent[name] = part.view(torch.float64) if array.dtype == np.float64 else part
        return sent


def to_device(array: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The array on the device, copied asynchronously; on a CPU it shares memory with ``array``."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def copy_to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of an array, which may be read-only, on the device; it does not wait for the device."""
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

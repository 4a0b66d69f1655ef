"""One copy from host to device per step: small integer and float arrays, packed.

Refuses: waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headrace.memory.copies import to_device


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

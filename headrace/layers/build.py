"""`Build`: what a model needs to know to build itself: where, in what type, with which backends."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.operation import KernelQuery


@dataclass(frozen=True)
class Build:
    """Passed to every layer's constructor. ``dtype`` is that of weights and activations."""

    device: torch.device
    dtype: torch.dtype

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability; (0, 0) elsewhere."""
        return torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else (0, 0)

    def query(self, **shape: int) -> KernelQuery:
        """The query with which a layer chooses its kernels."""
        return KernelQuery(self.device.type, str(self.dtype).removeprefix("torch."), self.capability, shape)

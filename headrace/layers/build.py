"""`Build`: what a model needs to know to build itself: where, in what type, with which backends."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from headrace.kernels.operation import KernelQuery
from headrace.layers.batch import StepContext
from headrace.layers.quantization import SchemeChain, default_chain


@dataclass(frozen=True)
class Build:
    """Passed to every layer's constructor. ``dtype`` is that of weights and activations. ``max_model_len`` is the
    longest context to be served, in tokens (0: what the checkpoint claims); position tables are that long.
    ``moe_experts`` names the implementation of mixtures of experts (``auto``: the best that can serve the model here).
    ``schemes``: what weights go through on their way from the checkpoint, and what layers make of them.
    ``keeps_blocks``: weights that a checkpoint has in blocks stay so where layers can keep them. ``step``: see
    `StepContext`; each model has its own."""

    device: torch.device
    dtype: torch.dtype
    max_model_len: int = 0
    moe_experts: str = "auto"
    schemes: SchemeChain = field(default_factory=default_chain)
    keeps_blocks: bool = False
    step: StepContext = field(default_factory=StepContext)

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability; (0, 0) elsewhere."""
        return torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else (0, 0)

    def query(self, **shape: int) -> KernelQuery:
        """The query with which a layer chooses its kernels."""
        return KernelQuery(self.device.type, str(self.dtype).removeprefix("torch."), self.capability, shape)

    def parameter(self, *shape: int) -> torch.nn.Parameter:
        """An empty parameter of that shape."""
        return torch.nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)

    def in_float32(self) -> Build:
        """The same for a layer that computes in float32 whatever the model's type."""
        return replace(self, dtype=torch.float32)

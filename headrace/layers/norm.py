"""`RmsNorm` and `NoNorm`: normalise, or add to the running residual and normalise. `LayerNorm` for encoders."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from headrace.kernels.rms_norm import ADD_RMS_NORM, RMS_NORM
from headrace.layers.build import Build


class RmsNorm(nn.Module):
    """``x / rms(x) * (weight + offset)`` over the last dim, [T, D]."""

    def __init__(self, build: Build, width: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.weight = build.parameter(width)
        self.eps, self.offset = eps, offset
        query = build.query(width=width)
        self._norm = RMS_NORM.choose(query)
        self._add_norm = ADD_RMS_NORM.choose(query)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x, self.weight, self.eps, self.offset)

    def add(self, x: torch.Tensor | None, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(x + residual), x + residual)``; the first layer has no residual yet. ``residual`` is consumed. ``x``
        may be what a product left that `leaves sums <Linear.leave_sums>`: None if it is in the residual already."""
        if x is None or residual is None:
            total = residual if x is None else x
            return self._norm(total, self.weight, self.eps, self.offset), total
        return self._add_norm(x, residual, self.weight, self.eps, self.offset)


class LayerNorm(nn.Module):
    """Mean 0 and variance 1 over the last dim, [T, D], times ``weight`` plus ``bias``; torch's own kernel
    everywhere."""

    def __init__(self, build: Build, width: int, eps: float):
        super().__init__()
        self.weight, self.bias, self.eps = build.parameter(width), build.parameter(width), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class NoNorm(nn.Module):
    """Stands where an architecture has no norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``(x + residual, x + residual)``, the same tensor twice; ``residual`` is consumed."""
        total = x if residual is None else residual.add_(x)
        return total, total

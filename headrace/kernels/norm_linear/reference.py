"""The fused product as its parts: the oracle."""

from __future__ import annotations

import torch

from headrace.kernels.linear.reference import ACTIVATIONS, linear
from headrace.kernels.norm_linear import Norm
from headrace.kernels.rms_norm.reference import rms_norm


def norm_linear(
    x: torch.Tensor, residual: torch.Tensor, norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None,
    activation: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `NORM_LINEAR`."""
    total = x + residual
    out = linear(rms_norm(total, norm.weight, norm.eps, norm.offset), weight, bias)
    return (ACTIVATIONS[activation](out) if activation else out), total

"""Matrix products by torch: the oracle and the fallback."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.kernels.linear import Norm
from headrace.kernels.rowwise.reference import gelu_tanh_mul, rms_norm, silu_mul

ACTIVATIONS = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `LINEAR`."""
    return F.linear(x, weight, bias)


def linear_sums(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """See `LINEAR_SUMS`; leaves the residual to the norm."""
    return F.linear(x, weight, bias)


def gated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """See `GATED_LINEAR`."""
    return ACTIVATIONS[activation](F.linear(x, weight, bias))


def linear_float(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `LINEAR_FLOAT`."""
    return F.linear(x, weight).float()


def linear_into_float(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `LINEAR_FLOAT`; on CUDA, x and weight in half precision. cuBLAS stores its float32 accumulator."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def norm_linear(
    x: torch.Tensor, residual: torch.Tensor, norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None,
    activation: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `NORM_LINEAR`; unlike the fused kernels it rounds the normalised row to x's dtype."""
    total = x + residual
    out = linear(rms_norm(total, norm.weight, norm.eps, norm.offset), weight, bias)
    return (ACTIVATIONS[activation](out) if activation else out), total

"""Gated activations in plain torch: the oracle and the fallback."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """See `SILU_MUL`. Shazeer, arXiv:2002.05202 (SwiGLU)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    """See `GELU_TANH_MUL`. Shazeer, arXiv:2002.05202 (GEGLU)."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def clamped_swiglu(x: torch.Tensor, *, limit: float, alpha: float, up_offset: float) -> torch.Tensor:
    """See `CLAMPED_SWIGLU`. Computed in float32: the factors are far apart where the clamp bites."""
    gate, up = x.float().chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (gate * torch.sigmoid(gate * alpha)).mul_(up.clamp(-limit, limit).add_(up_offset)).to(x.dtype)

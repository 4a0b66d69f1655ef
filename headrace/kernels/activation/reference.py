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

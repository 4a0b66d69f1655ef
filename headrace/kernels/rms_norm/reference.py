"""RMS norm in plain torch: the oracle and the fallback. T tokens, D width."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """See `RMS_NORM`. Zhang & Sennrich, arXiv:1910.07467."""
    scale = weight.float()
    if offset:
        scale = scale + offset
    return F.rms_norm(x.float(), weight.shape, scale, eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ADD_RMS_NORM`; writes the new residual in place."""
    residual.add_(x if x.dim() == 2 else x.sum(0).to(residual.dtype))
    return rms_norm(residual, weight, eps, offset), residual

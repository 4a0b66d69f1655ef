"""RMS norm by own C++ kernels; in plain torch until they are there. T tokens, D width."""

from __future__ import annotations

import torch

from headrace.kernels.native import NATIVE
from headrace.kernels.rms_norm import reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """See `RMS_NORM`."""
    ops = NATIVE.find()
    if ops is None:
        return reference.rms_norm(x, weight, eps, offset)
    return ops.rms_norm(x, weight, eps, offset)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ADD_RMS_NORM`; writes the new residual in place."""
    ops = NATIVE.find()
    if ops is None or x.dim() == 3:
        return reference.add_rms_norm(x, residual, weight, eps, offset)
    return ops.add_rms_norm(x, residual, weight, eps, offset), residual

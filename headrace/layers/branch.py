"""`Branch`: what stands beside the residual in a block, attention or MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Branch(nn.Module):
    """``x [T, D] -> [T, D]``, of a normalised x."""

    def leave_sums(self) -> None:
        """From now on the output goes to `RmsNorm.add` alone, which takes sums too: a branch that ends with a product may
        leave it so."""

    def after_norm(self, norm: nn.Module, x: torch.Tensor, residual: torch.Tensor | None, *batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """``(branch(norm(x + residual)), x + residual)``; ``residual`` is consumed. Branches that begin with a product
        may fuse it with what comes before."""
        x, residual = norm.add(x, residual)
        return self(x, *batch), residual

"""`Branch`: what stands beside the residual in a block, attention or MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Branch(nn.Module):
    """``x [T, D] -> [T, D]``, of a normalised x."""

    def leave_sums(self) -> None:
        """From now on the output goes to `RmsNorm.add` alone, which takes sums too, and None for what was added to the
        residual: a branch that ends with a product may leave it so."""

    def after_norm(
        self, norm: nn.Module, x: torch.Tensor | None, residual: torch.Tensor | None, *batch: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """``(branch(norm(x + residual)), x + residual)``; ``residual`` is consumed. Branches that begin with a product
        may fuse it with what comes before."""
        x, residual = norm.add(x, residual)
        return self.onto(residual, x, *batch), residual

    def onto(self, residual: torch.Tensor, x: torch.Tensor, *batch: Any) -> torch.Tensor | None:
        """``branch(x)``; a branch that leaves sums may add it to ``residual`` itself and return None."""
        return self(x, *batch)

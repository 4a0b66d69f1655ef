"""The matrix product as torch has it: the oracle and the fallback."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `LINEAR`."""
    return F.linear(x, weight, bias)

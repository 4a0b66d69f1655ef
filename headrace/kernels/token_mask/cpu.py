"""Token masks by an own C++ kernel, which searches as it masks; in plain torch until it is there."""

from __future__ import annotations

import torch

from headrace.kernels.native import NATIVE
from headrace.kernels.sample.cpu import search
from headrace.kernels.token_mask import reference


def token_mask(logits: torch.Tensor, masks: torch.Tensor, mask_of_row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `TOKEN_MASK`."""
    ops = NATIVE.find()
    if ops is None:
        return reference.token_mask(logits, masks, mask_of_row)
    return search(ops, logits, masks, mask_of_row)

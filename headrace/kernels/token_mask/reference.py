"""Token masks in plain torch: the oracle. V vocabulary."""

from __future__ import annotations

import torch

BITS = 8


def token_mask(logits: torch.Tensor, masks: torch.Tensor, mask_of_row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `TOKEN_MASK`. Goes by bytes: the bits of a little-endian word come in the order of its bytes."""
    raw = logits.amax(dim=1)
    device, vocab_size = logits.device, logits.shape[1]
    bits = torch.arange(2**BITS, device=device).unsqueeze(1).bitwise_right_shift(torch.arange(BITS, device=device)).bitwise_and(1)
    own = masks.index_select(0, mask_of_row.clamp(min=0))
    is_forbidden = (bits == 0).index_select(0, own.view(torch.uint8).flatten().int()).view(len(own), -1)[:, :vocab_size]
    logits.masked_fill_(is_forbidden & (mask_of_row >= 0).unsqueeze(1), -torch.inf)
    values, ids = logits.max(-1)
    return raw, values, ids

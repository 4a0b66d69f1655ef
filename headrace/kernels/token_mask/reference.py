"""Token masks in plain torch: the oracle, and fast on a CPU, where it is a table look-up and an addition. V vocabulary."""

from __future__ import annotations

import torch

BITS = 8


def token_mask(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor) -> None:
    """See `TOKEN_MASK`. Goes by bytes: the bits of a little-endian word come in the order of its bytes."""
    device, vocab_size = logits.device, logits.shape[1]
    bits = torch.arange(2**BITS, device=device).unsqueeze(1).bitwise_right_shift(torch.arange(BITS, device=device)).bitwise_and(1)
    term_of_byte = torch.where(bits == 1, 0.0, -torch.inf)
    terms = term_of_byte.index_select(0, masks.view(torch.uint8).flatten().int()).view(len(masks), masks.shape[1] * 32)
    logits.index_add_(0, rows, terms[:, :vocab_size])

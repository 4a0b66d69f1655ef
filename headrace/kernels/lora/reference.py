"""Low-rank additions in torch, an adapter at a time: the oracle and the fallback."""

from __future__ import annotations

import torch

from headrace.kernels.lora import LowRankBank, SlotRows


def add_low_rank(x: torch.Tensor, out: torch.Tensor, bank: LowRankBank, rows: SlotRows) -> None:
    """See `ADD_LOW_RANK`."""
    for slot, first, count in rows.segments or rows.blocks.t().tolist():
        own = rows.order[first : first + count]
        inputs, ranks = x.index_select(0, own), bank.ranks[slot].tolist()
        begin = 0
        for part, end in enumerate(bank.ends):
            rank = ranks[part]
            if rank:
                reduced = inputs.float() @ bank.a[slot, part, :rank].float().t()
                added = reduced @ bank.b[slot, :rank, begin:end].float()
                out[:, begin:end].index_add_(0, own, added.to(out.dtype))
            begin = end

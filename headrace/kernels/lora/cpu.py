"""Low-rank additions by own C++ kernels; by the reference until these are loaded."""

from __future__ import annotations

import torch

from headrace.kernels.lora import LowRankBank, SlotRows, reference
from headrace.kernels.native import NATIVE


def add_low_rank(x: torch.Tensor, out: torch.Tensor, bank: LowRankBank, rows: SlotRows) -> None:
    """See `ADD_LOW_RANK`."""
    ops = NATIVE.find()
    if ops is None or not rows.segments:
        reference.add_low_rank(x, out, bank, rows)
        return
    ops.add_low_rank(x, out, bank.a, bank.b, bank.ranks, torch.tensor(bank.ends), rows.pairs)

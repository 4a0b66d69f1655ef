"""Low-rank additions by own C++ kernels; by the reference until these are loaded. Both products are made behind the
base's, a row at a time: what the first leaves is then in registers and cache."""

from __future__ import annotations

import torch

from headrace.kernels.lora import LowRankBank, SlotRows, reference
from headrace.kernels.native import NATIVE


def shrink(x: torch.Tensor, bank: LowRankBank, rows: SlotRows) -> torch.Tensor:
    """See `SHRINK`; ``x`` itself."""
    return x


def expand(x: torch.Tensor, out: torch.Tensor, bank: LowRankBank, rows: SlotRows) -> None:
    """See `EXPAND`."""
    ops = NATIVE.find()
    if ops is None or not rows.segments:
        reference.expand(reference.shrink(x, bank, rows), out, bank, rows)
        return
    ops.add_low_rank(x, out, bank.a, bank.b, bank.ranks, torch.tensor(bank.ends), rows.pairs)

"""Low-rank additions by own C++ kernels; by the reference until these are loaded. Both products are made behind the
base's: what the first leaves is then in the cache."""

from __future__ import annotations

import torch

from headrace.kernels.lora import LowRankBank, SlotRows, reference
from headrace.kernels.lora.codes import CodedBank
from headrace.kernels.native import NATIVE


def shrink(x: torch.Tensor, bank: LowRankBank | CodedBank, rows: SlotRows) -> torch.Tensor:
    """See `SHRINK`; ``x`` itself."""
    return x


def expand(x: torch.Tensor, out: torch.Tensor, bank: LowRankBank | CodedBank, rows: SlotRows) -> None:
    """See `EXPAND`."""
    ops = NATIVE.find()
    if ops is None or not rows.segments:
        reference.expand(reference.shrink(x, bank, rows), out, bank, rows)
        return
    factors = (bank.codes, None) if isinstance(bank, CodedBank) else (bank.a, bank.b)
    ops.add_low_rank(x, out, *factors, bank.ranks, torch.tensor(bank.ends), rows.pairs, bank.most_ranks)

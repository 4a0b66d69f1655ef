"""`ExpertSlots`: where the experts of a layer are, and how often each was chosen. On the device, changed in place, so
that captured steps read what is true now. X experts, P slots of all ranks, C copies, T tokens, k experts a token.
"""

from __future__ import annotations

import torch
from torch import nn

from headrace.parallel.placement import Placement


class ExpertSlots(nn.Module):
    """``table`` [X, C]: the slots of each expert, repeated up to the most copies that there may be; ``copies`` [X];
    ``load`` [X]: choices since it was last set to zero."""

    def __init__(self, num_experts: int, placement: Placement, device: torch.device):
        super().__init__()
        most = min(placement.num_ranks, 1 + len(placement.slots) - num_experts)
        self.num_slots = len(placement.slots)
        self.table, self.copies, self.load = (
            nn.Buffer(torch.zeros(shape, dtype=torch.int64, device=device), persistent=False)
            for shape in ((num_experts, most), (num_experts,), (num_experts,))
        )
        self.assign(placement)

    def assign(self, placement: Placement) -> None:
        """Experts are there now."""
        by_expert, most = placement.find_slots(), self.table.shape[1]
        slots = [by_expert[expert] for expert in range(len(self.table))]
        self.table.copy_(torch.tensor([(own * most)[:most] for own in slots]))
        self.copies.copy_(torch.tensor([len(own) for own in slots]))

    def route(self, ids: torch.Tensor) -> torch.Tensor:
        """The slots of chosen experts [T, k]; tokens take the copies of an expert in turns. Counts them."""
        chosen = ids.flatten()
        self.load.index_add_(0, chosen, torch.ones_like(chosen))
        turns = torch.arange(len(ids), device=ids.device).unsqueeze(1) % self.copies[ids]
        return self.table[ids, turns]

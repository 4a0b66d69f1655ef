"""`RoutedExperts`: a mixture's experts behind its router. How tokens travel and experts compute is chosen in `pairing`;
when experts move between ranks, in `balancing`.

T tokens, D hidden size, X experts, k experts a token, P slots of all ranks, C copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from headrace.layers.build import Build
from headrace.layers.moe.contract import ChosenTokens
from headrace.layers.moe.mxfp4 import Mxfp4ExpertWeights
from headrace.layers.moe.pairing import pair_experts
from headrace.layers.moe.weights import ExpertWeights
from headrace.layers.spec import MoeSpec
from headrace.parallel.group import Group
from headrace.parallel.placement import Placement

Choices = tuple[torch.Tensor, torch.Tensor]
"""Ids [T, k] int64 and weights [T, k] float32 of chosen experts."""


class ExpertSlots(nn.Module):
    """Where the experts of a layer are, and how often each was chosen. On the device, changed in place, so that
    captured steps read what is true now. ``table`` [X, C]: the slots of each expert, repeated up to the most copies
    that there may be; ``copies`` [X]; ``load`` [X]: choices since it was last set to zero."""

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


class RoutedExperts(nn.Module):
    """``x [T, D]`` and what each token chose to weighted sums [T, D]; with several ranks, this rank's part of the sums.
    ``weights`` are a module of the layer that this one belongs to; ``width``: what is here of each expert's
    intermediate dims. Raises `ConfigError` where no dispatcher and experts fit, or ranks cannot have the copies."""

    def __init__(
        self, weights: ExpertWeights | Mxfp4ExpertWeights, spec: MoeSpec, hidden_size: int, build: Build, *, width: int
    ):
        super().__init__()
        ranks, count = build.experts, spec.routing.num_experts
        self.num_experts, self._top_k, self._size = count, spec.routing.top_k, ranks.group.size
        query = build.query(
            width=hidden_size, expert_width=width, num_experts=ranks.share(count).length, top_k=self._top_k,
            ranks=ranks.group.size, replicas=ranks.num_replicas, moves=int(build.moves_experts),
            mxfp4=int(isinstance(weights, Mxfp4ExpertWeights)),
        )
        self._places, self._num_slots = build.count_places(count), count
        self._weights = (weights,)  # a tuple: no modules of this one
        self.run = pair_experts(weights, spec.expert, build, query)
        self._takes_part = ranks.num_replicas > 1
        self.slots: ExpertSlots | None = None  # where experts are, if they move
        self._nothing = torch.empty(0, hidden_size, dtype=build.dtype, device=build.device)

    @property
    def is_capturable(self) -> bool:
        """Whether steps with these experts may be recorded in CUDA graphs."""
        return self.run.is_capturable

    def forward(self, x: torch.Tensor, choices: Choices) -> torch.Tensor:
        ids, weights = choices
        if self.slots is not None:
            ids = self.slots.route(ids)
        return self.run(ChosenTokens(x, ids, weights, self._num_slots))

    def take_part(self) -> None:
        """Compute other replicas' tokens in a step in which this one has none. Does nothing where none come here."""
        if self._takes_part:
            ids = torch.empty(0, self._top_k, dtype=torch.int64, device=self._nothing.device)
            self.run(ChosenTokens(self._nothing, ids, ids.float(), self._num_slots))

    def spread(self) -> Placement:
        """Have places for copies of experts, and count what is chosen; returns where experts are. Once, when the
        weights are loaded. Raises `ConfigError` for weights in a form that does not move."""
        self._weights[0].make_room()
        placement = Placement.initial(self.num_experts, self._places * self._size, self._size)
        self._num_slots = len(placement.slots)
        self.slots = ExpertSlots(self.num_experts, placement, self._nothing.device)
        return placement

    def rearrange(self, placement: Placement, moves: Sequence[tuple[int, int]], group: Group) -> None:
        """Move experts between ranks; see `Placement.moves_from`. All ranks at the same step."""
        assert self.slots is not None, "spread comes first"
        self._weights[0].exchange(group, moves)
        self.slots.assign(placement)

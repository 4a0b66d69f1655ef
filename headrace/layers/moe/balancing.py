"""`ExpertBalancer`: counts which experts tokens choose, and moves experts between ranks, with copies of busy ones.

All ranks of an engine, and of all replicas that divide experts, call `begin_step` before the same steps; they agree on
loads by a collective, and compute the same placement. X experts, P slots of all ranks, C copies, T tokens, k experts a
token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice

import torch
from torch import nn

from headrace.base.errors import ConfigError
from headrace.base.messages import ExpertStats
from headrace.base.parallel import BalancingOptions
from headrace.layers.moe.routed import ExpertSlots, RoutedExperts
from headrace.parallel.experts import ExpertRanks
from headrace.parallel.placement import Placement, balancedness, place_experts

logger = logging.getLogger(__name__)


class ExpertBalancer:
    """Of the mixtures of one model, after their weights were loaded. A look at the loads happens every
    ``step_interval`` steps; then the experts of one layer move at each step, so that no step waits for all."""

    def __init__(self, mixtures: Sequence[RoutedExperts], ranks: ExpertRanks, options: BalancingOptions):
        self._mixtures, self._ranks, self._options = list[RoutedExperts](), ranks, options
        self._placements, self._slots = list[Placement](), list[ExpertSlots]()
        self.include(mixtures)
        self._waiting: list[tuple[int, Placement]] = []  # layers whose experts are still to be moved
        self._num_steps = 0
        self.stats = ExpertStats([0] * ranks.group.size, 1.0)

    def include(self, mixtures: Sequence[RoutedExperts]) -> None:
        """Move the experts of these too, such as a drafter's. Before the first step, on all ranks."""
        for mixture in mixtures:
            self._placements.append(mixture.spread())
            assert mixture.slots is not None
            self._mixtures.append(mixture)
            self._slots.append(mixture.slots)

    def begin_step(self) -> None:
        """Called before every step that computes tokens of any replica."""
        if self._waiting:
            self._move(*self._waiting.pop(0))
        self._num_steps += 1
        interval = self._options.step_interval
        if self._num_steps % interval == 0:
            self._look()  # waits for the device
        if (self._num_steps + min(self._options.window_size, interval)) % interval == 0:
            for slots in self._slots:
                slots.load.zero_()

    def _look(self) -> None:
        loads: list[torch.Tensor] = [slots.load for slots in self._slots]  # [X] each
        # the ranks of a replica have counted the same tokens
        together = self._ranks.group.all_reduce(torch.cat(loads).float().unsqueeze(0)) / self._ranks.ranks_each
        numbers = iter(together[0].tolist())
        by_layer = [list(islice(numbers, len(own))) for own in loads]
        totals, evenness = list(self.stats.tokens_by_rank), []
        self._waiting = []
        for layer, (own, placement) in enumerate(zip(by_layer, self._placements, strict=True)):
            rank_loads = placement.load_ranks(own)
            totals = [total + round(load) for total, load in zip(totals, rank_loads, strict=True)]
            evenness.append(balancedness(rank_loads))
            wanted = place_experts(own, placement)
            if wanted is not placement:
                self._waiting.append((layer, wanted))
        mean = sum(evenness) / len(evenness)
        self.stats = ExpertStats(totals, mean, self.stats.num_moved)
        if self._options.log_balancedness:
            logger.info("experts: ranks are loaded at %.2f of the busiest, %d layers change", mean, len(self._waiting))

    def _move(self, layer: int, wanted: Placement) -> None:
        moves = wanted.moves_from(self._placements[layer])
        self._mixtures[layer].rearrange(wanted, moves, self._ranks.group)
        self._placements[layer] = wanted
        self.stats = ExpertStats(
            self.stats.tokens_by_rank, self.stats.balancedness, self.stats.num_moved + len(moves)
        )


def list_mixtures(model: nn.Module) -> list[RoutedExperts]:
    """The experts of each layer that has some."""
    return [module for module in model.modules() if isinstance(module, RoutedExperts)]


def find_balancer(model: nn.Module, ranks: ExpertRanks, options: BalancingOptions) -> ExpertBalancer:
    """The balancer of a loaded model; raises `ConfigError` where no experts are divided."""
    mixtures = list_mixtures(model)
    if ranks.is_single or not mixtures:
        why = "has no experts that ranks can divide" if not mixtures else "is on one rank"
        raise ConfigError(f"enable_eplb moves experts between ranks, and this model {why}", param="enable_eplb")
    return ExpertBalancer(mixtures, ranks, options)

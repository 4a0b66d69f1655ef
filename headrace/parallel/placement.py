"""`Placement`: which expert is in which slot of which rank; `place_experts` finds one that loads the ranks evenly.
Torch-free. All ranks compute the same placement from the same loads.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.base.errors import ConfigError
from headrace.parallel.share import divide

NOBODY = -1
"""In a slot without an expert."""
LEAST_GAIN = 0.02
"""By which share the busiest rank's load must shrink for experts to move."""


def check_copies(num_experts: int, num_copies: int, num_ranks: int) -> None:
    """Raise `ConfigError` unless ranks can have so many experts and copies of them in equal numbers."""
    num_slots = num_experts + num_copies
    if num_slots % num_ranks or num_slots > num_experts * num_ranks:
        least = -num_experts % num_ranks
        raise ConfigError(
            f"eplb_config: {num_ranks} ranks cannot have {num_experts} experts and {num_copies} copies in equal "
            f"numbers; set num_redundant_experts to {least} or {least + num_ranks}", param="eplb_config",
        )


@dataclass(frozen=True)
class Placement:
    """``slots[s]`` is the expert in slot s, or `NOBODY`. The slots of a rank are neighbours, as many on each of
    ``num_ranks``."""

    slots: tuple[int, ...]
    num_ranks: int

    @classmethod
    def initial(cls, num_experts: int, num_slots: int, num_ranks: int) -> Placement:
        """Each rank has its share of the experts, and then free slots."""
        each, slots = num_slots // num_ranks, list[int]()
        for rank in range(num_ranks):
            own = list(range(*divide(num_experts, num_ranks, rank)))
            slots += own + [NOBODY] * (each - len(own))
        return cls(tuple(slots), num_ranks)

    @property
    def slots_each(self) -> int:
        """Slots of a rank."""
        return len(self.slots) // self.num_ranks

    def on_rank(self, rank: int) -> tuple[int, ...]:
        """The slots of a rank."""
        return self.slots[rank * self.slots_each : (rank + 1) * self.slots_each]

    def find_slots(self) -> dict[int, list[int]]:
        """The slots of each expert."""
        found: dict[int, list[int]] = {}
        for slot, expert in enumerate(self.slots):
            if expert != NOBODY:
                found.setdefault(expert, []).append(slot)
        return found

    def load_ranks(self, loads: Sequence[float]) -> list[float]:
        """What each rank has of the experts' loads; the copies of an expert share its load."""
        shares = {expert: loads[expert] / len(slots) for expert, slots in self.find_slots().items()}
        shares[NOBODY] = 0.0
        return [sum(shares[expert] for expert in self.on_rank(rank)) for rank in range(self.num_ranks)]

    def moves_from(self, before: Placement) -> list[tuple[int, int]]:
        """Copies that turn ``before`` into this: (slot then, slot now), by slot now. All read before any writes."""
        sources, moves = before.find_slots(), []
        for slot, expert in enumerate(self.slots):
            if expert in (NOBODY, before.slots[slot]):
                continue
            holders, rank = sources[expert], slot // self.slots_each
            near = [holder for holder in holders if holder // self.slots_each == rank]
            moves.append((near[0] if near else holders[slot % len(holders)], slot))
        return moves


def balancedness(rank_loads: Sequence[float]) -> float:
    """Mean load over the largest: 1 when all ranks are loaded alike, also without any load."""
    most = max(rank_loads)
    return sum(rank_loads) / len(rank_loads) / most if most else 1.0


def place_experts(loads: Sequence[float], before: Placement) -> Placement:
    """A placement with the slots of ``before`` in which the busiest rank has little to do, copies of busy experts
    included. Keeps experts where they are if it can, and ``before`` itself unless there is something to gain."""
    copies = count_copies(loads, len(before.slots), before.num_ranks)
    bins = _pack(loads, copies, before)
    placed = Placement(tuple(slot for rank in _keep_in_place(bins, before) for slot in rank), before.num_ranks)
    is_better = max(placed.load_ranks(loads)) < (1 - LEAST_GAIN) * max(before.load_ranks(loads))
    return placed if is_better else before


def count_copies(loads: Sequence[float], num_slots: int, num_ranks: int) -> list[int]:
    """How many copies each expert gets: one, and of those that are left one after the other goes to the expert with the
    most load per copy. No expert has more copies than there are ranks."""
    copies = [1] * len(loads)
    heap = [(-load, expert) for expert, load in enumerate(loads)] if num_ranks > 1 else []
    heapq.heapify(heap)
    for _ in range(num_slots - len(loads)):
        if not heap:
            break
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        if copies[expert] < num_ranks:
            heapq.heappush(heap, (-loads[expert] / copies[expert], expert))
    return copies


def _pack(loads: Sequence[float], copies: Sequence[int], before: Placement) -> list[list[int]]:
    """The experts of each rank: the heaviest copy first, to the rank with the least load that has a free slot and not
    that expert yet."""
    bins: list[list[int]] = [[] for _ in range(before.num_ranks)]
    filled = [0.0] * before.num_ranks
    heaviest = sorted(
        ((loads[expert] / count, expert) for expert, count in enumerate(copies) for _ in range(count)),
        key=lambda item: (-item[0], item[1]),
    )
    for weight, expert in heaviest:
        free = [rank for rank in range(before.num_ranks) if len(bins[rank]) < before.slots_each]
        rank = min([r for r in free if expert not in bins[r]] or free, key=lambda r: (filled[r], r))
        bins[rank].append(expert)
        filled[rank] += weight
    return bins


def _keep_in_place(bins: list[list[int]], before: Placement) -> list[list[int]]:
    """The slots of each rank: bins go to the ranks that have most of their experts, which stay in their slots."""
    pairs = sorted(
        ((-len(set(experts) & set(before.on_rank(rank))), index, rank)
         for index, experts in enumerate(bins) for rank in range(before.num_ranks))
    )
    taken: dict[int, int] = {}  # bin by rank
    for _, index, rank in pairs:
        if rank not in taken and index not in taken.values():
            taken[rank] = index
    ranks = []
    for rank in range(before.num_ranks):
        new, slots = list(bins[taken[rank]]), list(before.on_rank(rank))
        for place, expert in enumerate(slots):
            if expert in new:
                new.remove(expert)
            else:
                slots[place] = NOBODY
        for place, expert in enumerate(slots):
            if expert == NOBODY and new:
                slots[place] = new.pop(0)
        ranks.append(slots)
    return ranks

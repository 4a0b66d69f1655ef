"""`ExpertRanks`: the ranks among which experts are divided, and which of a step's tokens each of them sends. Sums and
counts over rows that ranks exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from headrace.parallel.group import Group
from headrace.parallel.share import Share, divide, share_experts


@dataclass(frozen=True)
class ExpertRanks:
    """``group``: the ranks that have some experts each. They are the ranks of ``num_replicas`` replicas, those of a
    replica beside each other; replicas have different tokens, the ranks of one have the same."""

    group: Group = field(default_factory=Group)
    num_replicas: int = 1

    @property
    def is_single(self) -> bool:
        """Whether all experts are here."""
        return self.group.is_single

    @property
    def ranks_each(self) -> int:
        """Ranks of a replica."""
        return self.group.size // self.num_replicas

    @property
    def replica(self) -> int:
        """That of this rank."""
        return self.group.rank // self.ranks_each

    def share(self, num_experts: int) -> Share:
        """This rank's experts."""
        return share_experts(num_experts, self.group.size, self.group.rank)

    def split_tokens(self, counts: Sequence[int]) -> tuple[Share, list[int]]:
        """What this rank sends of its replica's tokens, and how many tokens each rank sends, given ``counts[r]`` tokens
        of replica r. The ranks of a replica divide its tokens, so that each token is sent once."""
        parts = [divide(count, self.ranks_each, rank) for count in counts for rank in range(self.ranks_each)]
        start, stop = parts[self.group.rank]
        return Share(counts[self.replica], start, stop), [end - begin for begin, end in parts]


def exchange_counts(group: Group, counts: torch.Tensor) -> list[int]:
    """How many rows each rank sends to this one, from how many this one sends to each (int64 [size]). Waits for the
    device."""
    ones = [1] * group.size
    return group.exchange_rows(counts.unsqueeze(1), ones, ones).flatten().tolist()


def reduce_scatter_rows(group: Group, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Of the sum over all ranks of ``x`` [n, D] those rows that are this rank's: ``counts[r]`` of rank r, one rank's
    behind the other's. Added up in float32, in the order of ranks."""
    own = counts[group.rank]
    parts = group.exchange_rows(x, counts, [own] * group.size, max(counts))
    return parts.view(group.size, own, *x.shape[1:]).sum(0, dtype=torch.float32).to(x.dtype)

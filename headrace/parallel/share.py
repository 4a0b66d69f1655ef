"""`Share`: the part of a dimension that one rank holds, and how dimensions are divided among ranks. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.errors import ConfigError

UNITS = (256, 128, 64, 32, 16)
"""Sizes in which a dimension is divided, if it can be: those of quantised blocks, then those that kernels like."""


@dataclass(frozen=True, slots=True)
class Share:
    """Positions ``[start, stop)`` of a dimension of ``size``."""

    size: int
    start: int
    stop: int

    @classmethod
    def whole(cls, size: int) -> Share:
        """All of a dimension."""
        return cls(size, 0, size)

    @property
    def length(self) -> int:
        """Positions held."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the dimension is elsewhere."""
        return self.length == self.size

    def times(self, factor: int) -> Share:
        """The same share of a dimension with ``factor`` positions for each here, such as the dims of heads."""
        return Share(self.size * factor, self.start * factor, self.stop * factor)


def as_share(size: int | Share) -> Share:
    """A plain size is a whole dimension."""
    return Share.whole(size) if isinstance(size, int) else size


def divide(count: int, ranks: int, rank: int) -> tuple[int, int]:
    """``[start, stop)`` of ``count`` things for one of ``ranks``: consecutive, in parts that differ by one at most."""
    return count * rank // ranks, count * (rank + 1) // ranks


def share_units(size: int, ranks: int, rank: int, *, noun: str) -> Share:
    """A share of ``size`` positions in steps of the largest of `UNITS` that divides it evenly among the ranks; in
    steps of the largest power of two up to 16 where none does, and shares then differ in length. Raises `ConfigError`
    if there are fewer positions than ranks."""
    if size < ranks:
        raise ConfigError(
            f"{size} {noun} cannot be divided among {ranks} ranks; set tensor_parallel_size to {size} or less",
            param="tensor_parallel_size",
        )
    even = next((unit for unit in UNITS if size % (unit * ranks) == 0), 0)
    unit = even or next(unit for unit in (16, 8, 4, 2, 1) if size % unit == 0 and size // unit >= ranks)
    start, stop = divide(size // unit, ranks, rank)
    return Share(size, start * unit, stop * unit)


def share_kv_heads(num_kv_heads: int, ranks: int, rank: int) -> Share:
    """The KV heads of a rank. With fewer heads than ranks a head is held by several ranks, which divide its query
    heads."""
    if num_kv_heads >= ranks:
        return Share(num_kv_heads, *divide(num_kv_heads, ranks, rank))
    head = rank * num_kv_heads // ranks
    return Share(num_kv_heads, head, head + 1)


def share_heads(num_heads: int, num_kv_heads: int, ranks: int, rank: int) -> tuple[Share, Share]:
    """Query heads and KV heads of a rank: all query heads of its KV heads, or, where others hold the same KV head, its
    part of them. Raises `ConfigError` where a rank would get no query head."""
    kv, group = share_kv_heads(num_kv_heads, ranks, rank), num_heads // num_kv_heads
    if num_kv_heads >= ranks:
        return Share(num_heads, kv.start * group, kv.stop * group), kv
    holders = [other for other in range(ranks) if share_kv_heads(num_kv_heads, ranks, other) == kv]
    if len(holders) > group:
        raise ConfigError(
            f"{num_heads} attention heads ({num_kv_heads} KV heads) cannot be divided among {ranks} ranks; set "
            f"tensor_parallel_size to {num_heads} or less", param="tensor_parallel_size",
        )
    start, stop = divide(group, len(holders), holders.index(rank))
    return Share(num_heads, kv.start * group + start, kv.start * group + stop), kv


def share_experts(num_experts: int, ranks: int, rank: int) -> Share:
    """The experts of a rank, whole ones. Raises `ConfigError` with fewer experts than ranks."""
    if num_experts < ranks:
        raise ConfigError(
            f"{num_experts} experts cannot be divided among {ranks} ranks; leave out enable_expert_parallel",
            param="enable_expert_parallel",
        )
    return Share(num_experts, *divide(num_experts, ranks, rank))

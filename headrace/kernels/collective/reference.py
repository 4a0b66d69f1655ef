"""What collectives compute, in plain torch, from the tensors of all ranks: the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.kernels.rowwise.reference import add_rms_norm


def all_reduce(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the ranks' tensors in their order, in float32, rounded once. See `Collectives`."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def round_splits(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a rank sends of ``x`` [T, D], or of its partial sums [S, T, D] float32, added up in their order."""
    if x.dim() == 2:
        return x
    total = torch.zeros_like(x[0])
    for split in x:
        total += split
    return total.to(dtype)


def reduce_add_norm(
    parts: Sequence[torch.Tensor], stream: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Collectives`; ``stream`` is left as it is."""
    total = all_reduce([round_splits(part, stream.dtype) for part in parts])
    return add_rms_norm(total, stream.clone(), weight, eps, offset)


def all_gather(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """See `Collectives`."""
    return torch.cat(list(parts), dim=-1)


def exchange(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """See `Collectives`; what each rank gets."""
    return [torch.stack([part[rank] for part in parts]) for rank in range(len(parts))]

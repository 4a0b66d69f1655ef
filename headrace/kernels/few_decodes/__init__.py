"""Decodes of a few requests: norms of queries and keys, rotation, page write and attention in one launch. `hopper` has
the kernel. Steps that it does not take are left to `headrace.kernels.rowwise.ROPE_WRITE` and an attention backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.rowwise import HeadShape


@dataclass(frozen=True, slots=True)
class Rotation:
    """What ``ROPE_WRITE`` is given beside qkv and the pages; ``norms``: of queries and of keys."""

    positions: torch.Tensor
    cos_sin: torch.Tensor | None
    slots: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None
    shape: HeadShape

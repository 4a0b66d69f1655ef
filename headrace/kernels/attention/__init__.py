"""Raw attention kernels, called by the backends in ``layers/attention``; which one serves a model is chosen there.

Here is what others must know of kernels without importing Triton, and what a kernel for decodes that begin alike is
told of them: `PrefixGroups`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LONG_CONTEXT = 4096
"""Keys of a decode from which on it takes too long that one program reads them all, beside decodes of few."""
HOPPER_ROWS = {64: (128, 192), 128: (128,)}
"""Of a tile of chunks on Hopper, by the head dims that its kernel takes: query heads times tokens, in steps of few
tiles and in others. All query heads of a kv head are in one."""
HOPPER_LEAST_PAGE = 8
"""Tokens of a page, at least; see `hopper`."""
PREFIX_STEP = 64
"""Keys in common come in multiples of so many; no tile of a kernel has more."""
LEAST_MEMBERS = 4
"""Decodes of the smallest group."""


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """Which of B decodes begin with the same pages. ``keys`` [B] int64: how many keys at its beginning each has in the
    same pages as the others of its group, a multiple of `PREFIX_STEP` and less than its length; 0 without a group.
    ``groups`` [N, 2] int64: first decode and number of decodes of each group, which stand side by side; 0 decodes in
    room that is left."""

    keys: torch.Tensor
    groups: torch.Tensor

    @classmethod
    def of(cls, packed: torch.Tensor, size: int) -> PrefixGroups:
        """Views of ``packed``: ``keys`` of ``size`` decodes, then ``groups``."""
        return cls(packed[:size], packed[size:].view(-1, 2))


def count_packed(size: int) -> int:
    """Numbers in `PrefixGroups` of ``size`` decodes, with room for the most groups of these."""
    return size + 2 * (size // LEAST_MEMBERS)

"""Weights that come in blocks of a file's own quantised type, on their way from the file to the layer that keeps them
so.

`BlockTensor` goes wherever a plain tensor goes: whatever is done to it is done to the plain numbers, made at that
moment; only a layer that can keep blocks looks inside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from headrace.kernels.packed_linear.blocks import WeightBlocks, pack_blocks
from headrace.kernels.packed_linear.forms import PanelWeight
from headrace.layers.storing import StorableWeight


class BlockTensor(torch.Tensor):
    """A matrix [O, I] on a CPU that says it has ``dtype``, or ``num_stacked`` of them, [X, O, I]; ``make_plain`` makes
    it."""

    blocks: WeightBlocks
    make_plain: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(
        cls, blocks: WeightBlocks, dtype: torch.dtype, make_plain: Callable[[], torch.Tensor], num_stacked: int = 0
    ) -> BlockTensor:
        stacks = (num_stacked,) if num_stacked else ()
        return torch.Tensor._make_wrapper_subclass(
            cls, (*stacks, blocks.out_width // (num_stacked or 1), blocks.in_width), dtype=dtype
        )

    def __init__(
        self, blocks: WeightBlocks, dtype: torch.dtype, make_plain: Callable[[], torch.Tensor], num_stacked: int = 0
    ):
        self.blocks, self.make_plain = blocks, make_plain

    def unbind(self, dim: int = 0) -> tuple[torch.Tensor, ...]:
        """Those of a stack, each in its own blocks; what is plain is made for all at once."""
        if self.dim() != 3 or dim != 0:
            return super().unbind(dim)
        make_all = cache(self.make_plain)
        rows = self.blocks.raw.view(self.shape[0], self.shape[1], -1)
        return tuple(
            BlockTensor(WeightBlocks(self.blocks.kind, raw), self.dtype, lambda i=i: make_all()[i]) for i,
            raw in enumerate(rows.unbind())
        )

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(BlockTensor, lambda tensor: tensor.make_plain(), (args, kwargs or {}))
        return function(*args, **kwargs)


class BlockIntake:
    """Gathers the blocks of the parts of one weight. Once it has them all, the layers keep them; a part that never
    comes as blocks makes the others plain too."""

    def __init__(self, weight: StorableWeight):
        self._weight = weight
        self._parts: dict[int, BlockTensor] = {}

    def put(self, first_row: int, tensor: BlockTensor) -> None:
        """Rows from ``first_row`` on."""
        self._parts[first_row] = tensor
        if sum(part.shape[0] for part in self._parts.values()) == self._weight.weight.shape[0]:
            packed = pack_blocks([part.blocks for _, part in sorted(self._parts.items())])
            self._parts.clear()
            self._weight.store(PanelWeight(packed))

    def finish(self) -> None:
        """No more blocks will come."""
        for first_row, part in self._parts.items():
            self._weight.weight[first_row : first_row + part.shape[0]].copy_(part)
        self._parts.clear()

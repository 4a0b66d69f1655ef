"""Carries quantised blocks of a weight file from the reader to layers that keep them quantised.

`BlockTensor` behaves like a plain tensor: any torch operation on it dequantises first. `BlockIntake` takes the blocks
out of it without dequantising. O outputs, I inputs, X experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from headrace.kernels.packed_linear.blocks import BLOCK_TYPES, WeightBlocks, pack_blocks
from headrace.kernels.packed_linear.forms import PanelWeight
from headrace.layers.quantization.storage import StorableWeight
from headrace.parallel.cut import Cut


class BlockTensor(torch.Tensor):
    """A wrapper subclass without storage of its own: a matrix [O, I], or ``num_stacked`` of them, [X, O, I], on the CPU
    and of nominal ``dtype``. ``make_plain`` dequantises it. ``blocks`` may be views of a mapped file."""

    blocks: WeightBlocks
    make_plain: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(
        cls, blocks: WeightBlocks, dtype: torch.dtype, make_plain: Callable[[], torch.Tensor], num_stacked: int = 0
    ) -> BlockTensor:
        stacks = (num_stacked,) if num_stacked else ()
        return torch.Tensor._make_wrapper_subclass(
            cls, (*stacks, blocks.out_features // (num_stacked or 1), blocks.in_features), dtype=dtype
        )

    def __init__(
        self, blocks: WeightBlocks, dtype: torch.dtype, make_plain: Callable[[], torch.Tensor], num_stacked: int = 0
    ):
        self.blocks, self.make_plain = blocks, make_plain

    def unbind(self, dim: int = 0) -> tuple[torch.Tensor, ...]:
        """The matrices of a stack, each with its own blocks. Dequantising one dequantises the stack, at most once: the
        result is cached for the others."""
        if self.dim() != 3 or dim != 0:
            return super().unbind(dim)
        make_all = cache(self.make_plain)
        rows = self.blocks.raw.view(self.shape[0], self.shape[1], -1)

        def make_one(index: int) -> torch.Tensor:
            return make_all()[index]

        return tuple(
            BlockTensor(WeightBlocks(self.blocks.kind, raw), self.dtype, partial(make_one, index))
            for index, raw in enumerate(rows.unbind())
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub declares a static function
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(BlockTensor, lambda tensor: tensor.make_plain(), (args, kwargs or {}))
        return function(*args, **kwargs)


def keep_blocks(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    """`Cut.keep`; of a `BlockTensor` a matrix stays one unless the cut goes through blocks: then it is dequantised."""
    if not isinstance(tensor, BlockTensor) or tensor.dim() != 2 or any(len(parts) > 1 for parts in cut.dims):
        return cut.keep(tensor)
    (rows,), (columns,) = cut.dims
    raw, block = tensor.blocks.raw, BLOCK_TYPES[tensor.blocks.kind]
    if columns.start % block.inputs or columns.stop % block.inputs:
        return cut.keep(tensor)
    first, last = (at // block.inputs * block.num_bytes for at in (columns.start, columns.stop))
    kept = WeightBlocks(tensor.blocks.kind, raw[rows.start : rows.stop, first:last].contiguous())
    return BlockTensor(kept, tensor.dtype, lambda: cut.keep(tensor.make_plain()))


class BlockIntake:
    """Collects the quantised parts of one stacked weight (q, k and v, say). Once all have arrived, the layers store
    them packed in place of the parameter; if a part is plain, `finish` dequantises the others into the parameter."""

    def __init__(self, weight: StorableWeight):
        self._weight = weight
        self._parts: dict[int, BlockTensor] = {}

    def put(self, first_row: int, tensor: BlockTensor) -> None:
        """Add the part whose first row in the whole weight is ``first_row``; parts may come in any order."""
        self._parts[first_row] = tensor
        # complete when the rows add up; after `store` the parameter is gone and no part may follow
        if sum(part.shape[0] for part in self._parts.values()) == self._weight.weight.shape[0]:
            packed = pack_blocks([part.blocks for _, part in sorted(self._parts.items())])
            self._parts.clear()
            self._weight.store(PanelWeight(packed))

    def finish(self) -> None:
        """Called after the last tensor: dequantise what has arrived of an incomplete weight into the parameter."""
        for first_row, part in self._parts.items():
            self._weight.weight[first_row : first_row + part.shape[0]].copy_(part)
        self._parts.clear()

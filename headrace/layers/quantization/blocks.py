"""Carries quantised weights of a file from the reader to layers that keep them quantised.

A `QuantisedTensor` behaves like a plain tensor: any torch operation on it dequantises first. `QuantisedIntake` takes
the codes out of it without dequantising. O outputs, I inputs, X experts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from headrace.kernels.coded_linear.choice import CodedChoice, pack_parts, pack_weight
from headrace.kernels.coded_linear.codes import CodedMatrix, stack_matrices
from headrace.kernels.coded_linear.device_codes import DeviceCodes, pack_for_device, read_codes
from headrace.kernels.coded_linear.forms import STACK_PLAN, CodedWeight
from headrace.kernels.coded_linear.panels import store_in_panels
from headrace.kernels.packed_linear.blocks import BLOCK_TYPES, WeightBlocks, pack_blocks
from headrace.kernels.packed_linear.forms import PanelWeight, StoredWeight
from headrace.layers.quantization.storage import StorableWeight
from headrace.parallel.cut import Cut, ensure_memory

logger = logging.getLogger(__name__)


class QuantisedTensor(torch.Tensor):
    """A wrapper subclass without storage of its own, of nominal dtype; ``make_plain`` dequantises it."""

    make_plain: Callable[[], torch.Tensor]

    @property
    def raw(self) -> torch.Tensor:
        """The codes, zeros of which mean a weight of zeros or nearly so."""
        raise NotImplementedError

    def keep(self, cut: Cut) -> torch.Tensor:
        """`Cut.keep`; a matrix stays quantised where it can."""
        return cut.keep(self)

    @classmethod
    def store(cls, parts: Sequence[Any], weight: StorableWeight, choice: CodedChoice) -> StoredWeight | None:
        """Parts of this class above one another as one stored weight in the place of ``weight``; None where none holds
        them, or plain products are faster."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub declares a static function
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(QuantisedTensor, lambda tensor: tensor.make_plain(), (args, kwargs or {}))
        return function(*args, **kwargs)


class BlockTensor(QuantisedTensor):
    """Blocks of a GGUF file: a matrix [O, I], or ``num_stacked`` of them, [X, O, I], on the CPU. ``blocks`` may be
    views of a mapped file."""

    blocks: WeightBlocks

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

    @property
    def raw(self) -> torch.Tensor:
        """See `QuantisedTensor`."""
        return self.blocks.raw

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

    def keep(self, cut: Cut) -> torch.Tensor:
        """See `QuantisedTensor`; a cut through blocks dequantises."""
        if self.dim() != 2 or any(len(parts) > 1 for parts in cut.dims):
            return cut.keep(self)
        (rows,), (columns,) = cut.dims
        raw, block = self.blocks.raw, BLOCK_TYPES[self.blocks.kind]
        if columns.start % block.inputs or columns.stop % block.inputs:
            return cut.keep(self)
        first, last = (at // block.inputs * block.num_bytes for at in (columns.start, columns.stop))
        kept = WeightBlocks(self.blocks.kind, raw[rows.start : rows.stop, first:last].contiguous())
        return BlockTensor(kept, self.dtype, lambda: cut.keep(self.make_plain()))

    @classmethod
    def store(cls, parts: Sequence[BlockTensor], weight: StorableWeight, choice: CodedChoice) -> StoredWeight | None:
        """See `QuantisedTensor`."""
        device = weight.weight.device
        if device.type == "cpu":
            return PanelWeight(pack_blocks([part.blocks for part in parts]))
        if not _takes_codes(weight):
            return None
        blocks = [part.blocks for part in parts]
        if weight.is_stack:
            stacked = stack_matrices([read_codes(part, device) for part in blocks])
            return None if stacked is None else store_on_gpu(stacked, weight, choice)
        dtype, capability = weight.weight.dtype, torch.cuda.get_device_capability(device)
        return _keep_codes(pack_parts(blocks, device, dtype, capability), weight, choice)


class CodedTensor(QuantisedTensor):
    """A matrix [O, I] of a quantised checkpoint, on any device."""

    matrix: CodedMatrix

    @staticmethod
    def __new__(cls, matrix: CodedMatrix) -> CodedTensor:
        return torch.Tensor._make_wrapper_subclass(cls, matrix.shape, dtype=torch.float32, device=matrix.device)

    def __init__(self, matrix: CodedMatrix):
        self.matrix, self.make_plain = matrix, lambda: matrix.dequantise(torch.float32)

    @property
    def raw(self) -> torch.Tensor:
        """See `QuantisedTensor`."""
        return self.matrix.scales  # codes of zero mean zero in some formats only

    def keep(self, cut: Cut) -> torch.Tensor:
        """See `QuantisedTensor`; any cut keeps codes."""
        (rows, *more_rows), (columns, *more_columns) = cut.dims
        if more_rows or more_columns:
            return cut.keep(self)
        return CodedTensor(self.matrix.keep(slice(rows.start, rows.stop), slice(columns.start, columns.stop)))

    @classmethod
    def store(cls, parts: Sequence[CodedTensor], weight: StorableWeight, choice: CodedChoice) -> StoredWeight | None:
        """See `QuantisedTensor`."""
        stacked = stack_matrices([part.matrix for part in parts])
        if stacked is None or (weight.weight.dtype == torch.float16 and weight.weight.device.type == "cpu"):
            return None
        if stacked.device.type == "cpu":
            return store_in_panels(stacked, is_stack=weight.is_stack)[0]
        return store_on_gpu(stacked, weight, choice)


def _takes_codes(weight: StorableWeight) -> bool:
    """Whether kernels on a GPU take codes of it: of no embedding, also where the head is the same matrix."""
    return not weight.has_rows and weight.weight.dtype != torch.float32


def store_on_gpu(matrix: CodedMatrix, weight: StorableWeight, choice: CodedChoice) -> StoredWeight | None:
    """The weight in the layout of GPU kernels; None where it is irregular or faster plain, and for embeddings. Heads
    are judged by products with float32 results. Experts, of which a step reads few, are always faster in codes."""
    dtype = weight.weight.dtype
    if not _takes_codes(weight):
        return None
    if weight.is_stack:
        return _store_stack(matrix, weight)
    codes = pack_weight(matrix, dtype, torch.cuda.get_device_capability(matrix.device))
    return _keep_codes(codes, weight, choice)


def _keep_codes(codes: DeviceCodes | None, weight: StorableWeight, choice: CodedChoice) -> StoredWeight | None:
    """The weight in codes, where these are faster or little slower than plain."""
    if codes is None:
        return None
    dtype, capability = weight.weight.dtype, torch.cuda.get_device_capability(codes.codes.device)
    plan = choice.choose(codes, dtype, capability, in_float=weight.is_vocabulary)
    return None if plan is None else CodedWeight(codes, plan)


def _store_stack(matrix: CodedMatrix, weight: StorableWeight) -> StoredWeight | None:
    codes = pack_for_device(matrix)
    fault = "its groups differ in size" if codes is None else codes.fault_of_stack(weight.layers[0].weight.shape[1])
    if codes is None or fault is not None:
        logger.warning("experts of %s are dequantised: %s", weight.name, fault)
        return None
    return CodedWeight(codes, STACK_PLAN)


class QuantisedIntake:
    """Collects the quantised parts of one stacked weight (q, k and v, say). Once all have arrived, the layers store
    them packed in place of the parameter; if a part is plain, or no packed form holds them all, they are dequantised
    into the parameter."""

    def __init__(self, weight: StorableWeight, choice: CodedChoice):
        self._weight, self._choice = weight, choice
        self._parts: dict[int, QuantisedTensor] = {}

    def put(self, first_row: int, tensor: QuantisedTensor) -> None:
        """Add the part whose first row in the whole weight is ``first_row``; parts may come in any order."""
        self._parts[first_row] = tensor
        # complete when the rows add up; after `store` the parameter is gone and no part may follow
        if sum(part.shape[0] for part in self._parts.values()) != self._weight.weight.shape[0]:
            return
        parts = [part for _, part in sorted(self._parts.items())]
        kinds = {type(part) for part in parts}
        stored = kinds.pop().store(parts, self._weight, self._choice) if len(kinds) == 1 else None
        if stored is None:
            self.finish()
        else:
            self._parts.clear()
            self._weight.store(stored)

    def finish(self) -> None:
        """Called after the last tensor: dequantise what has arrived of an incomplete weight into the parameter."""
        for first_row, part in self._parts.items():
            ensure_memory(self._weight.layers[0].weight)
            self._weight.weight[first_row : first_row + part.shape[0]].copy_(part.make_plain())
        self._parts.clear()

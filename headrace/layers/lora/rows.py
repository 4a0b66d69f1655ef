"""Which rows of a step have which adapter: from slots by row to `SlotRows`, as kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.kernels.lora import SlotRows

Segments = list[tuple[int, int, int]]
"""See `SlotRows.segments`."""

FEW_ROWS, MANY_ROWS = 16, 32
"""Rows of a block: those of a tensor core's smallest tile, and of one that reads additions less often."""
LEAST_MANY = 1024
"""Steps of so many rows are divided into large blocks."""


@dataclass(frozen=True, slots=True)
class RowsLayout:
    """Room for which rows of a step of at most ``size`` rows have which of ``num_slots`` adapters: one int64 array with
    ``order`` [size], ``slots`` [size] and ``blocks`` [3, num_blocks] of `SlotRows`."""

    size: int
    num_slots: int

    @property
    def block_rows(self) -> int:
        """Most rows of a block."""
        return FEW_ROWS if self.size < LEAST_MANY else MANY_ROWS

    @property
    def num_blocks(self) -> int:
        """The most that there can be: of each adapter, and of the rows without, one need not be full."""
        kinds = min(self.size, self.num_slots + 1)
        return max(1, min(self.size, (self.size + kinds * (self.block_rows - 1)) // self.block_rows))

    @property
    def room(self) -> int:
        """Numbers of the array."""
        return 2 * self.size + 3 * self.num_blocks

    def pack(self, slots: np.ndarray) -> tuple[np.ndarray, Segments]:
        """The array for these slots of at most ``size`` rows (-1: none), and the segments."""
        padded = np.full(self.size, self.num_slots, dtype=np.int64)  # without an adapter: last
        padded[: len(slots)] = np.where(slots < 0, self.num_slots, slots)
        packed = np.zeros(self.room, dtype=np.int64)
        order = packed[: self.size]
        order[:] = np.argsort(padded, kind="stable")
        sorted_slots = padded[order]
        packed[self.size : 2 * self.size] = np.where(sorted_slots < self.num_slots, sorted_slots, -1)
        kinds, starts, counts = np.unique(sorted_slots, return_index=True, return_counts=True)
        blocks, at = packed[2 * self.size :].reshape(3, self.num_blocks), 0
        blocks[0] = -1
        segments = []
        for kind, first, count in np.stack((kinds, starts, counts)).T.astype(object):  # numbers of Python
            slot = kind if kind < self.num_slots else -1
            if slot >= 0:
                segments.append((slot, first, count))
            num = -(-count // self.block_rows)
            firsts = first + self.block_rows * np.arange(num)
            blocks[0, at : at + num], blocks[1, at : at + num] = slot, firsts
            blocks[2, at : at + num] = np.minimum(self.block_rows, first + count - firsts)
            at += num
        return packed, segments

    def view(
        self, packed: torch.Tensor, segments: Segments, side: torch.cuda.Stream | None = None, *, num_dense: int = 0,
        num_runs: int = 0
    ) -> SlotRows:
        """`SlotRows` over what `pack` made, on its device."""
        order, slots = packed[: 2 * self.size].view(2, self.size)
        blocks = packed[2 * self.size :].view(3, self.num_blocks)
        return SlotRows(order, blocks, slots, self.block_rows, segments, side, num_dense=num_dense, num_runs=num_runs)

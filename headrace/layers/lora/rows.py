"""Which rows of a step have which adapter: from slots by row to `SlotRows`, as kernels read them."""

from __future__ import annotations

import numpy as np
import torch

from headrace.kernels.lora import BLOCK_ROWS, SlotRows

Segments = list[tuple[int, int, int]]
"""See `SlotRows.segments`."""


def count_blocks(num_rows: int, num_slots: int) -> int:
    """The most blocks of so many rows: one that is not full for each adapter."""
    return -(-num_rows // BLOCK_ROWS) + min(num_rows, num_slots)


def pack_rows(slots: np.ndarray, size: int, num_blocks: int) -> tuple[np.ndarray, Segments]:
    """Slots [T] of the rows (-1: none) as one int64 array, ``order`` [size] and then ``blocks`` [3, num_blocks] of
    `SlotRows`, with padding behind each; and the segments."""
    own = np.flatnonzero(slots >= 0)
    order = own[np.argsort(slots[own], kind="stable")]
    packed = np.zeros(size + 3 * num_blocks, dtype=np.int64)
    packed[: len(order)] = order
    sorted_slots = slots[order]
    starts = np.flatnonzero(np.diff(sorted_slots, prepend=-1))
    ends = np.append(starts[1:], len(order))[: len(starts)]
    segments = [(int(sorted_slots[s]), int(s), int(e - s)) for s, e in zip(starts, ends, strict=True)]
    blocks = packed[size:].reshape(3, num_blocks)
    at = 0
    for slot, first, count in segments:
        num = -(-count // BLOCK_ROWS)
        firsts = first + BLOCK_ROWS * np.arange(num)
        blocks[0, at : at + num], blocks[1, at : at + num] = slot, firsts
        blocks[2, at : at + num] = np.minimum(BLOCK_ROWS, first + count - firsts)
        at += num
    return packed, segments


def view_rows(
    packed: torch.Tensor, num_rows: int, size: int, segments: Segments, num_used: int | None = None
) -> SlotRows:
    """`SlotRows` over what `pack_rows` made, on its device. ``num_used``: how many places of ``order`` are real, where
    the host knows."""
    order = packed[:size]
    return SlotRows(num_rows, order if num_used is None else order[:num_used], packed[size:].view(3, -1), segments)

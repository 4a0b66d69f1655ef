"""Plans for chunks whose keys are divided among programs, as those of decodes are: a step of few tiles behind long
contexts would leave most of the device idle.

The device divides by lengths that it alone may know. No split shall have more blocks of keys than a multiprocessor's
share of all: steps of many tiles of one length are not divided at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div, next_power_of_2

KEYS = 128
"""Keys of a block: a split has whole blocks."""
LEAST_BLOCKS = 2
"""Of a split, before they are dealt evenly. To merge takes as long for few as for many."""
LEAST_CONTEXT = 8
"""Blocks that a tile has at least where it is divided."""
MOST_SPLITS = 32
"""Of a tile: the lanes of a warp, which merges a row; see ``csrc/cuda/prefill_splits.cuh``."""
NO_WINDOW = 1 << 30
"""More than any context."""


@dataclass(frozen=True)
class SplitWorkspace:
    """What splits leave to be merged, for ``room`` splits of each kv head. Kept for the backend's life, since captured
    graphs hold its addresses. Launches that share it must be on one stream.

    ``parts`` [room * K, rows, E] float32 are un-normalised sums, ``stats`` [room * K, rows, 2] float32 the highest
    logit, in base 2, and the denominator of each row."""

    parts: torch.Tensor
    stats: torch.Tensor
    room: int

    @classmethod
    def allocate(
        cls, processors: int, num_kv_heads: int, rows: int, head_dim: int, device: torch.device
    ) -> SplitWorkspace | None:
        """One split for each of ``processors`` SMs, of tiles of at most ``rows`` rows; None where that is less than two
        for a kv head."""
        room = processors // num_kv_heads
        if room < 2:
            return None
        slots = room * num_kv_heads
        parts = torch.empty(slots, rows, head_dim, dtype=torch.float32, device=device)
        return cls(parts, torch.empty(slots, rows, 2, dtype=torch.float32, device=device), room)


@dataclass(frozen=True)
class Splitting:
    """What a plan divides by: ``kv_lens`` [R] int32 of all requests of the step, the ``window`` (0: none) of its
    layers, and the room."""

    kv_lens: torch.Tensor
    window: int
    workspace: SplitWorkspace


def has_splits(query_lens: list[int], kv_lens: list[int], *, tokens: int, window: int, room: int) -> bool:
    """Whether the device may divide keys of chunks of these lengths, in tiles of ``tokens`` tokens. ``kv_lens`` may be
    larger than those of the device: then it divides others, or none."""
    contexts = [ceil_div(min(n, (window or NO_WINDOW) + tokens), KEYS) for n in kv_lens]
    work = sum(ceil_div(n, tokens) * context for n, context in zip(query_lens, contexts, strict=True))
    return any(
        context >= LEAST_CONTEXT and context * room > work and kv_len - query_len >= KEYS
        for query_len, kv_len, context in zip(query_lens, kv_lens, contexts, strict=True)
    )


@triton.jit
def _count_splits(context, most, each):
    return tl.minimum(tl.maximum((context + each - 1) // each, 1), most)


@triton.jit
def _count_taken(tiles, splits, total, room):
    """Entries that must find room: those with several splits, and all of them if all can run at once."""
    return tl.sum(tl.where((splits > 1) | (total <= room), tiles * splits, 0), axis=0)


@triton.jit(
    do_not_specialize=["first", "num_requests", "capacity", "tokens", "least", "window", "room"],
    do_not_specialize_on_alignment=["query_start_ptr", "kv_lens_ptr"],
)
def _plan_splits_kernel(
    query_start_ptr, kv_lens_ptr, blocks_ptr, first, num_requests, capacity, tokens, least, window, room,
    KEYS: tl.constexpr, LEAST_BLOCKS: tl.constexpr, LEAST_CONTEXT: tl.constexpr, MOST_SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """As `_plan_prefill_kernel`, but of requests with ``least`` tokens or more, and ``blocks`` [capacity + 1, 4] int32
    are ``(request, first token of the block, split, number of splits)``. Those with several splits come first, those of
    a tile side by side. The last entry: three zeros, and the number of entries with several splits."""
    request = tl.program_id(0)
    # every program does this for all requests, as in `_plan_prefill_kernel`
    other = tl.arange(0, BLOCK_R)
    known = other < num_requests
    begin = tl.load(query_start_ptr + first + other, mask=known, other=0)
    query_lens = tl.load(query_start_ptr + first + other + 1, mask=known, other=0) - begin
    kv_lens = tl.load(kv_lens_ptr + first + other, mask=known, other=0)
    tiles = tl.where(query_lens >= least, (query_lens + tokens - 1) // tokens, 0)
    # blocks of the longest tile, and what any tile of the request has at least
    context = (tl.minimum(kv_lens, window + tokens) + KEYS - 1) // KEYS
    most = (tl.minimum(kv_lens - query_lens + 1, window) + KEYS - 1) // KEYS
    most = tl.where(context >= LEAST_CONTEXT, tl.minimum(tl.maximum(most, 1), MOST_SPLITS), 1)
    total = tl.sum(tiles, axis=0)
    each = tl.maximum((tl.sum(tiles * context, axis=0) + room - 1) // room, LEAST_BLOCKS)
    splits = _count_splits(context, most, each)
    # Rounding up may need more room than there is: lengthen splits by an eighth until they fit. That ends where none is
    # left.
    while _count_taken(tiles, splits, total, room) > room:
        each += (each + 7) // 8
        splits = _count_splits(context, most, each)
    divided = tl.where(splits > 1, tiles * splits, 0)
    whole = tl.where(splits > 1, 0, tiles)
    num_divided = tl.sum(divided, axis=0)
    if request == num_requests:
        for i in range(num_divided + tl.sum(whole, axis=0), capacity):
            tl.store(blocks_ptr + 4 * i, -1)
        for i in range(3):
            tl.store(blocks_ptr + 4 * capacity + i, 0)
        tl.store(blocks_ptr + 4 * capacity + 3, num_divided)
    else:
        count = tl.sum(tl.where(other == request, tiles, 0), axis=0)
        each_splits = tl.sum(tl.where(other == request, splits, 0), axis=0)
        base = tl.sum(tl.where(other < request, divided, 0), axis=0)
        if each_splits == 1:
            base = num_divided + tl.sum(tl.where(other < request, whole, 0), axis=0)
        split = tl.arange(0, MOST_SPLITS)
        is_there = split < each_splits
        for i in range(count):
            entry = blocks_ptr + 4 * (base + i * each_splits + split)
            tl.store(entry, first + request, mask=is_there)
            tl.store(entry + 1, (count - 1 - i) * tokens, mask=is_there)
            tl.store(entry + 2, split, mask=is_there)
            tl.store(entry + 3, each_splits, mask=is_there)


def deal_splits(
    query_start: torch.Tensor, num_blocks: int, first: int, num_requests: int, tokens: int, *, least: int,
    splitting: Splitting,
) -> torch.Tensor:
    """Entries of `_plan_splits_kernel` for requests ``first`` and later, that have ``num_blocks`` tiles at most."""
    room = splitting.workspace.room
    capacity = num_blocks + room
    entries = torch.empty((capacity + 1, 4), dtype=torch.int32, device=query_start.device)
    # BLOCK_R at least 1024: nearly every step then uses the same compiled kernel
    _plan_splits_kernel[(num_requests + 1,)](
        query_start, splitting.kv_lens, entries, first, num_requests, capacity, tokens, least,
        splitting.window or NO_WINDOW, room, KEYS=KEYS, LEAST_BLOCKS=LEAST_BLOCKS, LEAST_CONTEXT=LEAST_CONTEXT,
        MOST_SPLITS=MOST_SPLITS, BLOCK_R=max(1024, next_power_of_2(num_requests)), num_warps=4,
    )
    return entries

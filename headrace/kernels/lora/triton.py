"""Low-rank additions on a GPU in two launches for all parts and adapters, whatever their ranks: *shrink* multiplies
rows with ``a``, *expand* the result with ``b`` and adds it to the output.

A program has a block of rows of one adapter, so grids depend on numbers that the host knows when a step is captured;
programs of unused blocks, and of ranks beyond an adapter's, end at once. Letters as in the package; K inputs, N
outputs, M rows of a block. Partial sums of shrink (split-K) are added up by expand in a fixed order.
"""

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous
from headrace.kernels.lora import BLOCK_ROWS, TILE_OUTPUTS, LowRankBank, SlotRows

RANK_CHUNK = 16
"""Ranks that a program of shrink computes, and that expand adds at a time."""
SPLIT_INPUTS = 512
"""Inputs of a partial sum: a program reads its part of ``a`` at once, before the kernel in front of it has ended."""
MOST_SPLITS = 16
"""More inputs than so many parts are divided into longer ones."""

# Hazard: with dependent launch, what is read before `wait_for_previous` must not come from the kernel in front. Blocks,
# order, ranks and additions are written when a step begins; several kernels lie between.


@triton.jit
def _shrink_kernel(
    x_ptr, a_ptr, ranks_ptr, order_ptr, blocks_ptr, sums_ptr, x_stride, num_blocks, num_places,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, M: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):
    block, chunk, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    chunks: tl.constexpr = R // RANKS
    part, first_rank = chunk // chunks, (chunk % chunks) * RANKS
    slot, first = tl.load(blocks_ptr + block), tl.load(blocks_ptr + num_blocks + block)
    count = tl.load(blocks_ptr + 2 * num_blocks + block)
    rank = tl.load(ranks_ptr + slot * P + part)
    m, r, k = tl.arange(0, M), tl.arange(0, RANKS), split * (INPUTS * PARTS) + tl.arange(0, INPUTS)
    is_used = (count > 0) & (first_rank < rank)
    rows = tl.load(order_ptr + first + m, mask=m < count, other=0)
    # int64 by slot: all adapters together may have more than 2**31 numbers
    a_row = a_ptr + ((slot * P + part) * R + first_rank + r)[None, :] * K
    a = tl.load(a_row + k[:, None], mask=((k < K) & is_used)[:, None], other=0.0)
    wait_for_previous(PDL)
    if is_used:
        x_row = x_ptr + rows[:, None] * x_stride
        x = tl.load(x_row + k[None, :], mask=(m < count)[:, None] & (k < K)[None, :], other=0.0)
        sums = tl.dot(x, a, input_precision=PRECISION)
        for _ in tl.static_range(1, PARTS):
            k += INPUTS
            a = tl.load(a_row + k[:, None], mask=(k < K)[:, None], other=0.0)
            x = tl.load(x_row + k[None, :], mask=(m < count)[:, None] & (k < K)[None, :], other=0.0)
            sums = tl.dot(x, a, sums, input_precision=PRECISION)
        places = (split * num_places + first + m) * (P * R) + part * R + first_rank
        tl.store(sums_ptr + places[:, None] + r[None, :], sums, mask=(m < count)[:, None])


@triton.jit
def _expand_kernel(
    sums_ptr, b_ptr, ranks_ptr, order_ptr, blocks_ptr, tiles_ptr, out_ptr, out_stride, num_blocks, num_places,
    num_tiles, N: tl.constexpr, P: tl.constexpr, R: tl.constexpr, M: tl.constexpr, RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr, SPLITS: tl.constexpr, ROOM: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):
    block, tile = tl.program_id(0), tl.program_id(1)
    slot, first = tl.load(blocks_ptr + block), tl.load(blocks_ptr + num_blocks + block)
    count = tl.load(blocks_ptr + 2 * num_blocks + block)
    part, begin = tl.load(tiles_ptr + tile), tl.load(tiles_ptr + num_tiles + tile)
    end = tl.load(tiles_ptr + 2 * num_tiles + tile)
    rank = tl.load(ranks_ptr + slot * P + part)
    rank = tl.where(count > 0, rank, 0)
    m, r, n = tl.arange(0, M), tl.arange(0, RANKS), begin + tl.arange(0, OUTPUTS)
    rows = tl.load(order_ptr + first + m, mask=m < count, other=0)
    b_row = b_ptr + (slot * R + r)[:, None] * N + n[None, :]
    b = tl.load(b_row, mask=((n < end) & (rank > 0))[None, :], other=0.0)
    wait_for_previous(PDL)
    if rank > 0:
        # [ROOM, M, RANKS]: all partial sums at once, so that their loads overlap
        splits = tl.arange(0, ROOM)[:, None, None]
        at = sums_ptr + (splits * num_places + (first + m)[None, :, None]) * (P * R) + part * R + r[None, None, :]
        mask = (splits < SPLITS) & (m < count)[None, :, None]
        own = out_ptr + rows[:, None] * out_stride + n[None, :]
        own_mask = (m < count)[:, None] & (n < end)[None, :]
        before = tl.load(own, mask=own_mask, other=0.0)
        reduced = tl.sum(tl.load(at, mask=mask, other=0.0), axis=0)
        added = tl.dot(reduced.to(b.dtype), b, input_precision=PRECISION)
        for first_rank in range(RANKS, rank, RANKS):
            reduced = tl.sum(tl.load(at + first_rank, mask=mask, other=0.0), axis=0)
            b = tl.load(b_row + first_rank * N, mask=(n < end)[None, :], other=0.0)
            added = tl.dot(reduced.to(b.dtype), b, added, input_precision=PRECISION)
        tl.store(own, (before.to(tl.float32) + added).to(before.dtype), mask=own_mask)


def add_low_rank(x: torch.Tensor, out: torch.Tensor, bank: LowRankBank, rows: SlotRows) -> None:
    """See `ADD_LOW_RANK`."""
    _launch(x, out, bank, rows, pdl=False)


def add_low_rank_pdl(x: torch.Tensor, out: torch.Tensor, bank: LowRankBank, rows: SlotRows) -> None:
    """The same with dependent launch."""
    _launch(x, out, bank, rows, pdl=True)


def _launch(x: torch.Tensor, out: torch.Tensor, bank: LowRankBank, rows: SlotRows, *, pdl: bool) -> None:
    _, num_parts, most_ranks, num_inputs = bank.a.shape
    num_blocks, num_places, num_outputs = rows.blocks.shape[1], len(rows.order), bank.b.shape[2]
    chunks = most_ranks // RANK_CHUNK
    parts = ceil_div(num_inputs, SPLIT_INPUTS * MOST_SPLITS)  # of a partial sum, read one after the other
    splits = ceil_div(num_inputs, SPLIT_INPUTS * parts)
    sums = torch.empty((splits, num_places, num_parts * most_ranks), dtype=torch.float32, device=x.device)
    precision = "ieee" if bank.a.dtype == torch.float32 else "tf32"
    x = x if x.dtype == bank.a.dtype else x.to(bank.a.dtype)
    options = {"launch_pdl": True} if pdl else {}
    _shrink_kernel[(num_blocks, num_parts * chunks, splits)](
        x, bank.a, bank.ranks, rows.order, rows.blocks, sums, x.stride(0), num_blocks, num_places,
        K=num_inputs, P=num_parts, R=most_ranks, M=BLOCK_ROWS, RANKS=RANK_CHUNK, INPUTS=SPLIT_INPUTS, PARTS=parts,
        PRECISION=precision, PDL=pdl, num_warps=4, **options,
    )
    num_tiles = bank.tiles.shape[1]
    _expand_kernel[(num_blocks, num_tiles)](
        sums, bank.b, bank.ranks, rows.order, rows.blocks, bank.tiles, out, out.stride(0), num_blocks, num_places,
        num_tiles, N=num_outputs, P=num_parts, R=most_ranks, M=BLOCK_ROWS, RANKS=RANK_CHUNK, OUTPUTS=TILE_OUTPUTS,
        SPLITS=splits, ROOM=next_power_of_2(splits), PRECISION=precision, PDL=pdl, num_warps=4, **options,
    )

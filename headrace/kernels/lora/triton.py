"""Low-rank additions on a GPU in two launches for all parts and adapters, whatever their ranks: *shrink* multiplies
rows with ``a``, *expand* the result with ``b`` and adds it to the output.

A program has a block of rows of one adapter, so grids depend on numbers that the host knows when a step is captured;
programs of unused blocks, and of ranks beyond an adapter's, end at once. Letters as in the package; K inputs, N
outputs, M rows of a block. Partial sums of shrink (split-K) are added up by expand in a fixed order.
"""

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div, wait_for_previous
from headrace.kernels.lora import BLOCK_ROWS, TILE_OUTPUTS, LowRankBank, SlotRows

RANK_CHUNK = 16
"""Ranks that a program of shrink computes, and that expand adds at a time."""
INPUT_CHUNK = 256
LEAST_SPLIT = 512
"""Inputs of a partial sum at least."""
WANTED_PROGRAMS = 512
"""About four for each SM of an H200."""


@triton.jit
def _shrink_kernel(
    x_ptr, a_ptr, ranks_ptr, order_ptr, blocks_ptr, sums_ptr, x_stride, num_blocks, num_places, split_inputs,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, M: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    block, chunk, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    chunks: tl.constexpr = R // RANKS
    part, first_rank = chunk // chunks, (chunk % chunks) * RANKS
    slot, first = tl.load(blocks_ptr + block), tl.load(blocks_ptr + num_blocks + block)
    count = tl.load(blocks_ptr + 2 * num_blocks + block)
    if count == 0:
        return
    if first_rank >= tl.load(ranks_ptr + slot * P + part):
        return
    m, r, k = tl.arange(0, M), tl.arange(0, RANKS), tl.arange(0, INPUTS)
    rows = tl.load(order_ptr + first + m, mask=m < count, other=0)
    # int64 by slot: all adapters together may have more than 2**31 numbers
    a_row = a_ptr + ((slot * P + part) * R + first_rank + r)[None, :] * K
    sums = tl.zeros([M, RANKS], tl.float32)
    begin = split * split_inputs
    for at in range(begin, min(begin + split_inputs, K), INPUTS):
        inside = at + k < K
        x = tl.load(x_ptr + rows[:, None] * x_stride + (at + k)[None, :], mask=(m < count)[:, None] & inside[None, :],
                    other=0.0)
        a = tl.load(a_row + (at + k)[:, None], mask=inside[:, None], other=0.0)
        sums = tl.dot(x, a, sums, input_precision=PRECISION)
    places = (split * num_places + first + m) * (P * R) + part * R + first_rank
    tl.store(sums_ptr + places[:, None] + r[None, :], sums, mask=(m < count)[:, None])


@triton.jit
def _expand_kernel(
    sums_ptr, b_ptr, ranks_ptr, order_ptr, blocks_ptr, tiles_ptr, out_ptr, out_stride, num_blocks, num_places,
    num_tiles, num_splits, N: tl.constexpr, P: tl.constexpr, R: tl.constexpr, M: tl.constexpr, RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    block, tile = tl.program_id(0), tl.program_id(1)
    slot, first = tl.load(blocks_ptr + block), tl.load(blocks_ptr + num_blocks + block)
    count = tl.load(blocks_ptr + 2 * num_blocks + block)
    if count == 0:
        return
    part, begin = tl.load(tiles_ptr + tile), tl.load(tiles_ptr + num_tiles + tile)
    end = tl.load(tiles_ptr + 2 * num_tiles + tile)
    rank = tl.load(ranks_ptr + slot * P + part)
    if rank == 0:
        return
    m, r, n = tl.arange(0, M), tl.arange(0, RANKS), begin + tl.arange(0, OUTPUTS)
    rows = tl.load(order_ptr + first + m, mask=m < count, other=0)
    added = tl.zeros([M, OUTPUTS], tl.float32)
    for first_rank in range(0, rank, RANKS):
        places = (first + m) * (P * R) + part * R + first_rank
        reduced = tl.zeros([M, RANKS], tl.float32)
        for split in range(0, num_splits):
            at = sums_ptr + split * num_places * (P * R) + places[:, None] + r[None, :]
            reduced += tl.load(at, mask=(m < count)[:, None], other=0.0)
        b = tl.load(b_ptr + (slot * R + first_rank + r)[:, None] * N + n[None, :], mask=(n < end)[None, :], other=0.0)
        added = tl.dot(reduced.to(b.dtype), b, added, input_precision=PRECISION)
    own = out_ptr + rows[:, None] * out_stride + n[None, :]
    mask = (m < count)[:, None] & (n < end)[None, :]
    before = tl.load(own, mask=mask, other=0.0)
    tl.store(own, (before.to(tl.float32) + added).to(before.dtype), mask=mask)


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
    splits = max(1, min(WANTED_PROGRAMS // (num_blocks * num_parts), num_inputs // LEAST_SPLIT))
    split_inputs = ceil_div(ceil_div(num_inputs, splits), INPUT_CHUNK) * INPUT_CHUNK
    splits = ceil_div(num_inputs, split_inputs)
    sums = torch.empty((splits, num_places, num_parts * most_ranks), dtype=torch.float32, device=x.device)
    precision = "ieee" if bank.a.dtype == torch.float32 else "tf32"
    x = x if x.dtype == bank.a.dtype else x.to(bank.a.dtype)
    options = {"launch_pdl": True} if pdl else {}
    _shrink_kernel[(num_blocks, num_parts * chunks, splits)](
        x, bank.a, bank.ranks, rows.order, rows.blocks, sums, x.stride(0), num_blocks, num_places, split_inputs,
        K=num_inputs, P=num_parts, R=most_ranks, M=BLOCK_ROWS, RANKS=RANK_CHUNK, INPUTS=INPUT_CHUNK,
        PRECISION=precision, PDL=pdl, num_warps=4, num_stages=3, **options,
    )
    num_tiles = bank.tiles.shape[1]
    _expand_kernel[(num_blocks, num_tiles)](
        sums, bank.b, bank.ranks, rows.order, rows.blocks, bank.tiles, out, out.stride(0), num_blocks, num_places,
        num_tiles, splits, N=num_outputs, P=num_parts, R=most_ranks, M=BLOCK_ROWS, RANKS=RANK_CHUNK,
        OUTPUTS=TILE_OUTPUTS, PRECISION=precision, PDL=pdl, num_warps=4, **options,
    )

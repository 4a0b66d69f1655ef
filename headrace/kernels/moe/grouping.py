"""Pairs of token and expert in the order of experts, by one kernel: a program for each expert counts those before its
own. And each token's results added up.

T tokens, k choices, N pairs, X experts. Refuses: products; `find_tile` tells a program of one which pairs are its.
"""

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous

AT_ONCE = (1024, 4096)
"""Pairs at a time, of few and of many: two sizes are two kernels to compile."""


@triton.jit
def find_tile(ends_ptr, tile, X: tl.constexpr, BLOCK_X: tl.constexpr, ROWS: tl.constexpr):
    """``(expert, first row, one past the expert's last row)`` of a tile; each expert's rows fill tiles of their own.
    Expert X when there are fewer tiles."""
    at = tl.arange(0, BLOCK_X)
    end = tl.load(ends_ptr + at, mask=at < X, other=0)
    start = tl.load(ends_ptr + at - 1, mask=(at > 0) & (at < X), other=0)
    tiles = tl.where(at < X, (end - start + ROWS - 1) // ROWS, 0)
    expert = tl.sum(((tl.cumsum(tiles, 0) <= tile) & (at < X)).to(tl.int32), 0)
    tiles_before = tl.sum(tl.where(at < expert, tiles, 0), 0)
    first = tl.sum(tl.where(at == expert, start, 0), 0) + (tile - tiles_before) * ROWS
    return expert, first, tl.sum(tl.where(at == expert, end, 0), 0)


@triton.jit
def _load_chosen(ids_ptr, at, num_pairs, X: tl.constexpr):
    """Nobody as expert X, and what is behind the last pair as one more."""
    chosen = tl.load(ids_ptr + at, mask=at < num_pairs, other=X + 1).to(tl.int32)
    return tl.where(chosen < 0, X, chosen)


@triton.jit(do_not_specialize=["num_pairs"])
def _group_kernel(
    ids_ptr, order_ptr, place_ptr, ends_ptr, num_pairs, X: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """The last program, of expert X, takes the pairs of nobody."""
    wait_for_previous(PDL)
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    before, count = 0, 0
    for done in range(0, num_pairs, BLOCK):
        chosen = _load_chosen(ids_ptr, done + at, num_pairs, X)
        before += tl.sum((chosen < expert).to(tl.int32), 0)
        count += tl.sum((chosen == expert).to(tl.int32), 0)
    if expert < X:
        tl.store(ends_ptr + expert, before + count)
    if count > 0:
        for done in range(0, num_pairs, BLOCK):
            is_mine = _load_chosen(ids_ptr, done + at, num_pairs, X) == expert
            mine = is_mine.to(tl.int32)
            place = before + tl.cumsum(mine, 0) - 1
            tl.store(order_ptr + place, done + at, mask=is_mine)
            tl.store(place_ptr + done + at, place, mask=is_mine)
            before += tl.sum(mine, 0)


def group_pairs(
    ids: torch.Tensor, num_experts: int, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `GROUP_PAIRS`; ``ids`` contiguous."""
    pairs = ids.numel()
    order, place = (torch.empty(pairs, dtype=torch.int32, device=ids.device) for _ in range(2))
    ends = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    block = AT_ONCE[pairs > AT_ONCE[-1]]
    _group_kernel[(num_experts + 1,)](
        ids, order, place, ends, pairs, X=num_experts, BLOCK=block, PDL=pdl, num_warps=max(1, block // 512),
        launch_pdl=pdl
    )
    return order, place, ends


@triton.jit
def _sum_pairs_kernel(
    rows_ptr, place_ptr, weights_ptr, out_ptr, D: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        place = tl.load(place_ptr + token * TOP_K + choice).to(tl.int64)
        weight = tl.load(weights_ptr + token * TOP_K + choice)
        total += weight * tl.load(rows_ptr + place * D + column, mask=column < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * D + column, total.to(out_ptr.dtype.element_ty), mask=column < D)


def sum_pairs(rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """See `SUM_PAIRS`."""
    (num_tokens, top_k), width = weights.shape, rows.shape[1]
    out = torch.empty((num_tokens, width), dtype=rows.dtype, device=rows.device)
    if num_tokens:
        block = min(2048, next_power_of_2(width))
        _sum_pairs_kernel[(num_tokens, ceil_div(width, block))](
            rows, place, weights, out, D=width, TOP_K=top_k, BLOCK=block, PDL=pdl, num_warps=max(1, block // 512),
            launch_pdl=pdl
        )
    return out

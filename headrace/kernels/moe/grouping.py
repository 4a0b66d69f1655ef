"""Pairs of token and expert in the order of experts, by one kernel: a program for each expert counts those before its own.

N pairs, X experts. Refuses: products; `find_tile` tells a program of one which pairs are its.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import next_power_of_2, wait_for_previous

MOST_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Groups:
    """``order`` [N] int32: the pairs, sorted by expert and else as they come; ``place`` [N] int32: where each pair is in it;
    ``ends`` [X] int32, one past each expert's last. Pairs of nobody are in neither: their places are open."""

    order: torch.Tensor
    place: torch.Tensor
    ends: torch.Tensor


@triton.jit
def find_tile(ends_ptr, tile, X: tl.constexpr, BLOCK_X: tl.constexpr, ROWS: tl.constexpr):
    """``(expert, first row, one past the expert's last row)`` of a tile; each expert's rows fill tiles of their own. Expert X
    when there are fewer tiles."""
    at = tl.arange(0, BLOCK_X)
    end = tl.load(ends_ptr + at, mask=at < X, other=0)
    start = tl.load(ends_ptr + at - 1, mask=(at > 0) & (at < X), other=0)
    tiles = tl.where(at < X, (end - start + ROWS - 1) // ROWS, 0)
    expert = tl.sum(((tl.cumsum(tiles, 0) <= tile) & (at < X)).to(tl.int32), 0)
    tiles_before = tl.sum(tl.where(at < expert, tiles, 0), 0)
    first = tl.sum(tl.where(at == expert, start, 0), 0) + (tile - tiles_before) * ROWS
    return expert, first, tl.sum(tl.where(at == expert, end, 0), 0)


@triton.jit(do_not_specialize=["num_pairs"])
def _group_kernel(ids_ptr, order_ptr, place_ptr, ends_ptr, num_pairs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    before, count = 0, 0
    for done in range(0, num_pairs, BLOCK):
        chosen = tl.load(ids_ptr + done + at, mask=done + at < num_pairs, other=-1).to(tl.int32)
        before += tl.sum(((chosen >= 0) & (chosen < expert)).to(tl.int32), 0)
        count += tl.sum((chosen == expert).to(tl.int32), 0)
    tl.store(ends_ptr + expert, before + count)
    if count > 0:
        for done in range(0, num_pairs, BLOCK):
            is_mine = tl.load(ids_ptr + done + at, mask=done + at < num_pairs, other=-1).to(tl.int32) == expert
            mine = is_mine.to(tl.int32)
            place = before + tl.cumsum(mine, 0) - 1
            tl.store(order_ptr + place, done + at, mask=is_mine)
            tl.store(place_ptr + done + at, place, mask=is_mine)
            before += tl.sum(mine, 0)


def group_pairs(ids: torch.Tensor, num_experts: int, *, pdl: bool = False) -> Groups:
    """Of ``ids`` [T, k], contiguous; -1 is nobody."""
    pairs = ids.numel()
    order, place = torch.empty((2, pairs), dtype=torch.int32, device=ids.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    block = min(MOST_AT_ONCE, max(128, next_power_of_2(pairs)))
    _group_kernel[(num_experts,)](ids, order, place, ends, pairs, BLOCK=block, PDL=pdl, num_warps=max(1, min(8, block // 512)), launch_pdl=pdl)
    return Groups(order, place, ends)

"""Attention to plain rows at slots of each token's own, in Triton: DeepSeek-V3.2's latents, whose first V dims are the
value and whose last R are the rotated part of the key. Few tokens' slots are split among programs.

T tokens, H heads, K splits.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from headrace.kernels.latents.triton import slot_arguments
from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous
from headrace.kernels.sparse_attention import SeenSlots
from headrace.kernels.sparse_attention.triton import LOG2_E, MOST_SPLITS, PROGRAMS, choose_combined

HEADS, SLOTS, STAGES = 64, 32, 2
"""Of a program: heads, slots that it reads at a time, blocks of slots on their way."""


@triton.jit(do_not_specialize=["width", "num_splits"])
def _rows_kernel(
    q_ptr, rows_ptr, numbers_ptr, counts_ptr, owners_ptr, sums_ptr, stats_ptr, width, scale, num_splits,
    H: tl.constexpr, HEADS: tl.constexpr, V: tl.constexpr, R: tl.constexpr, S: tl.constexpr, PAGE: tl.constexpr,
    SLOT: tl.constexpr, HAS_OWNERS: tl.constexpr, IS_SPLIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    D: tl.constexpr = V // 2
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head, dim, turned = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, D), tl.arange(0, R)
    is_head = head < H
    wait_for_previous(PDL)
    own = q_ptr + (token * H + head)[:, None] * (V + R)
    q_first = tl.load(own + dim[None, :], mask=is_head[:, None] & (dim >= 0)[None, :], other=0.0)
    q_last = tl.load(own + D + dim[None, :], mask=is_head[:, None] & (dim >= 0)[None, :], other=0.0)
    q_turned = tl.load(own + V + turned[None, :], mask=is_head[:, None] & (turned >= 0)[None, :], other=0.0)
    most = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sum_first, sum_last = tl.zeros([HEADS, D], tl.float32), tl.zeros([HEADS, D], tl.float32)
    row = tl.load(owners_ptr + token) if HAS_OWNERS else token
    count = tl.minimum(tl.load(counts_ptr + token), width).to(tl.int32)
    for first in range(split * BLOCK, count, num_splits * BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_inside = at < count
        number = tl.load(numbers_ptr + row * width + at, mask=is_inside, other=0)
        start = rows_ptr + (number // S * PAGE + number % S * SLOT)[:, None]
        both = is_inside[:, None] & (dim >= 0)[None, :]
        kv_first = tl.load(start + dim[None, :], mask=both, other=0.0).to(q_first.dtype)
        kv_last = tl.load(start + D + dim[None, :], mask=both, other=0.0).to(q_first.dtype)
        key = tl.load(
            start + V + turned[None, :], mask=is_inside[:, None] & (turned >= 0)[None, :], other=0.0
        ).to(q_first.dtype)
        logits = tl.dot(q_first, tl.trans(kv_first), input_precision="ieee")
        logits = tl.dot(q_last, tl.trans(kv_last), logits, input_precision="ieee")
        logits = tl.dot(q_turned, tl.trans(key), logits, input_precision="ieee") * (scale * LOG2_E)
        logits = tl.where(is_inside[None, :], logits, -float("inf"))
        higher = tl.maximum(most, tl.max(logits, axis=1))
        weight = tl.exp2(logits - higher[:, None])
        shrink = tl.exp2(most - higher)
        total = total * shrink + tl.sum(weight, axis=1)
        weight = weight.to(q_first.dtype)
        sum_first = tl.dot(weight, kv_first, sum_first * shrink[:, None], input_precision="ieee")
        sum_last = tl.dot(weight, kv_last, sum_last * shrink[:, None], input_precision="ieee")
        most = higher
    place = (token * num_splits + split) * H + head
    if not IS_SPLIT:
        sum_first, sum_last = sum_first / total[:, None], sum_last / total[:, None]
    else:
        tl.store(stats_ptr + place * 2, most, mask=is_head)
        tl.store(stats_ptr + place * 2 + 1, total, mask=is_head)
    into = sums_ptr + place[:, None] * V + dim[None, :]
    tl.store(into, sum_first.to(sums_ptr.dtype.element_ty), mask=is_head[:, None] & (dim >= 0)[None, :])
    tl.store(into + D, sum_last.to(sums_ptr.dtype.element_ty), mask=is_head[:, None] & (dim >= 0)[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def _add_splits_kernel(
    sums_ptr, stats_ptr, out_ptr, num_splits, H: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # one program a token and head
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, dim = tl.arange(0, BLOCK_K), tl.arange(0, V)
    wait_for_previous(PDL)
    place = (token * num_splits + split) * H + head
    most = tl.load(stats_ptr + place * 2, mask=split < num_splits, other=-float("inf"))
    total = tl.load(stats_ptr + place * 2 + 1, mask=split < num_splits, other=0.0)
    weight = tl.exp2(most - tl.max(most, axis=0))
    is_read = ((split < num_splits) & (total > 0))[:, None] & (dim >= 0)[None, :]
    sums = tl.load(sums_ptr + place[:, None] * V + dim[None, :], mask=is_read, other=0.0)
    mixed = tl.sum(sums * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    tl.store(out_ptr + (token * H + head) * V + dim, mixed.to(out_ptr.dtype.element_ty))


def attend_rows(
    q: torch.Tensor, seen: SeenSlots, *, value_dim: int, scale: float, pdl: bool = False
) -> torch.Tensor:
    """See `ATTEND_ROWS`."""
    num_tokens, num_heads, row_dim = q.shape
    out = q.new_empty((num_tokens, num_heads, value_dim))
    if not num_tokens:
        return out
    place, width = slot_arguments(seen.slots), seen.numbers.shape[1]
    assert seen.numbers.is_contiguous() and seen.slots.values.stride(2) == 1
    heads = min(HEADS, max(16, next_power_of_2(num_heads)))
    blocks = ceil_div(num_heads, heads)
    splits = max(1, min(ceil_div(width, SLOTS), MOST_SPLITS, PROGRAMS // (num_tokens * blocks)))
    sums = stats = out
    if splits > 1:
        sums = torch.empty((num_tokens, splits, num_heads, value_dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((num_tokens, splits, num_heads, 2), dtype=torch.float32, device=q.device)
    _rows_kernel[(num_tokens, blocks, splits)](
        q.contiguous(), place["codes_ptr"], seen.numbers, seen.counts,
        seen.counts if seen.rows is None else seen.rows, sums, stats, width, scale, splits, H=num_heads, HEADS=heads,
        V=value_dim, R=row_dim - value_dim, S=place["S"], PAGE=place["PAGE"], SLOT=place["SLOT"],
        HAS_OWNERS=seen.rows is not None, IS_SPLIT=splits > 1, BLOCK=SLOTS, PDL=pdl, num_warps=8, num_stages=STAGES,
        launch_pdl=pdl,
    )
    if splits > 1:
        _add_splits_kernel[(num_tokens, num_heads)](
            sums, stats, out, splits, H=num_heads, V=value_dim, BLOCK_K=choose_combined(splits), PDL=pdl, num_warps=4,
            launch_pdl=pdl,
        )
    return out


attend_rows_pdl = partial(attend_rows, pdl=True)

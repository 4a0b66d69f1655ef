"""Sparse latent attention in Triton. A program has one token and up to `HEADS` heads, whose queries and sums stay on
the multiprocessor while latents are read slot by slot and unpacked; few tokens' slots are split among programs, whose
sums a second kernel adds up.

T tokens, H heads, E head dim of which the last R are rotated, K splits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from headrace.kernels.latents import GROUP
from headrace.kernels.latents.triton import slot_arguments
from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous
from headrace.kernels.sparse_attention import Queries, SeenSlots

HEADS = 64
SLOTS = 64
"""Slots that a program reads at a time."""
STAGES = 2
"""Blocks of slots that are on their way at a time."""
PROGRAMS = 132
"""Programs that fill a large GPU; more splits only add sums."""
FEW_SPLITS, MOST_SPLITS = 8, 32
"""A program of `_combine_kernel` holds one head's sums of all splits in registers."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_half(
    codes_ptr, wide_ptr, scales_ptr, number, is_inside, E: tl.constexpr, S: tl.constexpr, PAGE: tl.constexpr,
    SLOT: tl.constexpr, HOW: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr, HALF: tl.constexpr,
):
    """The first (HALF 0) or last (1) E / 2 dims of latents at slots ``number`` [n] int64: [n, E / 2] in DTYPE; zero
    where not ``is_inside``."""
    page, at = number // S, number % S
    start = page * PAGE + at * SLOT
    if HOW == 0:
        dim = HALF * (E // 2) + tl.arange(0, E // 2)
        kv = tl.load(
            codes_ptr + start[:, None] + dim[None, :], mask=is_inside[:, None] & (dim >= 0)[None, :], other=0.0
        ).to(DTYPE)
    else:
        # groups of dims; the last is the rotated one, in bfloat16 behind the codes
        LAST: tl.constexpr = E // GROUP - 1
        COUNT: tl.constexpr = E // GROUP // 2
        group, inner = HALF * COUNT + tl.arange(0, COUNT), tl.arange(0, GROUP)
        is_plain = is_inside[:, None] & (group < LAST)[None, :]  # [n, groups]
        codes = tl.load(
            codes_ptr + start[:, None, None] + (group * GROUP)[None, :, None] + inner[None, None, :],
            mask=is_plain[:, :, None] & (inner >= 0)[None, None, :], other=0.0,
        )
        scale = tl.load(scales_ptr + (page * PAGE + at * 8)[:, None] + group[None, :], mask=is_plain, other=127)
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)  # an e8m0 byte is float32's exponent field
        kv = codes.to(DTYPE) * scale.to(DTYPE)[:, :, None]  # a code times a power of two is exact in 16 bits
        if HALF == 1:
            is_turned = is_inside[:, None] & (group == LAST)[None, :]
            turned = tl.load(
                wide_ptr + (start // 2 + LAST * GROUP // 2)[:, None, None] + (group * 0)[None, :, None]
                + inner[None, None, :],
                mask=is_turned[:, :, None] & (inner >= 0)[None, None, :], other=0.0,
            )
            kv += turned.to(DTYPE)
        kv = tl.reshape(kv, [number.shape[0], E // 2])
    return kv


@triton.jit
def _add_block(
    q_first, q_last, sum_first, sum_last, most, total, number, is_inside, scale, codes_ptr, wide_ptr, scales_ptr,
    E: tl.constexpr, S: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr, HOW: tl.constexpr, GROUP: tl.constexpr,
):
    """The latents at one block of slots into the running sums [heads, E / 2] of the first and the last dims, not yet
    divided by ``total`` [heads]; ``most`` [heads] is the highest logit so far, in units of log2."""
    DTYPE: tl.constexpr = q_first.dtype
    first = _load_half(
        codes_ptr, wide_ptr, scales_ptr, number, is_inside, E, S, PAGE, SLOT, HOW, GROUP, DTYPE, 0
    )
    logits = tl.dot(q_first, tl.trans(first), input_precision="ieee")
    last = _load_half(codes_ptr, wide_ptr, scales_ptr, number, is_inside, E, S, PAGE, SLOT, HOW, GROUP, DTYPE, 1)
    logits = tl.dot(q_last, tl.trans(last), logits, input_precision="ieee") * scale
    logits = tl.where(is_inside[None, :], logits, -float("inf"))
    higher = tl.maximum(most, tl.max(logits, axis=1))
    weight = tl.exp2(logits - higher[:, None])
    shrink = tl.exp2(most - higher)
    total = total * shrink + tl.sum(weight, axis=1)
    weight = weight.to(DTYPE)
    sum_first = tl.dot(weight, first, sum_first * shrink[:, None], input_precision="ieee")
    sum_last = tl.dot(weight, last, sum_last * shrink[:, None], input_precision="ieee")
    return sum_first, sum_last, higher, total


@triton.jit
def _turn(x, cos_sin_ptr, position, D: tl.constexpr, R: tl.constexpr, SIGN: tl.constexpr):
    """Rotate the last R of D dims of ``x`` [heads, D] by the angles at ``position``, backwards with SIGN -1."""
    pair = tl.arange(0, D // 2)
    even, odd = tl.split(tl.reshape(x, [x.shape[0], D // 2, 2]))
    turn = pair - (D - R) // 2  # pairs before the rotated ones turn by no angle
    cos = tl.load(cos_sin_ptr + position * R + turn, mask=turn >= 0, other=1.0)[None, :]
    sin = tl.load(cos_sin_ptr + position * R + R // 2 + turn, mask=turn >= 0, other=0.0)[None, :] * SIGN
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), [x.shape[0], D])


@triton.jit(
    do_not_specialize=["num_splits", "window_width", "entries_width"],
    do_not_specialize_on_alignment=["positions_ptr"],  # of a chunk, behind any number of tokens
)
def _attend_kernel(
    q_ptr, positions_ptr, cos_sin_ptr, sinks_ptr, out_ptr, sums_ptr, stats_ptr, norm_eps, scale, num_splits,
    window_ptr, window_counts_ptr, window_width, codes_ptr, wide_ptr, scales_ptr,
    entries_ptr, entry_counts_ptr, entry_rows_ptr, entries_width, entry_codes_ptr, entry_wide_ptr, entry_scales_ptr,
    H: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    PAGE: tl.constexpr, SLOT: tl.constexpr, HOW: tl.constexpr, ENTRY_S: tl.constexpr, ENTRY_PAGE: tl.constexpr,
    ENTRY_SLOT: tl.constexpr, HAS_ENTRIES: tl.constexpr, HAS_ENTRY_ROWS: tl.constexpr, GROUP: tl.constexpr,
    IS_SPLIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    D: tl.constexpr = E // 2  # dims of a half; the rotated ones are in the last
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head, dim = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, D)
    is_head = head < H
    own = (token * H + head)[:, None] * E + dim[None, :]
    own_mask = is_head[:, None] & (dim >= 0)[None, :]
    wait_for_previous(PDL)
    position = tl.load(positions_ptr + token)
    q_first = tl.load(q_ptr + own, mask=own_mask, other=0.0).to(tl.float32)
    q_last = tl.load(q_ptr + own + D, mask=own_mask, other=0.0).to(tl.float32)
    square = tl.sum(q_first * q_first, axis=1) + tl.sum(q_last * q_last, axis=1)
    rstd = tl.rsqrt(square / E + norm_eps)[:, None]
    q_first = (q_first * rstd).to(q_ptr.dtype.element_ty)
    q_last = _turn(q_last * rstd, cos_sin_ptr, position, D, R, 1).to(q_ptr.dtype.element_ty)

    most = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sum_first, sum_last = tl.zeros([HEADS, D], tl.float32), tl.zeros([HEADS, D], tl.float32)
    at = tl.arange(0, BLOCK)
    scale_log2 = scale * LOG2_E
    # blocks of window and entries in turns among the splits
    count = tl.minimum(tl.load(window_counts_ptr + token), window_width).to(tl.int32)
    for first in range(split * BLOCK, count, num_splits * BLOCK):
        is_inside = first + at < count
        number = tl.load(window_ptr + token * window_width + first + at, mask=is_inside, other=0)
        sum_first, sum_last, most, total = _add_block(
            q_first, q_last, sum_first, sum_last, most, total, number, is_inside, scale_log2, codes_ptr, wide_ptr,
            scales_ptr, E, S, PAGE, SLOT, HOW, GROUP,
        )
    if HAS_ENTRIES:
        row = tl.load(entry_rows_ptr + token) if HAS_ENTRY_ROWS else token
        entry_count = tl.minimum(tl.load(entry_counts_ptr + token), entries_width).to(tl.int32)
        # this split's first block behind the window's
        ahead = (count + BLOCK - 1) // BLOCK
        begin = (split + num_splits - ahead % num_splits) % num_splits
        for first in range(begin * BLOCK, entry_count, num_splits * BLOCK):
            is_inside = first + at < entry_count
            number = tl.load(entries_ptr + row * entries_width + first + at, mask=is_inside, other=0)
            sum_first, sum_last, most, total = _add_block(
                q_first, q_last, sum_first, sum_last, most, total, number, is_inside, scale_log2, entry_codes_ptr,
                entry_wide_ptr, entry_scales_ptr, E, ENTRY_S, ENTRY_PAGE, ENTRY_SLOT, HOW, GROUP,
            )
    if not IS_SPLIT:
        total += tl.exp2(tl.load(sinks_ptr + head, mask=is_head, other=0.0) * LOG2_E - most)
        share = (1.0 / total)[:, None]
        tl.store(out_ptr + own, (sum_first * share).to(out_ptr.dtype.element_ty), mask=own_mask)
        sum_last = _turn(sum_last * share, cos_sin_ptr, position, D, R, -1)
        tl.store(out_ptr + own + D, sum_last.to(out_ptr.dtype.element_ty), mask=own_mask)
    else:
        place = (token * num_splits + split) * H + head
        tl.store(sums_ptr + place[:, None] * E + dim[None, :], sum_first, mask=own_mask)
        tl.store(sums_ptr + place[:, None] * E + D + dim[None, :], sum_last, mask=own_mask)
        tl.store(stats_ptr + place * 2, most, mask=is_head)
        tl.store(stats_ptr + place * 2 + 1, total, mask=is_head)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["positions_ptr"])
def _combine_kernel(
    sums_ptr, stats_ptr, positions_ptr, cos_sin_ptr, sinks_ptr, out_ptr, num_splits, H: tl.constexpr, E: tl.constexpr,
    R: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):
    # one program a token and head
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, dim, pair = tl.arange(0, BLOCK_K), tl.arange(0, E), tl.arange(0, E // 2)
    is_split = split < num_splits
    wait_for_previous(PDL)
    place = (token * num_splits + split) * H + head
    most = tl.load(stats_ptr + place * 2, mask=is_split, other=-float("inf"))
    total = tl.load(stats_ptr + place * 2 + 1, mask=is_split, other=0.0)
    sink = tl.load(sinks_ptr + head) * LOG2_E
    highest = tl.maximum(tl.max(most, axis=0), sink)
    weight = tl.exp2(most - highest)  # 0 for a split without slots, whose sums may be undefined
    share = 1.0 / (tl.sum(total * weight, axis=0) + tl.exp2(sink - highest))
    is_read = (is_split & (total > 0))[:, None] & (dim >= 0)[None, :]
    sums = tl.load(sums_ptr + place[:, None] * E + dim[None, :], mask=is_read, other=0.0)
    even, odd = tl.split(tl.reshape(tl.sum(sums * weight[:, None], axis=0) * share, [E // 2, 2]))
    turn = pair - (E - R) // 2
    table = cos_sin_ptr + tl.load(positions_ptr + token) * R + turn
    cos = tl.load(table, mask=turn >= 0, other=1.0)
    sin = tl.load(table + R // 2, mask=turn >= 0, other=0.0)
    turned = tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), [E])
    tl.store(out_ptr + (token * H + head) * E + dim, turned.to(out_ptr.dtype.element_ty))


def _entry_arguments(window: SeenSlots, entries: SeenSlots | None) -> dict[str, Any]:
    """Kernel arguments of the entries; without any, the window stands in, and nothing is read."""
    seen = window if entries is None else entries
    places = slot_arguments(seen.slots)
    assert seen.numbers.is_contiguous()
    return {
        "entries_ptr": seen.numbers, "entry_counts_ptr": seen.counts,
        "entry_rows_ptr": seen.counts if seen.rows is None else seen.rows, "entries_width": seen.numbers.shape[1],
        "entry_codes_ptr": places["codes_ptr"], "entry_wide_ptr": places["wide_ptr"],
        "entry_scales_ptr": places["scales_ptr"], "ENTRY_S": places["S"], "ENTRY_PAGE": places["PAGE"],
        "ENTRY_SLOT": places["SLOT"], "HAS_ENTRIES": entries is not None, "HAS_ENTRY_ROWS": seen.rows is not None,
    }


def make_parts(q: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Room for what each split finds for ``q`` [T, H, E], float32: sums [T, K, H, E], not yet divided, and [T, K, H, 2]
    the highest logit, in units of log2, and the sum of weights relative to it; None for one split."""
    if splits == 1:
        return None
    shape = (q.shape[0], splits, q.shape[1])
    sums = torch.empty((*shape, q.shape[2]), dtype=torch.float32, device=q.device)
    return sums, torch.empty((*shape, 2), dtype=torch.float32, device=q.device)


def choose_combined(splits: int) -> int:
    """Splits whose sums a program holds: one of two numbers, so that steps of any size need no further compilation."""
    return FEW_SPLITS if splits <= FEW_SPLITS else MOST_SPLITS


def combine(
    parts: tuple[torch.Tensor, torch.Tensor], queries: Queries, sinks: torch.Tensor, out: torch.Tensor, *, pdl: bool
) -> None:
    """Add up what splits found, and rotate it back, into ``out`` [T, H, E]; see `make_parts`."""
    (sums, stats), (num_tokens, num_heads, head_dim) = parts, out.shape
    splits = sums.shape[1]
    _combine_kernel[(num_tokens, num_heads)](
        sums, stats, queries.positions, queries.cos_sin, sinks, out, splits, H=num_heads, E=head_dim,
        R=queries.cos_sin.shape[1], BLOCK_K=choose_combined(splits), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )


def attend_slots(
    queries: Queries, window: SeenSlots, entries: SeenSlots | None, *, sinks: torch.Tensor, scale: float,
    pdl: bool = False,
) -> torch.Tensor:
    """See `ATTEND_SLOTS`; ``window`` has a row for each token."""
    q, rotary_dim = queries.q, queries.cos_sin.shape[1]
    num_tokens, num_heads, head_dim = q.shape
    assert q.is_contiguous() and window.rows is None and window.numbers.is_contiguous()
    out = torch.empty_like(q)
    if not num_tokens:
        return out
    heads = min(HEADS, max(16, next_power_of_2(num_heads)))
    blocks = ceil_div(num_heads, heads)
    pieces = ceil_div(window.numbers.shape[1], SLOTS)
    pieces += 0 if entries is None else ceil_div(entries.numbers.shape[1], SLOTS)
    splits = max(1, min(pieces, MOST_SPLITS, PROGRAMS // (num_tokens * blocks)))
    parts = make_parts(q, splits)
    sums, stats = (q, q) if parts is None else parts  # q stands in
    _attend_kernel[(num_tokens, blocks, splits)](
        q, queries.positions, queries.cos_sin, sinks, out, sums, stats, queries.norm_eps, scale, splits,
        window.numbers, window.counts, window.numbers.shape[1], **slot_arguments(window.slots),
        **_entry_arguments(window, entries), H=num_heads, E=head_dim, R=rotary_dim, IS_SPLIT=splits > 1, HEADS=heads,
        GROUP=GROUP, BLOCK=SLOTS, PDL=pdl, num_warps=8, num_stages=STAGES, launch_pdl=pdl,
    )
    if parts is not None:
        combine(parts, queries, sinks, out, pdl=pdl)
    return out


attend_slots_pdl = partial(attend_slots, pdl=True)

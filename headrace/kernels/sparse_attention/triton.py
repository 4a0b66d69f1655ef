"""Sparse latent attention in Triton. A program has one token and up to `HEADS` heads, whose queries and sums stay on
the multiprocessor while latents are read slot by slot and unpacked; few tokens' slots are split among programs, whose
sums a second kernel adds up.

T tokens, H heads, E head dim: N plain dims in blocks of NB, and R rotated. K splits.
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
SLOTS = 32
"""Slots that a program reads at a time."""
PROGRAMS = 132
"""Programs that fill a large GPU; more splits only add sums."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_latents(
    codes_ptr, wide_ptr, scales_ptr, number, is_inside, N: tl.constexpr, NB: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr, HOW: tl.constexpr, GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Latents at slots ``number`` [n] int64: plain dims [n, NB], zero from N on, and rotated dims [n, R], in DTYPE;
    zero where not ``is_inside``."""
    page, at = number // S, number % S
    start = page * PAGE + at * SLOT
    inner = tl.arange(0, R)
    if HOW == 0:
        dim = tl.arange(0, NB)
        plain = tl.load(
            codes_ptr + start[:, None] + dim[None, :], mask=is_inside[:, None] & (dim < N)[None, :], other=0.0
        ).to(DTYPE)
        turned = tl.load(
            codes_ptr + (start + N)[:, None] + inner[None, :], mask=is_inside[:, None] & (inner < R)[None, :], other=0.0
        ).to(DTYPE)
    else:
        group, one = tl.arange(0, NB // GROUP), tl.arange(0, GROUP)
        is_group = is_inside[:, None] & (group < N // GROUP)[None, :]  # [n, groups]
        codes = tl.load(
            codes_ptr + start[:, None, None] + (group * GROUP)[None, :, None] + one[None, None, :],
            mask=is_group[:, :, None] & (one >= 0)[None, None, :], other=0.0,
        )
        scale = tl.load(scales_ptr + (page * PAGE + at * 8)[:, None] + group[None, :], mask=is_group, other=127)
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)  # an e8m0 byte is float32's exponent field
        plain = tl.reshape((codes.to(tl.float32) * scale[:, :, None]).to(DTYPE), [number.shape[0], NB])
        turned = tl.load(
            wide_ptr + (start // 2 + N // 2)[:, None] + inner[None, :], mask=is_inside[:, None] & (inner < R)[None, :],
            other=0.0,
        ).to(DTYPE)
    return plain, turned


@triton.jit
def _add_block(
    q_plain, q_turned, sum_plain, sum_turned, most, total, plain, turned, is_inside, scale
):
    """One block of latents into the running sums: [heads, NB] and [heads, R], not yet divided by ``total`` [heads];
    ``most`` [heads] is the highest logit so far, in units of log2."""
    logits = tl.dot(q_plain, tl.trans(plain), input_precision="ieee")
    logits = tl.dot(q_turned, tl.trans(turned), logits, input_precision="ieee") * scale
    logits = tl.where(is_inside[None, :], logits, -float("inf"))
    higher = tl.maximum(most, tl.max(logits, axis=1))
    weight = tl.exp2(logits - higher[:, None])
    shrink = tl.exp2(most - higher)
    total = total * shrink + tl.sum(weight, axis=1)
    weight = weight.to(plain.dtype)
    sum_plain = tl.dot(weight, plain, sum_plain * shrink[:, None], input_precision="ieee")
    sum_turned = tl.dot(weight, turned, sum_turned * shrink[:, None], input_precision="ieee")
    return sum_plain, sum_turned, higher, total


@triton.jit
def _turn_pairs(even, odd, cos_sin_ptr, position, R: tl.constexpr, SIGN: tl.constexpr):
    """Rotate pairs [heads, R / 2] by the angles at ``position``, backwards with SIGN -1."""
    pair = tl.arange(0, R // 2)
    cos = tl.load(cos_sin_ptr + position * R + pair)[None, :]
    sin = tl.load(cos_sin_ptr + position * R + R // 2 + pair)[None, :] * SIGN
    return even * cos - odd * sin, odd * cos + even * sin


@triton.jit
def _attend_kernel(
    q_ptr, positions_ptr, cos_sin_ptr, sinks_ptr, out_ptr, sums_ptr, stats_ptr, norm_eps, scale,
    window_ptr, window_counts_ptr, window_rows_ptr, window_width, codes_ptr, wide_ptr, scales_ptr,
    entries_ptr, entry_counts_ptr, entry_rows_ptr, entries_width, entry_codes_ptr, entry_wide_ptr, entry_scales_ptr,
    H: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr, NB: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    PAGE: tl.constexpr, SLOT: tl.constexpr, HOW: tl.constexpr, ENTRY_S: tl.constexpr, ENTRY_PAGE: tl.constexpr,
    ENTRY_SLOT: tl.constexpr, HAS_ENTRIES: tl.constexpr, HAS_ENTRY_ROWS: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    E: tl.constexpr = N + R
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < H
    dim, pair = tl.arange(0, NB), tl.arange(0, R // 2)
    wait_for_previous(PDL)
    row = q_ptr + (token * H + head)[:, None] * E
    position = tl.load(positions_ptr + token)
    plain_mask, pair_mask = is_head[:, None] & (dim < N)[None, :], is_head[:, None] & (pair >= 0)[None, :]
    q_plain = tl.load(row + dim[None, :], mask=plain_mask, other=0.0).to(tl.float32)
    even = tl.load(row + N + 2 * pair[None, :], mask=pair_mask, other=0.0).to(tl.float32)
    odd = tl.load(row + N + 2 * pair[None, :] + 1, mask=pair_mask, other=0.0).to(tl.float32)
    squares = tl.sum(q_plain * q_plain, axis=1) + tl.sum(even * even + odd * odd, axis=1)
    rstd = tl.rsqrt(squares / E + norm_eps)[:, None]
    even, odd = _turn_pairs(even * rstd, odd * rstd, cos_sin_ptr, position, R, 1)
    q_plain = (q_plain * rstd).to(q_ptr.dtype.element_ty)
    q_turned = tl.reshape(tl.join(even, odd), [HEADS, R]).to(q_ptr.dtype.element_ty)

    most = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sum_plain, sum_turned = tl.zeros([HEADS, NB], tl.float32), tl.zeros([HEADS, R], tl.float32)
    at = tl.arange(0, BLOCK)
    scale_log2 = scale * LOG2_E
    # blocks of window and entries in turns among the splits
    count = tl.minimum(tl.load(window_counts_ptr + token), window_width).to(tl.int32)
    for first in range(split * BLOCK, count, SPLITS * BLOCK):
        is_inside = first + at < count
        number = tl.load(window_ptr + token * window_width + first + at, mask=is_inside, other=0)
        plain, turned = _load_latents(
            codes_ptr, wide_ptr, scales_ptr, number, is_inside, N, NB, R, S, PAGE, SLOT, HOW, GROUP,
            q_ptr.dtype.element_ty,
        )
        sum_plain, sum_turned, most, total = _add_block(
            q_plain, q_turned, sum_plain, sum_turned, most, total, plain, turned, is_inside, scale_log2
        )
    if HAS_ENTRIES:
        own = tl.load(entry_rows_ptr + token) if HAS_ENTRY_ROWS else token
        entry_count = tl.minimum(tl.load(entry_counts_ptr + token), entries_width).to(tl.int32)
        # this split's first block behind the window's
        ahead = (count + BLOCK - 1) // BLOCK
        begin = (split + SPLITS - ahead % SPLITS) % SPLITS
        for first in range(begin * BLOCK, entry_count, SPLITS * BLOCK):
            is_inside = first + at < entry_count
            number = tl.load(entries_ptr + own * entries_width + first + at, mask=is_inside, other=0)
            plain, turned = _load_latents(
                entry_codes_ptr, entry_wide_ptr, entry_scales_ptr, number, is_inside, N, NB, R, ENTRY_S, ENTRY_PAGE,
                ENTRY_SLOT, HOW, GROUP, q_ptr.dtype.element_ty,
            )
            sum_plain, sum_turned, most, total = _add_block(
                q_plain, q_turned, sum_plain, sum_turned, most, total, plain, turned, is_inside, scale_log2
            )
    if SPLITS == 1:
        total += tl.exp2(tl.load(sinks_ptr + head, mask=is_head, other=0.0) * LOG2_E - most)
        share = (1.0 / total)[:, None]
        even, odd = tl.split(tl.reshape(sum_turned * share, [HEADS, R // 2, 2]))
        even, odd = _turn_pairs(even, odd, cos_sin_ptr, position, R, -1)
        into = out_ptr + (token * H + head)[:, None] * E
        tl.store(into + dim[None, :], (sum_plain * share).to(out_ptr.dtype.element_ty), mask=plain_mask)
        tl.store(into + N + 2 * pair[None, :], even.to(out_ptr.dtype.element_ty), mask=pair_mask)
        tl.store(into + N + 2 * pair[None, :] + 1, odd.to(out_ptr.dtype.element_ty), mask=pair_mask)
    else:
        place = (token * SPLITS + split) * H + head
        inner = tl.arange(0, R)
        tl.store(sums_ptr + place[:, None] * E + dim[None, :], sum_plain, mask=plain_mask)
        tl.store(
            sums_ptr + place[:, None] * E + N + inner[None, :], sum_turned, mask=is_head[:, None] & (inner < R)[None, :]
        )
        tl.store(stats_ptr + place * 2, most, mask=is_head)
        tl.store(stats_ptr + place * 2 + 1, total, mask=is_head)


@triton.jit
def _combine_kernel(
    sums_ptr, stats_ptr, positions_ptr, cos_sin_ptr, sinks_ptr, out_ptr, H: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):
    # one program a token and head
    E: tl.constexpr = N + R
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, pair = tl.arange(0, BLOCK_K), tl.arange(0, E // 2)
    is_split = split < SPLITS
    wait_for_previous(PDL)
    place = (token * SPLITS + split) * H + head
    most = tl.load(stats_ptr + place * 2, mask=is_split, other=-float("inf"))
    total = tl.load(stats_ptr + place * 2 + 1, mask=is_split, other=0.0)
    sink = tl.load(sinks_ptr + head) * LOG2_E
    highest = tl.maximum(tl.max(most, axis=0), sink)
    weight = tl.exp2(most - highest)  # 0 for a split without slots
    share = 1.0 / (tl.sum(total * weight, axis=0) + tl.exp2(sink - highest))
    both = is_split[:, None] & (pair >= 0)[None, :]
    source = sums_ptr + place[:, None] * E + 2 * pair[None, :]
    even = tl.sum(tl.load(source, mask=both, other=0.0) * weight[:, None], axis=0) * share
    odd = tl.sum(tl.load(source + 1, mask=both, other=0.0) * weight[:, None], axis=0) * share
    turn = pair - N // 2
    table = cos_sin_ptr + tl.load(positions_ptr + token) * R + turn
    cos = tl.load(table, mask=turn >= 0, other=1.0)
    sin = tl.load(table + R // 2, mask=turn >= 0, other=0.0)
    into = out_ptr + (token * H + head) * E + 2 * pair
    tl.store(into, (even * cos + odd * sin).to(out_ptr.dtype.element_ty))
    tl.store(into + 1, (odd * cos - even * sin).to(out_ptr.dtype.element_ty))


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
    splits = max(1, min(pieces, PROGRAMS // (num_tokens * blocks)))
    sums, stats = q, q  # stand in where there is one split
    if splits > 1:
        sums = torch.empty((num_tokens, splits, num_heads, head_dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((num_tokens, splits, num_heads, 2), dtype=torch.float32, device=q.device)
    plain = head_dim - rotary_dim
    shape = {"H": num_heads, "N": plain, "R": rotary_dim, "SPLITS": splits}
    _attend_kernel[(num_tokens, blocks, splits)](
        q, queries.positions, queries.cos_sin, sinks, out, sums, stats, queries.norm_eps, scale, window.numbers,
        window.counts, window.counts, window.numbers.shape[1], **slot_arguments(window.slots),
        **_entry_arguments(window, entries), **shape, HEADS=heads, NB=max(16, next_power_of_2(plain)), GROUP=GROUP,
        BLOCK=SLOTS, PDL=pdl, num_warps=8, num_stages=2, launch_pdl=pdl,
    )
    if splits > 1:
        _combine_kernel[(num_tokens, num_heads)](
            sums, stats, queries.positions, queries.cos_sin, sinks, out, **shape, BLOCK_K=next_power_of_2(splits),
            PDL=pdl, num_warps=1, launch_pdl=pdl,
        )
    return out


attend_slots_pdl = partial(attend_slots, pdl=True)

"""The lightning indexer in Triton: scores of compressed entries, and exact selection of the highest. DeepSeek-V3.2.

T tokens, H index heads, E index dims of which R are rotated, N entries.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from headrace.kernels.latents.slots import Slots
from headrace.kernels.latents.triton import (
    LARGEST,
    LEAST_AMAX,
    NARROW_BLOCK,
    NARROW_KEYS,
    PLAIN,
    hadamard_signs,
    slot_arguments,
    widen_narrow,
)
from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous
from headrace.kernels.sparse_attention import EntryView, Queries

KEYS, PACKED_KEYS = 64, 128
"""Entries that a program scores at a time, plain and packed."""
PROGRAMS = 264
"""Programs among which the entries of a step are divided, about two for each multiprocessor of a large GPU."""
SELECT_BLOCK, LONG_BLOCK = 2048, 8192
"""Scores that a selection reads at a time: where a row has up to `LONG_BLOCK`, and where it has more."""


@triton.jit
def _load_queries(q_ptr, cos_sin_ptr, row, is_row, position, E: tl.constexpr, R: tl.constexpr):
    """Rows ``row`` [n] of queries, rotated by the angles at ``position`` [n], in q's dtype: [n, E]; zero where not
    ``is_row``."""
    pair = tl.arange(0, E // 2)
    pairs = is_row[:, None] & (pair >= 0)[None, :]
    place = q_ptr + row[:, None] * E + 2 * pair[None, :]
    even = tl.load(place, mask=pairs, other=0.0).to(tl.float32)
    odd = tl.load(place + 1, mask=pairs, other=0.0).to(tl.float32)
    turn = pair - (E - R) // 2  # pairs before the rotated ones turn by no angle
    angle, turns = cos_sin_ptr + position[:, None] * R + turn[None, :], pairs & (turn >= 0)[None, :]
    cos, sin = tl.load(angle, mask=turns, other=1.0), tl.load(angle + R // 2, mask=turns, other=0.0)
    q = tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), [row.shape[0], E])
    return q.to(q_ptr.dtype.element_ty)


@triton.jit
def _load_keys(
    codes_ptr, scales_ptr, table, number, visible, E: tl.constexpr, S: tl.constexpr, PAGE: tl.constexpr,
    SLOT: tl.constexpr, IS_NARROW: tl.constexpr
):
    """Keys ``number`` [n] of a request, whose row of the page table is ``table``, and their scales."""
    is_inside, dim = number < visible, tl.arange(0, E)
    page = tl.load(table + number // S, mask=is_inside, other=0).to(tl.int64)
    start = page * PAGE + number % S * SLOT
    if IS_NARROW:
        BLOCKS: tl.constexpr = E // NARROW_BLOCK
        block, inner = tl.arange(0, BLOCKS), tl.arange(0, NARROW_BLOCK // 2)
        codes = tl.load(
            codes_ptr + start[:, None, None] + (block * (NARROW_BLOCK // 2))[None, :, None] + inner[None, None, :],
            mask=is_inside[:, None, None] & (block >= 0)[None, :, None] & (inner >= 0)[None, None, :], other=0,
        )
        scales = tl.load(
            scales_ptr + (page * PAGE + number % S * BLOCKS)[:, None] + block[None, :],
            mask=is_inside[:, None] & (block >= 0)[None, :], other=127,
        )
        key, key_scale = widen_narrow(codes, scales, E)
    else:
        key = tl.load(
            codes_ptr + start[:, None] + dim[None, :], mask=is_inside[:, None] & (dim >= 0)[None, :], other=0.0
        )
        key_scale = tl.load(scales_ptr + page * (PAGE // 4) + number % S, mask=is_inside, other=0.0)
    return key, key_scale


@triton.jit(do_not_specialize=["first_token", "num_columns"])
def _score_codes_kernel(
    q_ptr, positions_ptr, cos_sin_ptr, weights_ptr, requests_ptr, visible_ptr, table_ptr, scores_ptr, first_token,
    weights_stride, table_width, num_columns, top_k, scale, codes_ptr, scales_ptr, H: tl.constexpr, HEADS: tl.constexpr,
    E: tl.constexpr, R: tl.constexpr, S: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr,
    IS_ONE: tl.constexpr, IS_NARROW: tl.constexpr, PDL: tl.constexpr,
):
    # Both factors in e4m3. Keys are the rows of the product, so that the sum over heads is along a row.
    nth, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = first_token + nth
    signs = hadamard_signs(E).to(q_ptr.dtype.element_ty)  # while the kernel before ends
    wait_for_previous(PDL)
    visible = tl.load(visible_ptr + token).to(tl.int32)
    if (visible > top_k) & (part * BLOCK < visible):
        position, request = tl.load(positions_ptr + token), tl.load(requests_ptr + token)
        table, scores = table_ptr + request * table_width, scores_ptr + nth * num_columns
        number = part * BLOCK + tl.arange(0, BLOCK)
        if IS_ONE:  # on their way while queries are packed
            key, key_scale = _load_keys(codes_ptr, scales_ptr, table, number, visible, E, S, PAGE, SLOT, IS_NARROW)
        head = tl.arange(0, HEADS)
        is_head = head < H
        q = _load_queries(q_ptr, cos_sin_ptr, token * H + head, is_head, position + head * 0, E, R)
        weight = tl.load(weights_ptr + token * weights_stride + head, mask=is_head, other=0.0).to(tl.float32)
        turned = tl.dot(q, signs, input_precision="ieee") * (1.0 / tl.sqrt_rn(E * 1.0))
        step = tl.div_rn(tl.maximum(tl.max(tl.abs(turned), axis=1), LEAST_AMAX), LARGEST)
        codes = tl.trans(tl.div_rn(turned, tl.broadcast_to(step[:, None], turned.shape)).to(tl.float8e4nv))
        weight *= scale * step
        if IS_ONE:
            # a key's scale is positive, so that it may come behind the relu
            score = tl.sum(tl.maximum(tl.dot(key, codes), 0.0) * weight[None, :], axis=1) * key_scale
            tl.store(scores + number, score, mask=number < visible)
        else:
            for first in range(part * BLOCK, visible, tl.num_programs(1) * BLOCK):
                number = first + tl.arange(0, BLOCK)
                key, key_scale = _load_keys(
                    codes_ptr, scales_ptr, table, number, visible, E, S, PAGE, SLOT, IS_NARROW
                )
                score = tl.sum(tl.maximum(tl.dot(key, codes), 0.0) * weight[None, :], axis=1) * key_scale
                tl.store(scores + number, score, mask=number < visible)


@triton.jit(
    do_not_specialize=["first_token", "num_columns"], do_not_specialize_on_alignment=["positions_ptr", "table_ptr"]
)
def _score_kernel(
    q_ptr, positions_ptr, cos_sin_ptr, weights_ptr, requests_ptr, visible_ptr, table_ptr, scores_ptr, first_token,
    weights_stride, table_width, num_columns, top_k, scale, keys_ptr, H: tl.constexpr, HEADS: tl.constexpr,
    E: tl.constexpr, R: tl.constexpr, S: tl.constexpr, PAGE: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    nth, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = first_token + nth
    wait_for_previous(PDL)
    visible = tl.load(visible_ptr + token).to(tl.int32)
    if (visible > top_k) & (part * BLOCK < visible):
        position, request = tl.load(positions_ptr + token), tl.load(requests_ptr + token)
        head = tl.arange(0, HEADS)
        is_head = head < H
        q = _load_queries(q_ptr, cos_sin_ptr, token * H + head, is_head, position + head * 0, E, R)
        weight = tl.load(weights_ptr + token * weights_stride + head, mask=is_head, other=0.0).to(tl.float32) * scale
        dim = tl.arange(0, E)
        for first in range(part * BLOCK, visible, tl.num_programs(1) * BLOCK):
            number = first + tl.arange(0, BLOCK)
            is_inside = number < visible
            page = tl.load(table_ptr + request * table_width + number // S, mask=is_inside, other=0).to(tl.int64)
            start = page * PAGE + number % S * SLOT
            key = tl.load(
                keys_ptr + start[:, None] + dim[None, :], mask=is_inside[:, None] & (dim >= 0)[None, :], other=0.0
            ).to(q_ptr.dtype.element_ty)
            hits = tl.maximum(tl.dot(q, tl.trans(key), input_precision="ieee"), 0.0)
            score = tl.sum(hits * weight[:, None], axis=0)
            tl.store(scores_ptr + nth * num_columns + number, score, mask=is_inside)


def index_scores(
    queries: Queries, weights: torch.Tensor, keys: Slots, view: EntryView, *, scale: float, top_k: int,
    tokens: slice, pdl: bool = False,
) -> torch.Tensor:
    """See `INDEX_SCORES`."""
    num_heads, dim = queries.q.shape[1:]
    count = len(range(*tokens.indices(len(queries.q))))
    scores = torch.empty((count, view.longest), dtype=torch.float32, device=queries.q.device)
    assert queries.q.is_contiguous() and weights.stride(1) == 1 and view.page_table.stride(1) == 1
    if not scores.numel():
        return scores
    first, longest = tokens.indices(len(queries.q))[0], view.longest
    place = slot_arguments(keys)
    shared = {
        "H": num_heads, "HEADS": max(16, next_power_of_2(num_heads)), "E": dim, "R": queries.cos_sin.shape[1],
        "S": place["S"], "PAGE": place["PAGE"], "SLOT": place["SLOT"], "PDL": pdl,
    }
    inputs = (
        queries.q, queries.positions, queries.cos_sin, weights, view.requests, view.visible, view.page_table, scores,
        first,
    )
    sizes = (weights.stride(0), view.page_table.stride(0), longest, top_k, scale)
    # entries that a program scores at a time, and among how many programs those of a token are divided
    block = KEYS if place["HOW"] == PLAIN else PACKED_KEYS
    grid = (count, min(ceil_div(longest, block), max(1, PROGRAMS // count)))
    if place["HOW"] == PLAIN:
        _score_kernel[grid](*inputs, *sizes, place["codes_ptr"], **shared, BLOCK=block, num_warps=4, launch_pdl=pdl)
    else:
        _score_codes_kernel[grid](
            *inputs, *sizes, place["codes_ptr"], place["scales_ptr"], **shared, BLOCK=block,
            IS_ONE=block * grid[1] >= longest, IS_NARROW=place["HOW"] == NARROW_KEYS, num_warps=4, num_stages=3,
            launch_pdl=pdl,
        )
    return scores


@triton.jit
def _sortable(score):
    """float32 to unsigned integers of the same order; equal for 0 and -0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit(do_not_specialize=["first_token", "num_columns"])
def _select_kernel(
    scores_ptr, requests_ptr, visible_ptr, table_ptr, out_ptr, first_token, table_width, num_columns,
    TOP_K: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    nth = tl.program_id(0).to(tl.int64)
    token = first_token + nth
    wait_for_previous(PDL)
    visible = tl.load(visible_ptr + token).to(tl.int32)
    table = table_ptr + tl.load(requests_ptr + token) * table_width
    out = out_ptr + nth * TOP_K
    at = tl.arange(0, BLOCK)
    if visible <= TOP_K:
        for first in range(0, TOP_K, BLOCK):
            number = first + at
            page = tl.load(table + number // S, mask=number < visible, other=0).to(tl.int64)
            tl.store(out + number, tl.where(number < visible, page * S + number % S, -1), mask=number < TOP_K)
    else:
        # radix selection: the k-th highest key, 8 bits at a time from the top
        scores = scores_ptr + nth * num_columns
        prefix = tl.zeros([], tl.uint32)
        wanted = tl.zeros([], tl.int32) + TOP_K  # how many to take among the keys that begin with ``prefix``
        digit = tl.arange(0, 256)
        for byte in tl.static_range(4):
            counts = tl.zeros([256], tl.int32)
            for first in range(0, visible, BLOCK):
                number = first + at
                key = _sortable(tl.load(scores + number, mask=number < visible, other=0.0))
                is_here = number < visible
                if byte > 0:
                    is_here = is_here & ((key >> (32 - 8 * byte)) == prefix)
                counts += tl.histogram(((key >> (24 - 8 * byte)) & 255).to(tl.int32), 256, mask=is_here)
            from_top = tl.cumsum(counts, 0, reverse=True)
            chosen = tl.sum((from_top >= wanted).to(tl.int32), 0) - 1
            wanted -= tl.sum(tl.where(digit == chosen + 1, from_top, 0), 0)
            prefix = (prefix << 8) | chosen.to(tl.uint32)
        # all keys above the k-th highest, and the first ``wanted`` of those equal to it
        taken = tl.zeros([], tl.int32)
        equal = tl.zeros([], tl.int32)
        for first in range(0, visible, BLOCK):
            number = first + at
            key = _sortable(tl.load(scores + number, mask=number < visible, other=0.0))
            is_equal = (key == prefix) & (number < visible)
            rank = equal + tl.cumsum(is_equal.to(tl.int32), 0)  # from 1
            is_taken = ((key > prefix) & (number < visible)) | (is_equal & (rank <= wanted))
            place = taken + tl.cumsum(is_taken.to(tl.int32), 0) - 1
            page = tl.load(table + number // S, mask=is_taken, other=0).to(tl.int64)
            tl.store(out + place, page * S + number % S, mask=is_taken)
            taken += tl.sum(is_taken.to(tl.int32), 0)
            equal += tl.sum(is_equal.to(tl.int32), 0)


def select_entries(
    scores: torch.Tensor, view: EntryView, *, top_k: int, per_page: int, tokens: slice,
    pdl: bool = False,
) -> torch.Tensor:
    """See `SELECT_ENTRIES`; of equal scores that do not all fit the first are taken."""
    out = torch.empty((len(scores), top_k), dtype=torch.int64, device=scores.device)
    assert view.page_table.stride(1) == 1 and scores.is_contiguous()
    if len(scores):
        block = SELECT_BLOCK if scores.shape[1] <= LONG_BLOCK else LONG_BLOCK
        _select_kernel[(len(scores),)](
            scores, view.requests, view.visible, view.page_table, out, tokens.indices(len(view.visible))[0],
            view.page_table.stride(0), scores.shape[1], TOP_K=top_k, S=per_page,
            BLOCK=block, PDL=pdl, num_warps=32 if block == LONG_BLOCK else 8, launch_pdl=pdl,
        )
    return out


index_scores_pdl = partial(index_scores, pdl=True)
select_entries_pdl = partial(select_entries, pdl=True)

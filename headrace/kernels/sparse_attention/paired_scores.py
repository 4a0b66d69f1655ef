"""Index scores of many tokens in Triton, of packed keys: queries are packed by a kernel of their own, then each key is
read for two neighbouring tokens at a time.

T tokens, H index heads (HEADS with padding, whose weights are zero), E index dims, N entries, S entries of a page.
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
    hadamard_signs,
    slot_arguments,
    widen_narrow,
)
from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous
from headrace.kernels.sparse_attention import EntryView, Queries, indexer
from headrace.kernels.sparse_attention.indexer import _load_queries

LEAST_TOKENS = 4096
"""Of a step. With fewer than 2,048, or few entries, one kernel for both is faster; and where steps may have as many as
this, the largest one of a start has so many entries too that it compiles what is here."""
MOST_HEADS = 64
"""More than twice as many sums take too many registers."""
KEYS = 64
"""Entries that a program scores at a time, all of one page."""
PACKED_TOKENS = 4
"""Tokens that a program packs, one after the other: the matrix of signs is made once for them."""
PROGRAMS = 1056
"""Programs among which the entries of a step are divided where pairs of tokens are too few: eight for each
multiprocessor of a large GPU."""


def takes(keys: Slots, num_tokens: int, num_heads: int) -> bool:
    """Whether this is faster, and possible, for a step of so many tokens."""
    return (
        keys.scales is not None and keys.holds_keys and keys.per_page % KEYS == 0 and num_tokens >= LEAST_TOKENS
        and num_heads <= MOST_HEADS
    )


@triton.jit
def _pack_queries(
    q_ptr, cos_sin_ptr, weights_ptr, token, position, head, is_head, signs, scale, H: tl.constexpr, E: tl.constexpr,
    R: tl.constexpr,
):
    """The heads of a token rotated, turned by the Hadamard matrix and in e4m3 [heads, E], and their weights times the
    scales of the codes, float32 [heads]. ``weights_ptr``: the token's. ``signs``: of `hadamard_signs`, in q's dtype."""
    q = _load_queries(q_ptr, cos_sin_ptr, token * H + head, is_head, position + head * 0, E, R)
    turned = tl.dot(q, signs, input_precision="ieee") * (1.0 / tl.sqrt_rn(E * 1.0))
    step = tl.div_rn(tl.maximum(tl.max(tl.abs(turned), axis=1), LEAST_AMAX), LARGEST)
    codes = (turned * (1.0 / step)[:, None]).to(tl.float8e4nv)
    weight = tl.load(weights_ptr + head, mask=is_head, other=0.0).to(tl.float32) * scale * step
    return codes, weight


@triton.jit(do_not_specialize=["first_token", "count"], do_not_specialize_on_alignment=["positions_ptr"])
def _pack_kernel(
    q_ptr, positions_ptr, cos_sin_ptr, weights_ptr, visible_ptr, codes_ptr, factors_ptr, first_token, count,
    weights_stride, top_k, scale, H: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
    TOKENS: tl.constexpr, PDL: tl.constexpr,
):
    head, dim = tl.arange(0, HEADS), tl.arange(0, E)
    signs = hadamard_signs(E).to(q_ptr.dtype.element_ty)
    wait_for_previous(PDL)
    first = tl.program_id(0).to(tl.int64) * TOKENS
    for nth in range(first, tl.minimum(first + TOKENS, count)):
        token = first_token + nth
        if tl.load(visible_ptr + token) > top_k:  # others need no scores
            codes, weight = _pack_queries(
                q_ptr, cos_sin_ptr, weights_ptr + token * weights_stride, token, tl.load(positions_ptr + token), head,
                head < H, signs, scale, H, E, R,
            )
            tl.store(codes_ptr + (nth * HEADS + head)[:, None] * E + dim[None, :], codes)
            tl.store(factors_ptr + nth * HEADS + head, weight)


@triton.jit(do_not_specialize=["first_token", "count", "num_columns"])
def _score_pairs_kernel(
    codes_ptr, factors_ptr, requests_ptr, visible_ptr, table_ptr, keys_ptr, scales_ptr, scores_ptr, first_token, count,
    table_width, num_columns, top_k, HEADS: tl.constexpr, E: tl.constexpr, S: tl.constexpr, PAGE: tl.constexpr,
    SLOT: tl.constexpr, BLOCK: tl.constexpr, IS_NARROW: tl.constexpr, PDL: tl.constexpr,
):
    nth, part = tl.program_id(0).to(tl.int64) * 2, tl.program_id(1)
    has_second = nth + 1 < count
    second = tl.where(has_second, nth + 1, nth)
    wait_for_previous(PDL)
    request, other = tl.load(requests_ptr + first_token + nth), tl.load(requests_ptr + first_token + second)
    visible = tl.load(visible_ptr + first_token + nth).to(tl.int32)
    more = tl.load(visible_ptr + first_token + second).to(tl.int32)
    visible = tl.where(visible > top_k, visible, 0)
    more = tl.where((more > top_k) & has_second, more, 0)
    row, dim, place = tl.arange(0, 2 * HEADS), tl.arange(0, E), tl.arange(0, BLOCK)
    # of a missing or unneeded token the codes were not written: whatever they are, their scores are not stored
    is_row = nth * HEADS + row < count * HEADS
    at = nth * HEADS + row
    q = tl.load(codes_ptr + at[:, None] * E + dim[None, :], mask=is_row[:, None] & (dim >= 0)[None, :], other=0.0)
    factor = tl.load(factors_ptr + at, mask=is_row, other=0.0)
    q = tl.trans(q)
    # neighbours of two requests take turns
    for turn in range(0, tl.where(request == other, 1, 2)):
        own = tl.where(turn == 0, request, other)
        until = tl.where(request == own, visible, 0)
        until_more = tl.where(other == own, more, 0)
        for start in range(part * BLOCK, tl.maximum(until, until_more), tl.num_programs(1) * BLOCK):
            page = tl.load(table_ptr + own * table_width + start // S).to(tl.int64)
            first = start % S
            if IS_NARROW:
                BLOCKS: tl.constexpr = E // NARROW_BLOCK
                block, inner = tl.arange(0, BLOCKS), tl.arange(0, NARROW_BLOCK // 2)
                at_codes = (block * (NARROW_BLOCK // 2))[None, :, None] + inner[None, None, :]
                own_codes = keys_ptr + page * PAGE + first * SLOT + place[:, None, None] * SLOT + at_codes
                own_scales = scales_ptr + page * PAGE + (first + place)[:, None] * BLOCKS + block[None, :]
                key, key_scale = widen_narrow(tl.load(own_codes), tl.load(own_scales), E)
            else:
                key = tl.load(keys_ptr + page * PAGE + first * SLOT + place[:, None] * SLOT + dim[None, :])
                key_scale = tl.load(scales_ptr + page * (PAGE // 4) + first + place)
            hits = tl.maximum(tl.dot(key, q), 0.0) * factor[None, :]
            # [entries, tokens]; a key's scale is positive, so that it may come behind the relu
            score = tl.sum(tl.reshape(hits, [BLOCK, 2, HEADS]), axis=2)
            score *= key_scale[:, None]
            token = tl.arange(0, 2)
            number = start + place
            is_inside = number[:, None] < tl.where(token == 0, until, until_more)[None, :]
            tl.store(scores_ptr + (nth + token)[None, :] * num_columns + number[:, None], score, mask=is_inside)


def index_scores(
    queries: Queries, weights: torch.Tensor, keys: Slots, view: EntryView, *, scale: float, top_k: int,
    tokens: slice, pdl: bool = False,
) -> torch.Tensor:
    """See `INDEX_SCORES`; what `takes` refuses is left to `indexer`."""
    num_heads, dim = queries.q.shape[1:]
    first, until, _ = tokens.indices(len(queries.q))
    if first == until or not takes(keys, len(queries.q), num_heads):
        return indexer.index_scores(queries, weights, keys, view, scale=scale, top_k=top_k, tokens=tokens, pdl=pdl)
    count, heads, device = until - first, max(16, next_power_of_2(num_heads)), queries.q.device
    codes = torch.empty((count, heads, dim), dtype=torch.float8_e4m3fn, device=device)
    factors = torch.empty((count, heads), dtype=torch.float32, device=device)
    scores = torch.empty((count, view.longest), dtype=torch.float32, device=device)
    assert queries.q.is_contiguous() and weights.stride(1) == 1 and view.page_table.stride(1) == 1
    _pack_kernel[(ceil_div(count, PACKED_TOKENS),)](
        queries.q, queries.positions, queries.cos_sin, weights, view.visible, codes, factors, first, count,
        weights.stride(0), top_k, scale, H=num_heads, HEADS=heads, E=dim, R=queries.cos_sin.shape[1],
        TOKENS=PACKED_TOKENS, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )
    pairs, where = ceil_div(count, 2), slot_arguments(keys)
    parts = min(ceil_div(view.longest, KEYS), max(1, PROGRAMS // pairs))
    _score_pairs_kernel[(pairs, parts)](
        codes, factors, view.requests, view.visible, view.page_table, where["codes_ptr"], where["scales_ptr"], scores,
        first, count, view.page_table.stride(0), view.longest, top_k, HEADS=heads, E=dim, S=where["S"],
        PAGE=where["PAGE"], SLOT=where["SLOT"], BLOCK=KEYS, IS_NARROW=where["HOW"] == NARROW_KEYS, PDL=pdl,
        num_warps=4, num_stages=4, launch_pdl=pdl,
    )
    return scores


index_scores_pdl = partial(index_scores, pdl=True)

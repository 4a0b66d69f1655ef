"""Paged causal attention: prefill of ragged chunks, and decode split over the keys.

T tokens, R requests, H heads, K kv heads, G = H / K, E head dim. All G query heads of a kv head share a tile, so keys
and values are read once a kv head. Softmax runs in base 2 with a running maximum (Milakov & Gimelshein,
arXiv:1805.02867; Dao, arXiv:2307.08691). Decode is split over keys as in Flash-Decoding, into shares of equal length
over all requests; each program computes its own share from the lengths on the device. Of many decodes, those side by
side that have most of their pages in common are computed together.

q and out are [T, H, E] contiguous, pages [P, page_size, K, E] with any stride between pages, page tables [R, *] int32.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous
from headrace.kernels.operation import LARGE_BLOCK, count_block_bytes

LOG2_E = 1.4426950408889634
COMBINED_VALUES = 16384
"""Most values of a [CHUNK, BLOCK_G, BLOCK_EV] float32 block in `_combine`: 64 KiB of the 128 KiB of registers that the
four warps of a program can have."""
LEAST_SHARED, TOGETHER_TILES = 256, 8
"""Keys with which requests must begin alike to be computed together, and how many (request, kv head) pairs there must
be for each SM: with fewer, programs of several requests would leave some without any."""
MASKED = tl.constexpr(-1.0e38)  # finite: a row whose first blocks are all masked must not turn into NaN


def block_dim(dim: int) -> int:
    """Tile width for a head: a power of two, at least 16 for the tensor cores."""
    return max(16, next_power_of_2(dim))


@dataclass(frozen=True)
class Tile:
    """Block sizes of one kernel: ``rows`` are query rows (tokens times the G query heads of a kv head), ``keys`` cached
    positions per iteration, ``num_stages`` the depth of Triton's software pipeline."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def prefill_tile(width: int, element_size: int, block_bytes: int = LARGE_BLOCK) -> Tile:
    """Sized for ``block_bytes`` of shared memory: queries plus ``num_stages`` blocks of keys and values. ``width`` is
    the padded head dim, ``element_size`` in bytes."""
    if element_size > 2:
        return Tile(64, 32, 4, 1) if width <= 128 else Tile(32, 16, 4, 1)
    if width <= 64:
        return Tile(128, 64, 4, 4)
    if width > 128 and block_bytes < 144 << 10:
        return Tile(64, 32, 4, 2)
    # without wgmma 128 wide takes 96 KiB, 256 wide 144 KiB; with it,
    # 128 wide: 32 KiB of queries + 5 * 32 KiB; 256 wide: 64 KiB + 2 * 64 KiB
    return Tile(128, 64, 8, 5) if width <= 128 else Tile(128, 64, 8, 2)


def decode_tile(group: int, width: int, element_size: int) -> Tile:
    """A tensor-core tile takes at least 16 query rows; smaller groups are padded."""
    rows = max(16, next_power_of_2(group))
    if element_size > 2:
        return Tile(rows, 32 if width <= 128 else 16, 4, 1)
    return Tile(rows, 64 if width <= 128 else 32, 4, 5)


@dataclass(frozen=True)
class SplitRule:
    """Applies to at most ``most_tiles`` (request, kv head) pairs per SM: ``programs`` per SM, each with ``stages``
    pipeline stages."""

    most_tiles: float
    programs: int
    stages: int


SPLIT_RULES = {128: (SplitRule(0.25, 1, 9), SplitRule(1, 2, 7), SplitRule(2, 4, 5)), 256: (SplitRule(1, 2, 7),)}
"""By head dim; rules in order of rising load. Fewer programs need more loads in flight each to reach memory bandwidth;
more requests need more programs to balance a long one. Measured on an H200; none was slower than one program per
request and head."""
OTHER_RULES = (SplitRule(1.5, 3, 5),)
MOST_PROGRAMS = 4
"""The largest ``programs`` of a rule: `DecodeWorkspace` has a slot for each."""


def plan_splits(
    num_requests: int, num_kv_heads: int, max_kv_len: int, *, head_dim: int, tile: Tile, processors: int,
    is_roomy: bool = True
) -> tuple[int, Tile]:
    """``(slots, tile)``: how many programs per kv head share the keys of all requests, and their tile. ``num_requests``
    slots mean no split: one program per request and kv head. ``max_kv_len`` is an upper bound, not a length, so that
    the result depends only on what a captured graph fixes."""
    for rule in SPLIT_RULES.get(head_dim, OTHER_RULES) if is_roomy else OTHER_RULES:
        if num_requests * num_kv_heads <= rule.most_tiles * processors:
            # one stage means float32, which keeps its small tile
            split = replace(tile, keys=64, num_stages=rule.stages) if tile.num_stages > 1 and is_roomy else tile
            # no more slots than blocks of keys: the rest would be idle
            slots = min(rule.programs * processors // num_kv_heads, num_requests * ceil_div(max_kv_len, split.keys))
            # `_share_out` relies on this: with fewer slots than requests its search would not end
            if slots > num_requests:
                return slots, split
    return num_requests, tile


@triton.jit
def _load_block(
    pages_ptr, table_ptr, at, low, last, head, page_stride, PAGE: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, BOUNDED: tl.constexpr,
):
    """Keys or values at positions ``at + [0, BLOCK_N)`` of one kv head, [BLOCK_N, BLOCK_E]; ``at`` is a multiple of
    BLOCK_N. When BOUNDED, zeros outside [low, last), where pages may hold another request's data or NaN; otherwise the
    caller guarantees that all positions are inside. ``page_stride`` counts elements."""
    dim = tl.arange(0, BLOCK_E)
    # int64: page * page_stride exceeds 2**31 elements in a large pool
    if PAGE % BLOCK_N == 0:
        # the block lies inside one page: one page-table load
        page = tl.load(table_ptr + at // PAGE).to(tl.int64)
        row = (at % PAGE) + tl.arange(0, BLOCK_N)
        base = pages_ptr + page * page_stride + head * E
        pointers = base + row[:, None] * (K * E) + dim[None, :]
    else:
        position = at + tl.arange(0, BLOCK_N)
        page = tl.load(table_ptr + position // PAGE, mask=(position >= low) & (position < last), other=0).to(tl.int64)
        row = page * page_stride + (position % PAGE) * (K * E) + head * E
        pointers = pages_ptr + row[:, None] + dim[None, :]
    if BOUNDED:
        key = at + tl.arange(0, BLOCK_N)
        inside = ((key >= low) & (key < last))[:, None]
        if BLOCK_E != E:
            inside = inside & (dim < E)[None, :]
        return tl.load(pointers, mask=inside, other=0.0)
    elif BLOCK_E != E:
        return tl.load(pointers, mask=(dim < E)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _as_half(q):
    """q in float16, in which products with pages of 8-bit floats are: these become it in one instruction, and bfloat16
    in four. It is finer than bfloat16; larger queries than it holds are cut."""
    return tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)


@triton.jit
def _scores(q, k, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Logits times log2(e), [M, N] float32, of q [M, E] and k [N, E]. ``scale`` (from `Head.constants`) includes
    log2(e); with a soft-cap it includes the division by the cap instead, and log2(e) is applied after the cap."""
    logits = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale  # pages may be of 8-bit floats
    if SOFTCAP:
        # softcap * tanh(x): tanh(x) = 1 - 2 / (exp(2x) + 1), 2 log2(e) = 2.8853900817779268
        logits = softcap * (1.0 - 2.0 / (tl.exp2(logits * 2.8853900817779268) + 1.0)) * 1.4426950408889634
    return logits


@triton.jit
def _accumulate(logits, v, acc, top, total, PRECISION: tl.constexpr):
    """One step of the online softmax: ``top`` [M] running maximum (base 2), ``total`` [M] denominator, ``acc`` [M, EV]
    un-normalised output; all float32."""
    new_top = tl.maximum(top, tl.max(logits, axis=1))
    weights = tl.exp2(logits - new_top[:, None])
    # Earlier sums are relative to the old maximum. This also erases blocks in which a row was masked throughout: they
    # counted as weights of 1 (MASKED - MASKED = 0), and the first real logit makes ``fade`` 0.
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(weights, axis=1)
    # weights are rounded to v's dtype for the tensor cores; the denominator adds them unrounded
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, new_top, total


@triton.jit(do_not_specialize=["first", "num_requests", "capacity"])
def _plan_prefill_kernel(
    query_start_ptr, blocks_ptr, first, num_requests, capacity, LEAST: tl.constexpr, BLOCK_R: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write ``(request, first token of the block)`` to ``blocks`` [capacity, 2] int32 for every block of TOKENS query
    tokens of requests with LEAST tokens or more. Late blocks of a request come first: they see the most keys, and long
    programs that start last would leave SMs idle. One program per request; the one after the last request fills
    unused entries with request -1."""
    request = tl.program_id(0)
    # every program adds up the blocks of all requests before its own: no second launch, no atomics, a fixed order
    other = tl.arange(0, BLOCK_R)
    known = other < num_requests
    begin = tl.load(query_start_ptr + first + other, mask=known, other=0)
    end = tl.load(query_start_ptr + first + other + 1, mask=known, other=0)
    blocks = tl.where(end - begin >= LEAST, (end - begin + TOKENS - 1) // TOKENS, 0)
    base = tl.sum(tl.where(other < request, blocks, 0), axis=0)
    count = tl.sum(tl.where(other == request, blocks, 0), axis=0)
    if request == num_requests:
        for i in range(base, capacity):
            tl.store(blocks_ptr + 2 * i, -1)
    else:
        for i in range(count):
            tl.store(blocks_ptr + 2 * (base + i), first + request)
            tl.store(blocks_ptr + 2 * (base + i) + 1, (count - 1 - i) * TOKENS)


@triton.jit
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, blocks_ptr, query_start_ptr, kv_lens_ptr, table_ptr, sinks_ptr, table_stride,
    page_stride_k, page_stride_v, scale, softcap, PAGE: tl.constexpr, K: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    EV: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_EV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
    FP8: tl.constexpr, PDL: tl.constexpr,
):
    # nothing is loaded before the wait: in the first layer the previous kernels may have written the plan as well
    wait_for_previous(PDL)
    head = tl.program_id(0)
    block = tl.program_id(1)
    request = tl.load(blocks_ptr + 2 * block)
    if request >= 0:
        first = tl.load(blocks_ptr + 2 * block + 1)
        begin = tl.load(query_start_ptr + request)
        query_len = tl.load(query_start_ptr + request + 1) - begin
        kv_len = tl.load(kv_lens_ptr + request)
        table = table_ptr + request.to(tl.int64) * table_stride

        # rows of the tile: TOKENS tokens times the G query heads of a kv head, heads fastest
        row = tl.arange(0, BLOCK_M)
        token = first + row // G
        query_head = head * G + row % G
        valid = (row < TOKENS * G) & (token < query_len)
        q_row = ((begin + token).to(tl.int64) * (K * G) + query_head)[:, None]
        dim, dim_v = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_EV)
        q = tl.load(q_ptr + q_row * E + dim[None, :], mask=valid[:, None] & (dim < E)[None, :], other=0.0)
        if FP8:
            q = _as_half(q)
        position = kv_len - query_len + token  # the chunk is the end of its request

        first_position = kv_len - query_len + first
        end = tl.minimum(first_position + TOKENS, kv_len)  # first key that no row of the tile sees
        low = 0
        if WINDOW > 0:  # the first key that any row of the tile sees
            low = tl.maximum(first_position - WINDOW + 1, 0)
        start = low // BLOCK_N * BLOCK_N
        top = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if SINKS:  # as if there were a key with this logit and a value of zero
            top = tl.load(
                sinks_ptr + query_head, mask=query_head < K * G, other=0.0
            ).to(tl.float32) * 1.4426950408889634
            total += 1.0
        acc = tl.zeros([BLOCK_M, BLOCK_EV], tl.float32)

        if WINDOW == 0:
            # Blocks that every row of the tile sees whole need no mask and no bounds. With a window all blocks are left
            # to the loop below.
            unmasked = (first_position + 1) // BLOCK_N * BLOCK_N
            for at in tl.range(0, unmasked, BLOCK_N):
                k = _load_block(k_ptr, table, at, low, kv_len, head, page_stride_k, PAGE, K, E, BLOCK_E, BLOCK_N, False)
                logits = _scores(q, k, scale, softcap, SOFTCAP, PRECISION)
                v = _load_block(
                    v_ptr, table, at, low, kv_len, head, page_stride_v, PAGE, K, EV, BLOCK_EV, BLOCK_N, False
                )
                acc, top, total = _accumulate(logits, v.to(q.dtype), acc, top, total, PRECISION)
            start = unmasked
        for at in tl.range(start, end, BLOCK_N):
            k = _load_block(k_ptr, table, at, low, kv_len, head, page_stride_k, PAGE, K, E, BLOCK_E, BLOCK_N, True)
            logits = _scores(q, k, scale, softcap, SOFTCAP, PRECISION)
            key = at + tl.arange(0, BLOCK_N)
            seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            logits = tl.where(seen, logits, MASKED)
            v = _load_block(v_ptr, table, at, low, kv_len, head, page_stride_v, PAGE, K, EV, BLOCK_EV, BLOCK_N, True)
            acc, top, total = _accumulate(logits, v.to(q.dtype), acc, top, total, PRECISION)

        out = acc / total[:, None]
        tl.store(
            out_ptr + q_row * EV + dim_v[None, :], out.to(out_ptr.dtype.element_ty),
            mask=valid[:, None] & (dim_v < EV)[None, :]
        )


@triton.jit
def _combine(
    partial_ptr, stats_ptr, out_ptr, sinks_ptr, request, head, base, num_used, K: tl.constexpr, G: tl.constexpr,
    EV: tl.constexpr, SINKS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_EV: tl.constexpr, CHUNK: tl.constexpr,
):
    """Merge the ``num_used`` partial results of one request and kv head, from slot ``base`` on, CHUNK at a time, and
    write the output rows. The order is fixed, so the result does not depend on which program arrives last. Loads of a
    chunk are independent: one split at a time would cost its full latency, 1 us."""
    row, dim = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_EV)
    valid = row < G
    inside = valid[:, None] & (dim < EV)[None, :]
    top = tl.full([BLOCK_G], MASKED, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    if SINKS:  # here, once per request, not in every split
        top = tl.load(sinks_ptr + head * G + row, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    acc = tl.zeros([BLOCK_G, BLOCK_EV], tl.float32)
    for first in range(0, num_used, CHUNK):
        split = first + tl.arange(0, CHUNK)
        known = (split < num_used)[:, None] & valid[None, :]
        at = (base + split).to(tl.int64)[:, None] * G + row[None, :]
        # .cg (bypass L1): other programs wrote these lines, and this SM's L1 may hold their old contents
        part_top = tl.load(stats_ptr + at * 2, mask=known, other=MASKED, cache_modifier=".cg")
        part_total = tl.load(stats_ptr + at * 2 + 1, mask=known, other=0.0, cache_modifier=".cg")
        part = tl.load(
            partial_ptr + at[:, :, None] * EV + dim[None, None, :], mask=known[:, :, None] & (dim < EV)[None, None, :],
            other=0.0, cache_modifier=".cg"
        )
        # stats [CHUNK, BLOCK_G], sums [CHUNK, BLOCK_G, BLOCK_EV], each relative to its own split's maximum
        new_top = tl.maximum(top, tl.max(part_top, axis=0))
        fade, part_fade = tl.exp2(top - new_top), tl.exp2(part_top - new_top[None, :])
        total = total * fade + tl.sum(part_total * part_fade, axis=0)
        acc = acc * fade[:, None] + tl.sum(part * part_fade[:, :, None], axis=0)
        top = new_top
    # a request of length 0 (padding of a captured graph) gives zeros, not NaN
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_at = out_ptr + (request.to(tl.int64) * (K * G) + head * G + row)[:, None] * EV + dim[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _share_out(
    kv_lens_ptr, num_requests, slot, slots, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr
):
    """The work of one of ``slots`` programs: ``(request, its length, index of its split, blocks per split, number of
    the request's splits)``; request BLOCK_R if there is none. All splits are equally long but the last of each request,
    and nearly as short as ``slots`` allow. Every program computes this alone, from the same lengths: no launch to plan
    and no communication."""
    other = tl.arange(0, BLOCK_R)
    is_there = other < num_requests
    lens = tl.load(kv_lens_ptr + other, mask=is_there, other=0)
    blocks = (lens + BLOCK_N - 1) // BLOCK_N
    if WINDOW > 0:  # whole blocks before the window are not read
        blocks -= tl.maximum(lens - WINDOW, 0) // BLOCK_N
    # at least one block, so that a request of length 0 has a program that writes its output
    blocks = tl.where(is_there, tl.maximum(blocks, 1), 0)
    # Rounding each request up may need more slots than there are: lengthen splits by an eighth until they fit. That
    # ends, since slots >= num_requests.
    each = (tl.sum(blocks, 0) + slots - 1) // slots
    while tl.sum((blocks + each - 1) // each, 0) > slots:
        each += (each + 7) // 8
    counts = (blocks + each - 1) // each
    # slots of a request are adjacent; its index is the number of requests whose slots all come before
    ends = tl.cumsum(counts, 0)
    request = tl.sum((ends <= slot).to(tl.int32), 0)
    count = tl.sum(tl.where(other == request, counts, 0), 0)
    split = slot - (tl.sum(tl.where(other == request, ends, 0), 0) - count)
    return (
        tl.where(slot < tl.sum(counts, 0), request, BLOCK_R), tl.sum(tl.where(other == request, lens, 0), 0), split,
        each, count
    )


@triton.jit(do_not_specialize=["num_requests", "table_stride"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, stats_ptr, counters_ptr, query_start_ptr, kv_lens_ptr, table_ptr,
    sinks_ptr, table_stride, page_stride_k, page_stride_v, scale, softcap, num_requests, PAGE: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_EV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_SPLIT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    OPEN: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):
    # heads vary fastest: concurrent programs then read whole pages, not stripes of them
    head, slot = tl.program_id(0), tl.program_id(1)
    # Lengths were written before the previous kernel started (see `wait_for_previous`): these loads need not wait for
    # it, and the search for this program's share overlaps its end.
    if IS_SPLIT:
        request, kv_len, split, each, count = _share_out(
            kv_lens_ptr, num_requests, slot, tl.num_programs(1), WINDOW, BLOCK_N, BLOCK_R
        )
        is_used = request < BLOCK_R
    else:
        request, kv_len, split, each, count = slot, tl.load(kv_lens_ptr + slot), 0, 1 << 24, 1
        is_used = request >= 0
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(kv_len - WINDOW, 0)
    start = (begin // BLOCK_N + split * each) * BLOCK_N
    end = kv_len
    if IS_SPLIT:
        end = tl.minimum(start + each * BLOCK_N, kv_len)
    token = request
    if OPEN:  # mixed step: only requests of one query token are decodes, the others are left to `prefill`
        token = tl.load(query_start_ptr + request)
        is_used = tl.load(query_start_ptr + request + 1) - token == 1
    wait_for_previous(PDL)
    if is_used:
        table = table_ptr + request.to(tl.int64) * table_stride
        row = tl.arange(0, BLOCK_M)
        valid = row < G
        dim, dim_v = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_EV)
        q_row = (token.to(tl.int64) * (K * G) + head * G + row)[:, None]
        q = tl.load(q_ptr + q_row * E + dim[None, :], mask=valid[:, None] & (dim < E)[None, :], other=0.0)
        if FP8:
            q = _as_half(q)
        top = tl.full([BLOCK_M], MASKED, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if SINKS:  # with several splits `_combine` adds it
            sink = tl.load(sinks_ptr + head * G + row, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
            top = tl.where(count == 1, sink, top)
            total += tl.where(count == 1, 1.0, 0.0)
        acc = tl.zeros([BLOCK_M, BLOCK_EV], tl.float32)
        for at in tl.range(start, end, BLOCK_N):
            k = _load_block(k_ptr, table, at, begin, end, head, page_stride_k, PAGE, K, E, BLOCK_E, BLOCK_N, True)
            logits = _scores(q, k, scale, softcap, SOFTCAP, PRECISION)
            key = at + tl.arange(0, BLOCK_N)
            logits = tl.where((key < end) & (key >= begin), logits, MASKED)
            v = _load_block(v_ptr, table, at, begin, end, head, page_stride_v, PAGE, K, EV, BLOCK_EV, BLOCK_N, True)
            acc, top, total = _accumulate(logits, v.to(q.dtype), acc, top, total, PRECISION)
        if count == 1:
            out = acc / tl.where(total > 0, total, 1.0)[:, None]
            inside = valid[:, None] & (dim_v < EV)[None, :]
            tl.store(out_ptr + q_row * EV + dim_v[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            # partial results: un-normalised sums [G, EV], and (max, denominator) per row; sinks are added in `_combine`
            # slots are [K, slots]: the splits of a request and head are adjacent, from ``base`` on
            base, tile = head * tl.num_programs(1) + slot - split, request * K + head
            part = (base + split).to(tl.int64) * G + row
            tl.store(
                partial_ptr + part[:, None] * EV + dim_v[None, :], acc, mask=valid[:, None] & (dim_v < EV)[None, :]
            )
            tl.store(stats_ptr + part * 2, top, mask=valid)
            tl.store(stats_ptr + part * 2 + 1, total, mask=valid)
            # The last program to arrive merges the parts. The barrier orders the stores of all threads before the one
            # atomic (release); after it, acquire makes the other programs' parts visible.
            tl.debug_barrier()
            arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu")
            if arrived == count - 1:
                tl.debug_barrier()
                _combine(
                    partial_ptr, stats_ptr, out_ptr, sinks_ptr, request, head, base, count, K, G, EV, SINKS, BLOCK_G,
                    BLOCK_EV, CHUNK
                )
                tl.store(counters_ptr + tile, 0)  # ready for the next launch, also under graph replay


@triton.jit(do_not_specialize=["num_requests", "table_stride"])
def _together_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, kv_lens_ptr, table_ptr, sinks_ptr, table_stride, page_stride_k, page_stride_v, scale,
    softcap, num_requests, PAGE: tl.constexpr, K: tl.constexpr, G: tl.constexpr, E: tl.constexpr, EV: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_EV: tl.constexpr,
    BLOCK_G: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr, BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):
    """Decodes that are not split, a program a request and kv head. Where TOGETHER requests side by side have most of
    their pages in common, the first one's program takes them all, and reads those pages once: their queries fill rows
    of the tile that would be padding. Keys come in the order of a request alone, so the bits are the same.

    What they do not have in common is at most one in TOGETHER of the longest one's keys, so that a program takes less
    than twice as long as for that one alone."""
    head, request = tl.program_id(0), tl.program_id(1)
    leader = request // TOGETHER * TOGETHER
    other = leader + tl.arange(0, TOGETHER)
    is_there = other < num_requests
    # written before the previous kernel started, as lengths are
    lens = tl.load(kv_lens_ptr + other, mask=is_there, other=0)
    most, least = tl.max(lens, 0), tl.min(tl.where(is_there, lens, 1 << 30), 0)
    tables = table_ptr + other.to(tl.int64) * table_stride
    table = table_ptr + leader.to(tl.int64) * table_stride
    # one page tells: in common with it are those before
    enough = most - most // TOGETHER
    is_long = (enough >= LEAST) & (least >= enough)
    probe = tl.load(tables + (enough - 1) // PAGE, mask=is_there & is_long, other=-1)
    is_shared = is_long & (tl.max(probe, 0) == tl.min(tl.where(is_there, probe, 1 << 30), 0))
    shared = 0
    if is_shared & (request == leader):
        num_pages = least // PAGE
        num_same = num_pages
        for at in tl.range(0, num_pages, BLOCK_P):
            page = at + tl.arange(0, BLOCK_P)
            own = tl.load(table + page, mask=page < num_pages, other=0)
            theirs = tl.load(
                tables[:, None] + page[None, :], mask=is_there[:, None] & (page < num_pages)[None, :], other=0
            )
            differs = tl.max(((theirs != own[None, :]) & is_there[:, None]).to(tl.int32), 0) > 0
            num_same = tl.minimum(num_same, tl.min(tl.where(differs, page, num_pages), 0))
        shared = num_same * PAGE // BLOCK_N * BLOCK_N
    wait_for_previous(PDL)
    if (request == leader) | (is_shared == 0):
        row = tl.arange(0, TOGETHER * BLOCK_G)
        member, in_group = row // BLOCK_G, row % BLOCK_G
        first, last = request - leader, request - leader + 1
        if is_shared:
            first, last = 0, tl.minimum(TOGETHER, num_requests - leader)
        valid = (in_group < G) & (member >= first) & (member < last)
        dim, dim_v = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_EV)
        q_row = ((leader + member).to(tl.int64) * (K * G) + head * G + in_group)[:, None]
        q = tl.load(q_ptr + q_row * E + dim[None, :], mask=valid[:, None] & (dim < E)[None, :], other=0.0)
        if FP8:
            q = _as_half(q)
        top = tl.full([TOGETHER * BLOCK_G], MASKED, tl.float32)
        total = tl.zeros([TOGETHER * BLOCK_G], tl.float32)
        if SINKS:
            sink = tl.load(sinks_ptr + head * G + in_group, mask=in_group < G, other=0.0).to(tl.float32)
            top, total = sink * 1.4426950408889634, total + 1.0
        acc = tl.zeros([TOGETHER * BLOCK_G, BLOCK_EV], tl.float32)
        for at in tl.range(0, shared, BLOCK_N):
            k = _load_block(k_ptr, table, at, 0, shared, head, page_stride_k, PAGE, K, E, BLOCK_E, BLOCK_N, False)
            logits = _scores(q, k, scale, softcap, SOFTCAP, PRECISION)
            v = _load_block(v_ptr, table, at, 0, shared, head, page_stride_v, PAGE, K, EV, BLOCK_EV, BLOCK_N, False)
            acc, top, total = _accumulate(logits, v.to(q.dtype), acc, top, total, PRECISION)
        for turn in tl.range(first, last):
            mine, end = member == turn, tl.load(kv_lens_ptr + leader + turn)
            own_table = table_ptr + (leader + turn).to(tl.int64) * table_stride
            for at in tl.range(shared, end, BLOCK_N):
                k = _load_block(k_ptr, own_table, at, 0, end, head, page_stride_k, PAGE, K, E, BLOCK_E, BLOCK_N, True)
                logits = _scores(q, k, scale, softcap, SOFTCAP, PRECISION)
                key = at + tl.arange(0, BLOCK_N)
                # rows of others: what is masked adds nothing, or is faded out by the first key that they see
                logits = tl.where(mine[:, None] & (key < end)[None, :], logits, MASKED)
                v = _load_block(v_ptr, own_table, at, 0, end, head, page_stride_v, PAGE, K, EV, BLOCK_EV, BLOCK_N, True)
                acc, top, total = _accumulate(logits, v.to(q.dtype), acc, top, total, PRECISION)
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            out_ptr + q_row * EV + dim_v[None, :], out.to(out_ptr.dtype.element_ty),
            mask=valid[:, None] & (dim_v < EV)[None, :]
        )


@dataclass(frozen=True)
class Head:
    """A layer's constants, as `AttentionParams` of ``layers/attention/contract``; ``sinks`` [H]."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None

    def constants(self) -> dict[str, object]:
        """The launch arguments of these values. See `_scores` for what ``scale`` includes."""
        scale = self.scale / self.softcap if self.softcap else self.scale * LOG2_E
        return dict(
            scale=scale, softcap=float(self.softcap), WINDOW=self.window, SOFTCAP=self.softcap > 0,
            SINKS=self.sinks is not None
        )


def _geometry(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor) -> dict[str, Any]:
    num_kv_heads, head_dim, value_dim = k_pages.shape[2], k_pages.shape[3], v_pages.shape[3]
    return dict(
        PAGE=k_pages.shape[1], K=num_kv_heads, G=q.shape[1] // num_kv_heads, E=head_dim, EV=value_dim,
        BLOCK_E=block_dim(head_dim), BLOCK_EV=block_dim(value_dim),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        page_stride_k=k_pages.stride(0), page_stride_v=v_pages.stride(0),
    )


def _rounds_to_half(q: torch.Tensor, k_pages: torch.Tensor) -> bool:
    """See `_as_half`; queries in float32 stay what they are."""
    return k_pages.dtype == torch.float8_e4m3fn and q.element_size() == 2


@dataclass(frozen=True)
class PrefillPlan:
    """Which query tokens each program of `prefill` takes, ``tokens`` at most; made once a step, read by every layer.
    ``blocks`` [N, 2] int32 holds (request, first token within its chunk); request -1: no work."""

    blocks: torch.Tensor
    tile: Tile
    tokens: int


def plan_prefill(
    query_start: torch.Tensor, query_lens: list[int], *, first: int, group: int, tile: Tile
) -> PrefillPlan:
    """Plan requests ``first`` and later. ``query_start`` [R + 1] int32 is on the device, ``query_lens`` are the same
    lengths on the host, so that the grid is known without a synchronisation."""
    tile, tokens = _query_tile(group, tile)
    num_blocks = sum(ceil_div(n, tokens) for n in query_lens[first:])
    blocks = torch.empty((num_blocks, 2), dtype=torch.int32, device=query_start.device)
    _deal_blocks(query_start, blocks, first, len(query_lens) - first, tokens, least=1)
    return PrefillPlan(blocks, tile, tokens)


def plan_open_prefill(
    query_start: torch.Tensor, num_tokens: int, *, group: int, tile: Tile
) -> PrefillPlan:
    """Plan requests of two tokens or more whose number and lengths only the device knows. Launches as many programs as
    ``num_tokens`` tokens can need; those without work return at once. May be captured."""
    tile, tokens = _query_tile(group, tile)
    num_requests = query_start.shape[0] - 1
    # sum of ceil(n / tokens) <= num_tokens // tokens + requests, of which at most num_tokens // 2 have two tokens
    num_blocks = num_tokens // tokens + min(num_requests, num_tokens // 2)
    blocks = torch.empty((num_blocks, 2), dtype=torch.int32, device=query_start.device)
    _deal_blocks(query_start, blocks, 0, num_requests, tokens, least=2)
    return PrefillPlan(blocks, tile, tokens)


def _query_tile(group: int, tile: Tile) -> tuple[Tile, int]:
    """The tile, and how many tokens it holds, each with all ``group`` query heads of a kv head."""
    if group > tile.rows:  # at least one token must fit
        tile = Tile(next_power_of_2(group), tile.keys, tile.num_warps, tile.num_stages)
    return tile, tile.rows // group


def _deal_blocks(
    query_start: torch.Tensor, blocks: torch.Tensor, first: int, num_requests: int, tokens: int, *, least: int
) -> None:
    # BLOCK_R at least 1024: nearly every step then uses the same compiled kernel
    _plan_prefill_kernel[(num_requests + 1,)](
        query_start, blocks, first, num_requests, blocks.shape[0], LEAST=least,
        BLOCK_R=max(1024, next_power_of_2(num_requests)), TOKENS=tokens,
        num_warps=4,
    )


def prefill(
    q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, plan: PrefillPlan, head: Head,
    step: tuple[torch.Tensor, torch.Tensor, torch.Tensor], *, pdl: bool = False,
) -> None:
    """Causal attention of the planned requests, written into ``out`` [T, H, EV]; rows of other requests are left
    alone. q [T, H, E] and out are contiguous; ``pages`` are k's and v's; ``step`` is (query_start [R + 1], kv_lens [R],
    page_table [R, *]) of all requests, int32. The keys of the step must have been written to the pages."""
    (k_pages, v_pages), (query_start, kv_lens, page_table) = pages, step
    if not plan.blocks.shape[0]:
        return
    # without sinks q stands in for their pointer, which the kernel then does not read
    _prefill_kernel[(k_pages.shape[2], plan.blocks.shape[0])](
        q, k_pages, v_pages, out, plan.blocks, query_start, kv_lens, page_table,
        head.sinks if head.sinks is not None else q, page_table.stride(0), **_geometry(q, k_pages, v_pages),
        **head.constants(), BLOCK_M=plan.tile.rows, BLOCK_N=plan.tile.keys, TOKENS=plan.tokens,
        FP8=_rounds_to_half(q, k_pages), PDL=pdl, num_warps=plan.tile.num_warps,
        num_stages=plan.tile.num_stages, launch_pdl=pdl,
    )


def find_block_bytes(device: torch.device) -> int:
    """See `count_block_bytes`; of the interpreter as of Hopper."""
    return count_block_bytes(torch.cuda.get_device_capability(device)) if device.type == "cuda" else LARGE_BLOCK


@dataclass(frozen=True)
class DecodeWorkspace:
    """Partial results of splits, one slot per program, for ``processors`` SMs. Kept for the backend's life, since
    captured graphs hold its addresses. Launches that share it must be on one stream: they use the same slots.

    ``partial`` [slots, G, EV] and ``stats`` [slots, G, 2] (maximum, denominator) float32, flat; ``counters`` [slots]
    int32, by request and kv head, count the splits that are done, and are zero between launches."""

    partial: torch.Tensor
    stats: torch.Tensor
    counters: torch.Tensor
    processors: int
    is_roomy: bool

    @classmethod
    def allocate(cls, processors: int, group: int, value_dim: int, device: torch.device) -> "DecodeWorkspace":
        """Room for ``processors * MOST_PROGRAMS`` programs of ``group`` rows each. Splitting needs fewer (request, kv
        head) pairs than programs, so the counters suffice as well."""
        programs = processors * MOST_PROGRAMS
        partial = torch.empty(programs * group * value_dim, dtype=torch.float32, device=device)
        stats = torch.empty(programs * group * 2, dtype=torch.float32, device=device)
        return cls(
            partial, stats, torch.zeros(programs, dtype=torch.int32, device=device), processors,
            find_block_bytes(device) >= LARGE_BLOCK
        )


@dataclass(frozen=True)
class DecodeStep:
    """The decodes of a step: requests with one query token. ``kv_lens`` [R] int32 are at most ``max_kv_len``,
    ``page_table`` [R, *] int32.

    Without ``query_start`` the first ``num_requests`` rows are all decodes, and request r's token is row r of q. With
    ``query_start`` [R + 1] int32, decodes are those of the ``num_requests`` requests that have one token by it, which
    is row ``query_start[r]`` of q."""

    kv_lens: torch.Tensor
    page_table: torch.Tensor
    num_requests: int
    max_kv_len: int
    query_start: torch.Tensor | None = None


def decode(
    q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, workspace: DecodeWorkspace,
    head: Head, step: DecodeStep, *, pdl: bool = False,
) -> None:
    """Attention of the step's decodes: rows of q [T, H, E] to the same rows of ``out`` [T, H, EV], both contiguous;
    ``pages`` are k's and v's.

    The grid depends only on ``step.num_requests`` and ``step.max_kv_len``, so the launch may be captured.
    """
    k_pages, v_pages = pages
    geometry, constants = _geometry(q, k_pages, v_pages), head.constants()
    tile = decode_tile(geometry["G"], geometry["BLOCK_E"], q.element_size())
    # the most keys that a request reads
    reach = min(step.max_kv_len, head.window) if head.window else step.max_kv_len
    is_open = step.query_start is not None  # the number of decodes is not known on the host: do not split
    count = step.num_requests
    slots = count
    if not is_open:
        slots, tile = plan_splits(
            count, k_pages.shape[2], reach, head_dim=k_pages.shape[3], tile=tile, processors=workspace.processors,
            is_roomy=workspace.is_roomy
        )
    rows = next_power_of_2(geometry["G"])
    is_crowded = not is_open and count * k_pages.shape[2] >= TOGETHER_TILES * workspace.processors
    if is_crowded and slots == count and not head.window and tile.rows >= 2 * rows:
        _together_kernel[(k_pages.shape[2], count)](
            q, k_pages, v_pages, out, step.kv_lens, step.page_table, head.sinks if head.sinks is not None else q,
            step.page_table.stride(0), num_requests=count, **geometry, **constants, BLOCK_G=rows,
            TOGETHER=tile.rows // rows, BLOCK_N=tile.keys, LEAST=LEAST_SHARED, BLOCK_P=64,
            FP8=_rounds_to_half(q, k_pages), num_warps=tile.num_warps, num_stages=tile.num_stages, PDL=pdl,
            launch_pdl=pdl,
        )
        return
    combining = dict(BLOCK_G=rows, CHUNK=max(1, min(16, COMBINED_VALUES // (rows * geometry["BLOCK_EV"]))))
    _decode_kernel[(k_pages.shape[2], slots)](
        q, k_pages, v_pages, out, workspace.partial, workspace.stats, workspace.counters,
        step.query_start if is_open else step.kv_lens, step.kv_lens, step.page_table,
        head.sinks if head.sinks is not None else q, step.page_table.stride(0), num_requests=count, **geometry,
        **constants, BLOCK_M=tile.rows, BLOCK_N=tile.keys, IS_SPLIT=slots > count,
        BLOCK_R=1 if count == 1 or slots == count else max(16, next_power_of_2(count)), OPEN=is_open, **combining,
        FP8=_rounds_to_half(q, k_pages), num_warps=tile.num_warps, num_stages=tile.num_stages,
        PDL=pdl, launch_pdl=pdl,
    )

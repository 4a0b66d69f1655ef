"""Paged attention over latents (MLA with absorbed up-projections): decodes split over keys, and prefill chunks.

T tokens, R requests, H heads, L latent dims, E rotated dims, P pages. A row of a page is L + E elements, the key of all
heads; its first L are also the value, so a block of rows is read once for both products. Lengths are read on the device
alone. Softmax runs in base 2 (`headrace.kernels.attention.blocks`).

q is [T, H, L + E] and out [T, H, L], contiguous; pages [P, page_size, 1, L + E] with any stride between pages; page
tables [R, *] int32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from headrace.kernels.attention.blocks import LOG2_E, MASKED, Tile, as_half, block_dim, rounds_to_half
from headrace.kernels.attention.decodes import DecodeStep
from headrace.kernels.attention.prefill import PrefillPlan
from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous

MOST_ROWS = 64
"""Query rows of a program: their sums [64, 512] in float32 are half of the registers of eight warps."""
PROGRAMS = 2
"""Programs per SM that decodes are split into."""
COMBINED_DIMS, COMBINED_SPLITS = 128, 16
"""Latent dims of a program of `_combine_kernel`, and the splits that it reads at a time."""


def decode_tile(num_heads: int, element_size: int, *, is_roomy: bool = True) -> Tile:
    """Rows are the heads of one token. ``is_roomy``: see `headrace.kernels.operation.LARGE_BLOCK`."""
    rows = min(max(16, next_power_of_2(num_heads)), MOST_ROWS)
    if element_size > 2:
        return Tile(rows, 16, 4 if rows < MOST_ROWS else 8, 1)
    if rows < MOST_ROWS:
        return Tile(rows, 32, 4, 3 if is_roomy else 2)
    return Tile(rows, 64, 8, 2) if is_roomy else Tile(16, 32, 4, 2)


def chunk_tile(element_size: int, *, is_roomy: bool = True) -> Tile:
    """Rows are tokens times heads."""
    if element_size > 2:
        return Tile(32, 16, 8, 1)
    return Tile(MOST_ROWS, 64, 8, 2) if is_roomy else Tile(32, 32, 8, 1)


@triton.jit
def _load_rows(
    pages_ptr, table_ptr, at, end, page_stride, PAGE: tl.constexpr, L: tl.constexpr, E: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, BOUNDED: tl.constexpr,
):
    """Rows at positions ``at + [0, BLOCK_N)``: latents [BLOCK_N, BLOCK_L] and rotated parts [BLOCK_N, BLOCK_E]; ``at``
    is a multiple of BLOCK_N. When BOUNDED, zeros from ``end`` on, where pages may hold another request's data or NaN;
    otherwise all positions are known to be before it."""
    dim, turned, position = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_E), at + tl.arange(0, BLOCK_N)
    # int64: page * page_stride exceeds 2**31 elements in a large pool
    if PAGE % BLOCK_N == 0:  # one page has them all
        page = tl.load(table_ptr + at // PAGE).to(tl.int64)
        rows = pages_ptr + page * page_stride + ((at % PAGE) + tl.arange(0, BLOCK_N))[:, None] * (L + E)
    else:
        page = tl.load(table_ptr + position // PAGE, mask=position < end, other=0).to(tl.int64)
        rows = pages_ptr + (page * page_stride + (position % PAGE) * (L + E))[:, None]
    pointers, turned_pointers = rows + dim[None, :], rows + L + turned[None, :]
    if BOUNDED or BLOCK_L != L or BLOCK_E != E:
        inside = (position < end)[:, None]
        latent = tl.load(pointers, mask=inside & (dim < L)[None, :], other=0.0)
        return latent, tl.load(turned_pointers, mask=inside & (turned < E)[None, :], other=0.0)
    else:
        return tl.load(pointers), tl.load(turned_pointers)


@triton.jit
def _load_queries(q_ptr, row, valid, L: tl.constexpr, E: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr,
                  FP8: tl.constexpr):
    """Rows [M] of q: their first L dims, and the rotated ones; zeros where not ``valid``."""
    dim, turned = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_E)
    base = q_ptr + row[:, None] * (L + E)
    q = tl.load(base + dim[None, :], mask=valid[:, None] & (dim < L)[None, :], other=0.0)
    q_turned = tl.load(base + L + turned[None, :], mask=valid[:, None] & (turned < E)[None, :], other=0.0)
    if FP8:
        q, q_turned = as_half(q), as_half(q_turned)
    return q, q_turned


@triton.jit
def _attend_rows(
    q, q_turned, acc, top, total, position, start, stop, end, scale, pages_ptr, table_ptr, page_stride,
    PAGE: tl.constexpr, L: tl.constexpr, E: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):
    """Add the keys [start, stop), of which those before ``end`` exist, to the running sums (`accumulate`) of queries
    at ``position`` [M]; ``start`` is a multiple of BLOCK_N. Unless BOUNDED, ``stop`` is as well, and every query sees
    all keys."""
    for at in tl.range(start, stop, BLOCK_N):
        latent, turned = _load_rows(
            pages_ptr, table_ptr, at, end, page_stride, PAGE, L, E, BLOCK_L, BLOCK_E, BLOCK_N, BOUNDED
        )
        latent, turned = latent.to(q.dtype), turned.to(q.dtype)  # pages may be of 8-bit floats
        logits = tl.dot(latent, tl.trans(q), input_precision=PRECISION)
        logits = tl.dot(turned, tl.trans(q_turned), logits, input_precision=PRECISION) * scale
        if BOUNDED:
            key = at + tl.arange(0, BLOCK_N)
            logits = tl.where(key[:, None] <= position[None, :], logits, MASKED)
        new_top = tl.maximum(top, tl.max(logits, axis=0))
        weights = tl.exp2(logits - new_top[None, :])
        # earlier sums are relative to the old maximum; this also erases blocks in which a row was masked throughout
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, axis=0)
        acc = tl.dot(tl.trans(latent), weights.to(q.dtype), acc * fade[None, :], input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit
def _share_out(
    query_start_ptr, kv_lens_ptr, num_requests, slot, programs, OPEN: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """The share of program ``slot`` in the keys of all decodes: ``(request, index of its split, blocks per split,
    number of the request's splits)``; request BLOCK_R if there is none. Splits are equally long but the last of each
    request, and so long that ``programs`` of them hold all keys: as many more are needed as there are requests."""
    other = tl.arange(0, BLOCK_R)
    is_there = other < num_requests
    lens = tl.load(kv_lens_ptr + other, mask=is_there, other=0)
    if OPEN:
        begins = tl.load(query_start_ptr + other, mask=is_there, other=0)
        is_there = tl.load(query_start_ptr + other + 1, mask=is_there, other=0) - begins == 1
    # at least one block, so that a request of length 0 has a program that writes its output
    blocks = tl.where(is_there, tl.maximum((lens + BLOCK_N - 1) // BLOCK_N, 1), 0)
    # No loop looks for a length that needs fewer programs: behind one Triton loses the alignment of all addresses.
    each = tl.maximum((tl.sum(blocks, 0) + programs - 1) // programs, 1)
    counts = (blocks + each - 1) // each
    ends = tl.cumsum(counts, 0)
    request = tl.sum((ends <= slot).to(tl.int32), 0)
    count = tl.sum(tl.where(other == request, counts, 0), 0)
    split = slot - (tl.sum(tl.where(other == request, ends, 0), 0) - count)
    return tl.where(slot < tl.sum(counts, 0), request, BLOCK_R), split, each, count


@triton.jit(do_not_specialize=["num_requests", "programs", "table_stride"])
def _decode_kernel(
    q_ptr, pages_ptr, out_ptr, partial_ptr, stats_ptr, shares_ptr, query_start_ptr, kv_lens_ptr, table_ptr,
    table_stride, page_stride, scale, num_requests, programs, PAGE: tl.constexpr, H: tl.constexpr, L: tl.constexpr,
    E: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, OPEN: tl.constexpr, IS_SPLIT: tl.constexpr, PRECISION: tl.constexpr, FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    # Lengths were written before the previous kernel started (see `wait_for_previous`): the search for this program's
    # share overlaps its end.
    part, slot = tl.program_id(0), tl.program_id(1)
    if IS_SPLIT:
        request, split, each, count = _share_out(
            query_start_ptr, kv_lens_ptr, num_requests, slot, programs, OPEN, BLOCK_N, BLOCK_R
        )
        is_used = request < BLOCK_R
    else:
        request, split, each, count = slot, 0, 1 << 24, 1
        is_used = request >= 0
    token = request
    if OPEN:  # only requests of one query token are decodes, the others are left to `attend_chunks`
        begin = tl.minimum(request, num_requests - 1)
        token = tl.load(query_start_ptr + begin)
        is_used = is_used & (tl.load(query_start_ptr + begin + 1) - token == 1)
    wait_for_previous(PDL)
    if is_used:
        kv_len = tl.load(kv_lens_ptr + request)
        start = split * each * BLOCK_N
        end = tl.minimum(start + each * BLOCK_N, kv_len)
        head = part * BLOCK_M + tl.arange(0, BLOCK_M)
        valid = head < H
        row = token.to(tl.int64) * H + head
        q, q_turned = _load_queries(q_ptr, row, valid, L, E, BLOCK_L, BLOCK_E, FP8)
        top = tl.full([BLOCK_M], MASKED, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_L, BLOCK_M], tl.float32)
        position = tl.full([BLOCK_M], 0, tl.int32) + end - 1
        acc, top, total = _attend_rows(
            q, q_turned, acc, top, total, position, start, end, end, scale, pages_ptr,
            table_ptr + request.to(tl.int64) * table_stride, page_stride, PAGE, L, E, BLOCK_L, BLOCK_E, BLOCK_N, True,
            PRECISION
        )
        dim = tl.arange(0, BLOCK_L)
        inside = valid[None, :] & (dim < L)[:, None]
        if count == 1:
            # a request of length 0 (padding of a captured graph) gives zeros, not NaN
            out = acc / tl.where(total > 0, total, 1.0)[None, :]
            tl.store(out_ptr + row[None, :] * L + dim[:, None], out.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            at = slot.to(tl.int64) * H + head
            tl.store(partial_ptr + at[None, :] * L + dim[:, None], acc, mask=inside)
            tl.store(stats_ptr + at * 2, top, mask=valid)
            tl.store(stats_ptr + at * 2 + 1, total, mask=valid)
        if IS_SPLIT and split == 0:  # the same of all parts
            tl.store(shares_ptr + request * 2, slot)
            tl.store(shares_ptr + request * 2 + 1, count)


@triton.jit
def _combine_kernel(
    partial_ptr, stats_ptr, shares_ptr, query_start_ptr, out_ptr, H: tl.constexpr, L: tl.constexpr,
    DIMS: tl.constexpr, SPLITS: tl.constexpr, OPEN: tl.constexpr, PDL: tl.constexpr,
):
    """Merge the partial results of one request and head, SPLITS at a time, and write DIMS dims of its output. The order
    is fixed, and so is the result."""
    request, head, dim = tl.program_id(0), tl.program_id(1), tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    wait_for_previous(PDL)
    token, is_used = request, request >= 0
    if OPEN:
        token = tl.load(query_start_ptr + request)
        is_used = tl.load(query_start_ptr + request + 1) - token == 1
    if is_used:
        base, count = tl.load(shares_ptr + request * 2), tl.load(shares_ptr + request * 2 + 1)
        if count > 1:  # else the program that read all keys has written the output
            top = tl.max(tl.full([1], MASKED, tl.float32), 0)
            total = top * 0.0
            acc = tl.zeros([DIMS], tl.float32)
            for first in range(0, count, SPLITS):
                split = first + tl.arange(0, SPLITS)
                known = split < count
                at = (base + split).to(tl.int64) * H + head
                part_top = tl.load(stats_ptr + at * 2, mask=known, other=MASKED)
                part_total = tl.load(stats_ptr + at * 2 + 1, mask=known, other=0.0)
                part = tl.load(
                    partial_ptr + at[:, None] * L + dim[None, :], mask=known[:, None] & (dim < L)[None, :], other=0.0
                )
                new_top = tl.maximum(top, tl.max(part_top, 0))
                fade, part_fade = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
                total = total * fade + tl.sum(part_total * part_fade, 0)
                acc = acc * fade + tl.sum(part * part_fade[:, None], 0)
                top = new_top
            out = (acc / total).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + (token.to(tl.int64) * H + head) * L + dim, out, mask=dim < L)


@triton.jit(do_not_specialize=["table_stride"])
def _chunk_kernel(
    q_ptr, pages_ptr, out_ptr, blocks_ptr, query_start_ptr, kv_lens_ptr, table_ptr, table_stride, page_stride, scale,
    PAGE: tl.constexpr, H: tl.constexpr, L: tl.constexpr, E: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr,
    PRECISION: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):
    # nothing is loaded before the wait: in the first layer the previous kernels may have written the plan as well
    wait_for_previous(PDL)
    block = tl.program_id(1)
    request = tl.load(blocks_ptr + 2 * block)
    if request >= 0:
        first = tl.load(blocks_ptr + 2 * block + 1)
        begin = tl.load(query_start_ptr + request)
        query_len = tl.load(query_start_ptr + request + 1) - begin
        kv_len = tl.load(kv_lens_ptr + request)
        table = table_ptr + request.to(tl.int64) * table_stride
        # rows: TOKENS tokens times GROUP heads, heads fastest
        at = tl.arange(0, BLOCK_M)
        token, head = first + at // GROUP, tl.program_id(0) * GROUP + at % GROUP
        valid = (at < TOKENS * GROUP) & (token < query_len) & (head < H)
        row = (begin + token).to(tl.int64) * H + head
        q, q_turned = _load_queries(q_ptr, row, valid, L, E, BLOCK_L, BLOCK_E, FP8)
        position = kv_len - query_len + token  # the chunk is the end of its request
        first_position = kv_len - query_len + first
        stop = tl.minimum(first_position + TOKENS, kv_len)  # first key that no row sees
        top = tl.full([BLOCK_M], MASKED, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_L, BLOCK_M], tl.float32)
        whole = (first_position + 1) // BLOCK_N * BLOCK_N  # keys that every row sees
        acc, top, total = _attend_rows(
            q, q_turned, acc, top, total, position, 0, whole, kv_len, scale, pages_ptr, table, page_stride, PAGE, L, E,
            BLOCK_L, BLOCK_E, BLOCK_N, False, PRECISION
        )
        acc, top, total = _attend_rows(
            q, q_turned, acc, top, total, position, whole, stop, kv_len, scale, pages_ptr, table, page_stride, PAGE, L,
            E, BLOCK_L, BLOCK_E, BLOCK_N, True, PRECISION
        )
        dim = tl.arange(0, BLOCK_L)
        tl.store(
            out_ptr + row[None, :] * L + dim[:, None], (acc / total[None, :]).to(out_ptr.dtype.element_ty),
            mask=valid[None, :] & (dim < L)[:, None]
        )


def _constants(q: torch.Tensor, pages: torch.Tensor, value_dim: int, scale: float) -> dict[str, Any]:
    turned_dim = pages.shape[3] - value_dim
    return dict(
        scale=scale * LOG2_E, page_stride=pages.stride(0), PAGE=pages.shape[1], H=q.shape[1], L=value_dim,
        E=turned_dim, BLOCK_L=block_dim(value_dim), BLOCK_E=block_dim(turned_dim),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", FP8=rounds_to_half(q, pages),
    )


@dataclass(frozen=True)
class LatentWorkspace:
    """Partial results of splits. Kept for the backend's life, since captured graphs hold its addresses; launches that
    share it must be on one stream. ``partial`` [slots * H * L] and ``stats`` [slots * H * 2] (maximum, denominator)
    float32; ``shares`` [slots, 2] int32: each request's first slot, and how many it has."""

    partial: torch.Tensor
    stats: torch.Tensor
    shares: torch.Tensor

    @classmethod
    def allocate(cls, processors: int, num_heads: int, value_dim: int, device: torch.device) -> LatentWorkspace:
        """For `PROGRAMS` programs on each of ``processors`` SMs, and as many requests."""
        slots = 2 * PROGRAMS * processors
        partial, stats = (
            torch.empty(slots * num_heads * width, dtype=torch.float32, device=device) for width in (value_dim, 2)
        )
        # Zeros: a dry run (`headrace.kernels.precompile`) may combine what no kernel has split.
        return cls(partial, stats, torch.zeros((slots, 2), dtype=torch.int32, device=device))


def decode_latents(
    q: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, workspace: LatentWorkspace, step: DecodeStep, tile: Tile,
    *, scale: float, pdl: bool = False,
) -> None:
    """Attention of the step's decodes: rows of ``q`` to the same rows of ``out``. The grid depends only on
    ``step.num_requests`` and ``step.max_kv_len``, so the launches may be captured."""
    num_heads, value_dim, count = q.shape[1], out.shape[2], step.num_requests
    parts, is_open = ceil_div(num_heads, tile.rows), step.query_start is not None
    programs = len(workspace.shares) // 2 // parts
    is_split = count < programs
    # no more slots than blocks of keys: the rest would be idle
    slots = min(programs + count, count * ceil_div(step.max_kv_len, tile.keys)) if is_split else count
    starts = step.kv_lens if step.query_start is None else step.query_start
    _decode_kernel[(parts, slots)](
        q, pages, out, workspace.partial, workspace.stats, workspace.shares, starts, step.kv_lens, step.page_table,
        step.page_table.stride(0), num_requests=count, programs=programs,
        **_constants(q, pages, value_dim, scale), BLOCK_M=tile.rows, BLOCK_N=tile.keys,
        BLOCK_R=max(16, next_power_of_2(count)) if is_split else 1, OPEN=is_open, IS_SPLIT=is_split, PDL=pdl,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=pdl,
    )
    if is_split:
        dims = min(COMBINED_DIMS, block_dim(value_dim))
        _combine_kernel[(count, num_heads, ceil_div(value_dim, dims))](
            workspace.partial, workspace.stats, workspace.shares, starts, out, H=num_heads, L=value_dim, DIMS=dims,
            SPLITS=COMBINED_SPLITS, OPEN=is_open, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )


def attend_chunks(
    q: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, plan: PrefillPlan,
    step: tuple[torch.Tensor, torch.Tensor, torch.Tensor], *, scale: float, pdl: bool = False,
) -> None:
    """Causal attention of the planned requests, whose rows of ``out`` are written; ``plan`` deals `chunk_group` heads
    of each token to a program. ``step`` is (query_start [R + 1], kv_lens [R], page_table [R, *]) of all requests,
    int32. The rows of the step must have been written to the pages."""
    if not plan.blocks.shape[0]:
        return
    query_start, kv_lens, page_table = step
    group, tile = chunk_group(q.shape[1], plan.tile), plan.tile
    _chunk_kernel[(ceil_div(q.shape[1], group), plan.blocks.shape[0])](
        q, pages, out, plan.blocks, query_start, kv_lens, page_table, page_table.stride(0),
        **_constants(q, pages, out.shape[2], scale), BLOCK_M=tile.rows, BLOCK_N=tile.keys, GROUP=group,
        TOKENS=plan.tokens, PDL=pdl, num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=pdl,
    )


def chunk_group(num_heads: int, tile: Tile) -> int:
    """Heads of a token that a program of `attend_chunks` has."""
    return min(num_heads, tile.rows)

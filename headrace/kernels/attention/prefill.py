"""Paged causal attention of ragged chunks in Triton; see `blocks` for the letters and layouts."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace.kernels.attention.blocks import (
    MASKED,
    Head,
    Tile,
    accumulate,
    as_half,
    find_scores,
    list_geometry,
    load_block,
    rounds_to_half,
)
from headrace.kernels.attention.splits import Splitting, SplitWorkspace, deal_splits
from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous
from headrace.kernels.operation import LARGE_BLOCK


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


@triton.jit(do_not_specialize=["first", "num_requests", "capacity", "tokens"])
def _plan_prefill_kernel(
    query_start_ptr, blocks_ptr, first, num_requests, capacity, tokens, LEAST: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Write ``(request, first token of the block)`` to ``blocks`` [capacity + 1, 2] int32 for every block of ``tokens``
    query tokens of requests with LEAST tokens or more. Late blocks of a request come first: they see the most keys, and
    long programs that start last would leave SMs idle. One program per request; the one after the last request fills
    unused entries with request -1, and the one behind all of them with zeros."""
    request = tl.program_id(0)
    # every program adds up the blocks of all requests before its own: no second launch, no atomics, a fixed order
    other = tl.arange(0, BLOCK_R)
    known = other < num_requests
    begin = tl.load(query_start_ptr + first + other, mask=known, other=0)
    end = tl.load(query_start_ptr + first + other + 1, mask=known, other=0)
    blocks = tl.where(end - begin >= LEAST, (end - begin + tokens - 1) // tokens, 0)
    base = tl.sum(tl.where(other < request, blocks, 0), axis=0)
    count = tl.sum(tl.where(other == request, blocks, 0), axis=0)
    if request == num_requests:
        for i in range(base, capacity):
            tl.store(blocks_ptr + 2 * i, -1)
        tl.store(blocks_ptr + 2 * capacity, 0)
        tl.store(blocks_ptr + 2 * capacity + 1, 0)
    else:
        for i in range(count):
            tl.store(blocks_ptr + 2 * (base + i), first + request)
            tl.store(blocks_ptr + 2 * (base + i) + 1, (count - 1 - i) * tokens)


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
            q = as_half(q)
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
                k = load_block(k_ptr, table, at, low, kv_len, head, page_stride_k, PAGE, K, E, BLOCK_E, BLOCK_N, False)
                logits = find_scores(q, k, scale, softcap, SOFTCAP, PRECISION)
                v = load_block(
                    v_ptr, table, at, low, kv_len, head, page_stride_v, PAGE, K, EV, BLOCK_EV, BLOCK_N, False
                )
                acc, top, total = accumulate(logits, v.to(q.dtype), acc, top, total, PRECISION)
            start = unmasked
        for at in tl.range(start, end, BLOCK_N):
            k = load_block(k_ptr, table, at, low, kv_len, head, page_stride_k, PAGE, K, E, BLOCK_E, BLOCK_N, True)
            logits = find_scores(q, k, scale, softcap, SOFTCAP, PRECISION)
            key = at + tl.arange(0, BLOCK_N)
            seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            logits = tl.where(seen, logits, MASKED)
            v = load_block(v_ptr, table, at, low, kv_len, head, page_stride_v, PAGE, K, EV, BLOCK_EV, BLOCK_N, True)
            acc, top, total = accumulate(logits, v.to(q.dtype), acc, top, total, PRECISION)

        out = acc / total[:, None]
        tl.store(
            out_ptr + q_row * EV + dim_v[None, :], out.to(out_ptr.dtype.element_ty),
            mask=valid[:, None] & (dim_v < EV)[None, :]
        )


@dataclass(frozen=True)
class PrefillPlan:
    """Which query tokens each program of `prefill` takes, ``tokens`` at most; made once a step, read by every layer.
    ``blocks`` [N, 2] int32 holds (request, first token within its chunk); request -1: no work, nor behind it.
    ``claims`` [2] int32: zeros, with which programs that stay count the blocks that they have taken, and themselves.

    With a ``workspace``, keys may be divided, which only own CUDA C++ can: see `deal_splits` for ``blocks`` [N, 4] and
    ``claims`` [4]."""

    blocks: torch.Tensor
    claims: torch.Tensor
    tile: Tile
    tokens: int
    workspace: SplitWorkspace | None = None


def plan_prefill(
    query_start: torch.Tensor, query_lens: list[int], *, first: int, group: int, tile: Tile,
    splitting: Splitting | None = None,
) -> PrefillPlan:
    """Plan requests ``first`` and later. ``query_start`` [R + 1] int32 is on the device, ``query_lens`` are the same
    lengths on the host, so that the grid is known without a synchronisation. With ``splitting`` their keys may be
    divided."""
    tile, tokens = _query_tile(group, tile)
    num_blocks = sum(ceil_div(n, tokens) for n in query_lens[first:])
    return _make_plan(query_start, num_blocks, first, len(query_lens) - first, (tile, tokens), splitting, least=1)


def plan_open_prefill(
    query_start: torch.Tensor, num_tokens: int, *, group: int, tile: Tile, splitting: Splitting | None = None
) -> PrefillPlan:
    """Plan requests of two tokens or more whose number and lengths only the device knows. Launches as many programs as
    ``num_tokens`` tokens can need; those without work return at once. May be captured."""
    tile, tokens = _query_tile(group, tile)
    num_requests = query_start.shape[0] - 1
    # sum of ceil(n / tokens) <= num_tokens // tokens + requests, of which at most num_tokens // 2 have two tokens
    num_blocks = num_tokens // tokens + min(num_requests, num_tokens // 2)
    return _make_plan(query_start, num_blocks, 0, num_requests, (tile, tokens), splitting, least=2)


def _query_tile(group: int, tile: Tile) -> tuple[Tile, int]:
    """The tile, and how many tokens it holds, each with all ``group`` query heads of a kv head."""
    if group > tile.rows:  # at least one token must fit
        tile = Tile(next_power_of_2(group), tile.keys, tile.num_warps, tile.num_stages)
    return tile, tile.rows // group


def _make_plan(
    query_start: torch.Tensor, num_blocks: int, first: int, num_requests: int, query_tile: tuple[Tile, int],
    splitting: Splitting | None, *, least: int,
) -> PrefillPlan:
    about, (tile, tokens) = (query_start, num_blocks, first, num_requests), query_tile
    if splitting is None:
        entries = _deal_blocks(*about, tokens, least=least)
        return PrefillPlan(entries[:-1], entries[-1], tile, tokens)
    entries = deal_splits(*about, tokens, least=least, splitting=splitting)
    return PrefillPlan(entries[:-1], entries[-1], tile, tokens, splitting.workspace)


def _deal_blocks(
    query_start: torch.Tensor, num_blocks: int, first: int, num_requests: int, tokens: int, *, least: int
) -> torch.Tensor:
    entries = torch.empty((num_blocks + 1, 2), dtype=torch.int32, device=query_start.device)
    # BLOCK_R at least 1024: nearly every step then uses the same compiled kernel
    _plan_prefill_kernel[(num_requests + 1,)](
        query_start, entries, first, num_requests, num_blocks, tokens, LEAST=least,
        BLOCK_R=max(1024, next_power_of_2(num_requests)), num_warps=4,
    )
    return entries


def prefill(
    q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, plan: PrefillPlan, head: Head,
    step: tuple[torch.Tensor, torch.Tensor, torch.Tensor], *, pdl: bool = False,
) -> None:
    """Causal attention of the planned requests, written into ``out`` [T, H, EV]; rows of other requests are left
    alone. q [T, H, E] and out are contiguous; ``pages`` are k's and v's; ``step`` is (query_start [R + 1], kv_lens [R],
    page_table [R, *]) of all requests, int32. The keys of the step must have been written to the pages."""
    (k_pages, v_pages), (query_start, kv_lens, page_table) = pages, step
    assert plan.workspace is None, "this kernel does not divide keys"
    if not plan.blocks.shape[0]:
        return
    # without sinks q stands in for their pointer, which the kernel then does not read
    _prefill_kernel[(k_pages.shape[2], plan.blocks.shape[0])](
        q, k_pages, v_pages, out, plan.blocks, query_start, kv_lens, page_table,
        head.sinks if head.sinks is not None else q, page_table.stride(0), **list_geometry(q, k_pages, v_pages),
        **head.constants(), BLOCK_M=plan.tile.rows, BLOCK_N=plan.tile.keys, TOKENS=plan.tokens,
        FP8=rounds_to_half(q, k_pages), PDL=pdl, num_warps=plan.tile.num_warps,
        num_stages=plan.tile.num_stages, launch_pdl=pdl,
    )

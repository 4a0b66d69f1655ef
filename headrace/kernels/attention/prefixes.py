"""Paged attention of decodes that begin with the same pages in Triton; see `blocks` for the letters and layouts.

Neighbours with the same leading pages form a group. One launch attends to these pages, once for all of a group: queries
of up to 64 rows fill a tile that a request alone leaves to padding, and keys are read once for all. A second launch
attends to what each request has behind them, and merges. Softmax is the same sum in another order, so a request's bits
depend on whether it is in a group.
"""

import torch
import triton
import triton.language as tl

from headrace.kernels.attention import LEAST_MEMBERS, PREFIX_STEP, PrefixGroups
from headrace.kernels.attention.blocks import (
    MASKED,
    Head,
    Tile,
    accumulate,
    find_scores,
    list_geometry,
    load_block,
)
from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous

GROUP_ROWS = 64
"""Query rows of a group's tile: those of a warp group's products."""
MOST_SPLITS = 8
"""Programs that share the pages of one group and kv head at most."""


def count_members(group: int) -> int:
    """The most decodes of a group, for ``group`` query heads a kv head; 0 where a tile holds too few."""
    members = GROUP_ROWS // next_power_of_2(group)
    return members if members >= 2 * LEAST_MEMBERS else 0


def prefix_tile(width: int, element_size: int) -> Tile:
    """Two programs of 16-bit keys fit on a multiprocessor."""
    if element_size > 2:
        return Tile(GROUP_ROWS, 32, 4, 1)
    return Tile(GROUP_ROWS, 64, 4, 5) if width <= 128 else Tile(GROUP_ROWS, 32, 4, 3)


def rest_tile(group: int, width: int, element_size: int) -> Tile:
    """Few keys each: programs hide each other's latency, so that they shall be small."""
    rows = max(16, next_power_of_2(group))
    if element_size > 2:
        return Tile(rows, 32 if width <= 128 else 16, 4, 1)
    return Tile(rows, 32, 2, 3) if width <= 128 else Tile(rows, 32, 4, 2)


@triton.jit
def _share_length(num_keys, splits, STEP: tl.constexpr):
    """The keys of each of ``splits`` programs, the last of which may get fewer or none."""
    return (num_keys // STEP + splits - 1) // splits * STEP


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"], do_not_specialize_on_alignment=["keys_ptr", "groups_ptr"]
)
def _prefix_kernel(
    q_ptr, k_ptr, v_ptr, partial_ptr, stats_ptr, keys_ptr, groups_ptr, table_ptr, table_stride, page_stride_k,
    page_stride_v, scale, softcap, num_rows, PAGE: tl.constexpr, K: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    EV: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_EV: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):
    """One share of a group's common keys and one kv head: un-normalised sums [splits, num_rows, EV], and (maximum,
    denominator) per row, where ``num_rows`` counts decodes times heads."""
    # heads vary fastest: concurrent programs then read whole pages, not stripes of them
    head, split, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # written before the previous kernel started
    first = tl.load(groups_ptr + group * 2).to(tl.int32)
    count = tl.load(groups_ptr + group * 2 + 1).to(tl.int32)
    num_keys = tl.load(keys_ptr + first).to(tl.int32)
    each = _share_length(num_keys, tl.num_programs(1), STEP)
    start = split * each
    end = tl.minimum(start + each, num_keys)
    wait_for_previous(PDL)
    if (count > 0) & (start < end):
        table = table_ptr + first.to(tl.int64) * table_stride
        row = tl.arange(0, BLOCK_M)
        member, in_group = row // BLOCK_G, row % BLOCK_G
        valid = (member < count) & (in_group < G)
        dim, dim_v = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_EV)
        q_row = (first + member).to(tl.int64) * (K * G) + head * G + in_group
        q = tl.load(q_ptr + q_row[:, None] * E + dim[None, :], mask=valid[:, None] & (dim < E)[None, :], other=0.0)
        top = tl.full([BLOCK_M], MASKED, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_EV], tl.float32)
        for at in tl.range(start, end, BLOCK_N):
            k = load_block(k_ptr, table, at, 0, end, head, page_stride_k, PAGE, K, E, BLOCK_E, BLOCK_N, False)
            logits = find_scores(q, k, scale, softcap, SOFTCAP, PRECISION)
            v = load_block(v_ptr, table, at, 0, end, head, page_stride_v, PAGE, K, EV, BLOCK_EV, BLOCK_N, False)
            acc, top, total = accumulate(logits, v.to(q.dtype), acc, top, total, PRECISION)
        part = q_row + split * num_rows
        tl.store(partial_ptr + part[:, None] * EV + dim_v[None, :], acc, mask=valid[:, None] & (dim_v < EV)[None, :])
        tl.store(stats_ptr + part * 2, top, mask=valid)
        tl.store(stats_ptr + part * 2 + 1, total, mask=valid)


@triton.jit(do_not_specialize=["num_rows", "table_stride", "splits"], do_not_specialize_on_alignment=["keys_ptr"])
def _rest_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, stats_ptr, keys_ptr, kv_lens_ptr, table_ptr, sinks_ptr, table_stride,
    page_stride_k, page_stride_v, scale, softcap, num_rows, splits, PAGE: tl.constexpr, K: tl.constexpr,
    G: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_EV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):
    """One decode and kv head: begin with what `_prefix_kernel` left, go on behind it, and write the output rows."""
    head, request = tl.program_id(0), tl.program_id(1)
    # written before the previous kernel started
    kv_len, begin = tl.load(kv_lens_ptr + request), tl.load(keys_ptr + request).to(tl.int32)
    wait_for_previous(PDL)
    row = tl.arange(0, BLOCK_M)
    valid = row < G
    dim, dim_v = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_EV)
    inside = valid[:, None] & (dim_v < EV)[None, :]
    q_row = request.to(tl.int64) * (K * G) + head * G + row
    q = tl.load(q_ptr + q_row[:, None] * E + dim[None, :], mask=valid[:, None] & (dim < E)[None, :], other=0.0)
    top = tl.full([BLOCK_M], MASKED, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        top = tl.load(sinks_ptr + head * G + row, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_EV], tl.float32)
    # shares that have keys; without a group there are none
    each = tl.maximum(_share_length(begin, splits, STEP), 1)
    for split in tl.range(0, (begin + each - 1) // each, num_stages=1):
        part = q_row + split * num_rows
        part_top = tl.load(stats_ptr + part * 2, mask=valid, other=MASKED)
        part_total = tl.load(stats_ptr + part * 2 + 1, mask=valid, other=0.0)
        part_acc = tl.load(partial_ptr + part[:, None] * EV + dim_v[None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, part_top)
        fade, part_fade = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
        total = total * fade + part_total * part_fade
        acc = acc * fade[:, None] + part_acc * part_fade[:, None]
        top = new_top
    table = table_ptr + request.to(tl.int64) * table_stride
    for at in tl.range(begin, kv_len, BLOCK_N):
        k = load_block(k_ptr, table, at, 0, kv_len, head, page_stride_k, PAGE, K, E, BLOCK_E, BLOCK_N, True)
        logits = find_scores(q, k, scale, softcap, SOFTCAP, PRECISION)
        logits = tl.where((at + tl.arange(0, BLOCK_N)) < kv_len, logits, MASKED)
        v = load_block(v_ptr, table, at, 0, kv_len, head, page_stride_v, PAGE, K, EV, BLOCK_EV, BLOCK_N, True)
        acc, top, total = accumulate(logits, v.to(q.dtype), acc, top, total, PRECISION)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + q_row[:, None] * EV + dim_v[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


def count_splits(num_requests: int, num_kv_heads: int, members: int, processors: int) -> int:
    """How many programs share the common keys of a group and kv head, so that full groups of so many decodes give each
    multiprocessor two. It depends only on what a captured graph fixes."""
    return max(1, min(MOST_SPLITS, 2 * processors // (num_kv_heads * ceil_div(num_requests, members))))


def decode_behind_prefixes(
    q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, head: Head, prefixes: PrefixGroups,
    lengths: tuple[torch.Tensor, torch.Tensor], *, processors: int, pdl: bool = False,
) -> None:
    """Attention of B decodes, the first rows of q [T, H, E], to the same rows of ``out`` [T, H, EV], both contiguous;
    ``pages`` are k's and v's, in q's dtype. ``lengths``: ``kv_lens`` [B, or more] and ``page_table`` [B or more, *]
    int32. Layers without a window, of at most as many query heads a kv head as `count_members` has room for.

    The grid depends only on B and the room for groups, so the launch may be captured."""
    (k_pages, v_pages), (kv_lens, page_table) = pages, lengths
    assert not head.window, "pages before a window are not read"
    geometry, constants = list_geometry(q, k_pages, v_pages), head.constants()
    del constants["WINDOW"]
    has_sinks = constants.pop("SINKS")
    size, num_kv_heads, group = len(prefixes.keys), k_pages.shape[2], geometry["G"]
    members = count_members(group)
    assert members, "too many query heads a kv head"
    splits = count_splits(size, num_kv_heads, members, processors)
    num_rows = size * q.shape[1]
    # of the graph's pool in a captured step: the layers use the same memory in turn
    partial = torch.empty(splits * num_rows * v_pages.shape[3], dtype=torch.float32, device=q.device)
    stats = torch.empty(splits * num_rows * 2, dtype=torch.float32, device=q.device)
    tile = prefix_tile(geometry["BLOCK_E"], q.element_size())
    _prefix_kernel[(num_kv_heads, splits, len(prefixes.groups))](
        q, k_pages, v_pages, partial, stats, prefixes.keys, prefixes.groups, page_table, page_table.stride(0),
        num_rows=num_rows, **geometry, **constants, BLOCK_G=GROUP_ROWS // members, BLOCK_M=tile.rows,
        BLOCK_N=tile.keys, STEP=PREFIX_STEP, num_warps=tile.num_warps, num_stages=tile.num_stages, PDL=pdl,
        launch_pdl=pdl,
    )
    tile = rest_tile(group, geometry["BLOCK_E"], q.element_size())
    _rest_kernel[(num_kv_heads, size)](
        q, k_pages, v_pages, out, partial, stats, prefixes.keys, kv_lens, page_table,
        head.sinks if head.sinks is not None else q, page_table.stride(0), num_rows=num_rows, splits=splits,
        **geometry, **constants, SINKS=has_sinks, BLOCK_M=tile.rows, BLOCK_N=tile.keys, STEP=PREFIX_STEP,
        num_warps=tile.num_warps, num_stages=tile.num_stages, PDL=pdl, launch_pdl=pdl,
    )

"""Paged attention of decodes in Triton, split over the keys; see `blocks` for the letters and layouts.

As in Flash-Decoding, into shares of equal length over all requests; each program computes its own share from the
lengths on the device.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from headrace.kernels.attention import LONG_CONTEXT
from headrace.kernels.attention.blocks import (
    MASKED,
    Head,
    Tile,
    accumulate,
    as_half,
    block_dim,
    find_block_bytes,
    find_scores,
    list_geometry,
    load_block,
    rounds_to_half,
)
from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous
from headrace.kernels.operation import LARGE_BLOCK

BISECTIONS = tl.constexpr(6)
"""Steps in which `_share_out` finds the least length of splits if it is one of 64, else one that is longer by a 64th of
what is possible."""
COMBINED_VALUES = 16384
"""Most values of a [CHUNK, BLOCK_G, BLOCK_EV] float32 block in `_combine`: 64 KiB of the 128 KiB of registers that the
four warps of a program can have."""


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
MANY_REQUESTS = 33
LONG_RULES = (SplitRule(3.5, 4, 5), SplitRule(7.5, 8, 5))
"""For more than ``MANY_REQUESTS`` of which one may have more than `LONG_CONTEXT` keys: a program that reads them by
itself ends long after all others."""


@dataclass(frozen=True)
class WholeRule:
    """Applies to at most ``most_tiles`` (request, kv head) pairs per SM whose keys are not divided: ``stages``."""

    most_tiles: float
    stages: int


WHOLE_RULES = {128: WholeRule(4.5, 7)}
"""By head dim. Of few programs the longest end by themselves, each as fast as its own loads in flight allow: two with
three blocks of 64 keys each do better on an SM than three with two. Of more it does not matter."""
LEAST_WGMMA_ROWS = 64
"""From so many rows on Hopper's tensor cores also read queries from shared memory, and Triton keeps a block more than
stages of keys and of values together: 294,924 bytes for 64 rows of 256 dims in seven stages of 64 keys."""
MOST_PROGRAMS = 8
"""The largest ``programs`` of a rule: `DecodeWorkspace` has a slot for each."""


def limit_stages(tile: Tile, width: int) -> Tile:
    """The tile of heads of ``width`` dims in half precision, padded, with no more stages than fit a block of
    `LARGE_BLOCK`."""
    if tile.rows < LEAST_WGMMA_ROWS:
        return tile
    blocks = (LARGE_BLOCK // (2 * width) - tile.rows) // tile.keys
    return replace(tile, num_stages=min(tile.num_stages, blocks - 1))


def plan_splits(
    num_requests: int, num_kv_heads: int, max_kv_len: int, *, head_dim: int, tile: Tile, processors: int,
    is_roomy: bool = True
) -> tuple[int, Tile]:
    """``(slots, tile)``: how many programs per kv head share the keys of all requests, and their tile. ``num_requests``
    slots mean no split: one program per request and kv head. ``max_kv_len`` is an upper bound, not a length, so that
    the result depends only on what a captured graph fixes."""
    rules = SPLIT_RULES.get(head_dim, OTHER_RULES) if is_roomy else OTHER_RULES
    for rule in (*rules, *(LONG_RULES if num_requests > MANY_REQUESTS and max_kv_len > LONG_CONTEXT else ())):
        if num_requests * num_kv_heads <= rule.most_tiles * processors:
            # one stage means float32, which keeps its small tile
            split = tile
            if tile.num_stages > 1 and is_roomy:
                split = limit_stages(replace(tile, keys=64, num_stages=rule.stages), block_dim(head_dim))
            # no more slots than blocks of keys: the rest would be idle
            slots = min(rule.programs * processors // num_kv_heads, num_requests * ceil_div(max_kv_len, split.keys))
            # `_share_out` relies on this: a request has a slot at least, and one is left
            if slots > num_requests:
                return slots, split
    whole = WHOLE_RULES.get(head_dim)
    if (
        whole is not None and is_roomy and tile.num_stages > 1
        and num_requests * num_kv_heads <= whole.most_tiles * processors
    ):
        tile = replace(tile, num_stages=whole.stages)
    return num_requests, tile


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
    and as short as ``slots``, of which there are more than requests, allow; nearly so where that is long. Every program
    computes this alone, from the same lengths: no launch to plan and no communication."""
    other = tl.arange(0, BLOCK_R)
    is_there = other < num_requests
    lens = tl.load(kv_lens_ptr + other, mask=is_there, other=0)
    blocks = (lens + BLOCK_N - 1) // BLOCK_N
    if WINDOW > 0:  # whole blocks before the window are not read
        blocks -= tl.maximum(lens - WINDOW, 0) // BLOCK_N
    # at least one block, so that a request of length 0 has a program that writes its output
    blocks = tl.where(is_there, tl.maximum(blocks, 1), 0)
    # Rounding each request up may need more slots than there are, by one a request at most: the least length that fits
    # lies between these two. Bisected, not counted up: Triton 3.7 knows nothing of what a `while` gives, and then loads
    # keys neither 16 bytes at a time nor ahead.
    total = tl.sum(blocks, 0)
    low, each = (total + slots - 1) // slots, (total + slots - num_requests - 1) // (slots - num_requests)
    for _ in tl.static_range(BISECTIONS):
        middle = (low + each) // 2
        fits = tl.sum((blocks + middle - 1) // middle, 0) <= slots
        low, each = tl.where(fits, low, middle + 1), tl.where(fits, middle, each)
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
            q = as_half(q)
        top = tl.full([BLOCK_M], MASKED, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if SINKS:  # with several splits `_combine` adds it
            sink = tl.load(sinks_ptr + head * G + row, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
            top = tl.where(count == 1, sink, top)
            total += tl.where(count == 1, 1.0, 0.0)
        acc = tl.zeros([BLOCK_M, BLOCK_EV], tl.float32)
        for at in tl.range(start, end, BLOCK_N):
            k = load_block(k_ptr, table, at, begin, end, head, page_stride_k, PAGE, K, E, BLOCK_E, BLOCK_N, True)
            logits = find_scores(q, k, scale, softcap, SOFTCAP, PRECISION)
            key = at + tl.arange(0, BLOCK_N)
            logits = tl.where((key < end) & (key >= begin), logits, MASKED)
            v = load_block(v_ptr, table, at, begin, end, head, page_stride_v, PAGE, K, EV, BLOCK_EV, BLOCK_N, True)
            acc, top, total = accumulate(logits, v.to(q.dtype), acc, top, total, PRECISION)
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
    geometry, constants = list_geometry(q, k_pages, v_pages), head.constants()
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
    combining = dict(BLOCK_G=rows, CHUNK=max(1, min(16, COMBINED_VALUES // (rows * geometry["BLOCK_EV"]))))
    _decode_kernel[(k_pages.shape[2], slots)](
        q, k_pages, v_pages, out, workspace.partial, workspace.stats, workspace.counters,
        step.query_start if is_open else step.kv_lens, step.kv_lens, step.page_table,
        head.sinks if head.sinks is not None else q, step.page_table.stride(0), num_requests=count, **geometry,
        **constants, BLOCK_M=tile.rows, BLOCK_N=tile.keys, IS_SPLIT=slots > count,
        BLOCK_R=1 if count == 1 or slots == count else max(16, next_power_of_2(count)), OPEN=is_open, **combining,
        FP8=rounds_to_half(q, k_pages), num_warps=tile.num_warps, num_stages=tile.num_stages,
        PDL=pdl, launch_pdl=pdl,
    )

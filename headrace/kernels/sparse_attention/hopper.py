"""Sparse latent attention over packed slots on Hopper in own CUDA C++ (``csrc/cuda/sparse_attention.cu``): slots are
unpacked once for 64 heads by a warpgroup of their own, while two others multiply with wgmma.

T tokens, H heads, E head dim (512), K splits.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_uint64, c_void_p
from functools import cache

import torch

from headrace.kernels.cuda_source import CudaKernel, address_of, cache_compiled, fallback, load_kernel
from headrace.kernels.launch import ceil_div
from headrace.kernels.sparse_attention import Queries, SeenSlots, triton

HEADS, SLOTS, THREADS = 64, 64, 384
"""As in ``sparse_attention.cu``: heads of a block, slots that it multiplies at a time, its threads."""
HEAD_DIM, ROTARY_DIM, VALUE_BYTES = 512, 64, 576
# 1024 to align the swizzled tiles, queries and two stages of vectors, the weights' tile, maxima and sums, angles,
# logits that the two sides exchange, barriers
SHARED_BYTES = (
    1024 + 3 * HEADS * HEAD_DIM * 2 + HEADS * SLOTS * 2 + 4 * HEADS * 4 + ROTARY_DIM * 4 + HEADS * SLOTS * 4 + 4 * 8
)
PIECE_TIME, COMBINE_TIME, SUMS_TIME = 3.0, 3.0, 0.07
"""Microseconds on an H200: of a block for a piece; of adding up splits, and more for each split of each item."""
MOST_SPLITS = 32
"""See `triton.MOST_SPLITS`."""


class _Seen(ctypes.Structure):
    """``Seen`` of the source."""

    _fields_ = (
        ("values", c_void_p), ("scales", c_void_p), ("page_bytes", c_uint64), ("numbers", c_void_p),
        ("counts", c_void_p), ("rows", c_void_p), ("width", c_int), ("per_page", c_int),
    )


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        ("q", c_void_p), ("positions", c_void_p), ("cos_sin", c_void_p), ("sinks", c_void_p), ("out", c_void_p),
        ("sums", c_void_p), ("stats", c_void_p), ("norm_eps", c_float), ("scale", c_float), ("tokens", c_int),
        ("heads", c_int), ("splits", c_int),
    )


@cache_compiled
def find_kernel(device: torch.device) -> CudaKernel | None:
    """The kernel, compiled unless cached; None, with a warning, where that fails."""
    with fallback("sparse attention runs in Triton"):
        return load_kernel("sparse_attention", device, SHARED_BYTES, "attend_slots")
    return None


@cache
def count_programs(device: torch.device) -> int:
    """Blocks that run at once: one per SM."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _describe(seen: SeenSlots | None) -> _Seen:
    if seen is None:
        return _Seen()
    values, scales = seen.slots.values, seen.slots.scales
    assert scales is not None and values.shape[2] == VALUE_BYTES and values.stride()[1:] == (VALUE_BYTES, 1)
    assert values.stride(0) % 16 == 0 and values.data_ptr() % 16 == 0 and scales.data_ptr() % 8 == 0
    assert seen.numbers.is_contiguous()
    return _Seen(
        values.data_ptr(), scales.data_ptr(), values.stride(0), seen.numbers.data_ptr(), seen.counts.data_ptr(),
        address_of(seen.rows), seen.numbers.shape[1], seen.slots.per_page,
    )


def choose_splits(items: int, pieces: int, programs: int) -> int:
    """Among how many blocks to divide the ``pieces`` (of `SLOTS` slots) of each of ``items`` (64 heads of a token): so
    many as take the least time, by `PIECE_TIME`, `COMBINE_TIME` and `SUMS_TIME`."""
    best, least = 1, PIECE_TIME * pieces
    for splits in range(2, min(pieces, MOST_SPLITS, programs // items) + 1):
        time = PIECE_TIME * ceil_div(pieces, splits) + COMBINE_TIME + SUMS_TIME * items * splits
        if time < least:
            best, least = splits, time
    return best


def attend_slots(
    queries: Queries, window: SeenSlots, entries: SeenSlots | None, *, sinks: torch.Tensor, scale: float
) -> torch.Tensor:
    """See `ATTEND_SLOTS`; ``window`` has a row for each token."""
    q = queries.q
    kernel = find_kernel(q.device)
    if kernel is None:
        return triton.attend_slots_pdl(queries, window, entries, sinks=sinks, scale=scale)
    (num_tokens, num_heads, head_dim), programs = q.shape, count_programs(q.device)
    assert q.is_contiguous() and window.rows is None and queries.cos_sin.is_contiguous()
    assert (head_dim, queries.cos_sin.shape[1]) == (HEAD_DIM, ROTARY_DIM)
    out = torch.empty_like(q)
    if not num_tokens:
        return out
    items = num_tokens * ceil_div(num_heads, HEADS)
    pieces = ceil_div(window.numbers.shape[1], SLOTS)
    pieces += 0 if entries is None else ceil_div(entries.numbers.shape[1], SLOTS)
    splits = choose_splits(items, pieces, programs)
    parts = triton.make_parts(q, splits)
    sums, stats = (None, None) if parts is None else (part.data_ptr() for part in parts)
    call = _Call(
        q.data_ptr(), queries.positions.data_ptr(), queries.cos_sin.data_ptr(), sinks.data_ptr(), out.data_ptr(), sums,
        stats, queries.norm_eps, scale, num_tokens, num_heads, splits,
    )
    num_blocks = min(items * splits, programs)
    kernel.launch(num_blocks, THREADS, call, _describe(window), _describe(entries), is_dependent=True)
    if parts is not None:
        triton.combine(parts, queries, sinks, out, pdl=True)
    return out

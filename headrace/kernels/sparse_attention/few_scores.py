"""Few index scores in own CUDA C++ (``csrc/cuda/index_scores.cu``, which says how it works).

T tokens, H index heads, N entries.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_uint64, c_void_p

import torch

from headrace.kernels.cuda_source import CudaKernel, cache_compiled, fallback, load_kernel
from headrace.kernels.latents.slots import Slots
from headrace.kernels.launch import ceil_div
from headrace.kernels.sparse_attention import EntryView, Queries, indexer, paired_scores

DIMS, KEYS, THREADS = 128, 128, 256
"""As in the source: dims of a key, keys that a block scores at a time, its threads."""
MOST_SCORES = 1 << 16
"""Tokens times entries up to which this is faster on an H100 than Triton's kernel."""
MOST_HEADS = 64


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        *(
            (name, c_void_p) for name in
            ("q", "positions", "cos_sin", "weights", "requests", "visible", "table", "keys", "scales", "scores")
        ),
        *((name, c_uint64) for name in ("weights_stride", "table_width", "page_bytes")),
        *(
            (name, c_int) for name in
            ("slot_bytes", "per_page", "first_token", "columns", "top_k", "rotated", "is_half", "parts")
        ),
        ("scale", c_float),
    )


@cache_compiled
def find_kernel(num_heads: int, is_narrow: bool, device: torch.device) -> CudaKernel | None:
    """The kernel for keys in 8 bits or in MXFP4, compiled unless cached; None, with a warning, where that fails."""
    with fallback("few index scores are computed in Triton"):
        return load_kernel("index_scores", device, HEADS=num_heads, NARROW=int(is_narrow))
    return None


def takes(queries: Queries, weights: torch.Tensor, keys: Slots) -> bool:
    """Whether the source computes these."""
    num_heads, dim = queries.q.shape[1:]
    return (
        keys.holds_keys and dim == DIMS and num_heads % 8 == 0 and num_heads <= MOST_HEADS
        and queries.q.dtype == torch.bfloat16 and weights.dtype in (torch.float32, torch.bfloat16)
        and keys.values.stride(0) % 16 == 0 and keys.values.stride(1) % 16 == 0 and keys.values.data_ptr() % 16 == 0
    )


def index_scores(
    queries: Queries, weights: torch.Tensor, keys: Slots, view: EntryView, *, scale: float, top_k: int, tokens: slice
) -> torch.Tensor:
    """See `INDEX_SCORES`; more scores, and what `takes` refuses, are left to `paired_scores`."""
    first, until, _ = tokens.indices(len(queries.q))
    count, num_heads = until - first, queries.q.shape[1]
    # of any step, few scores or not: a start has the largest ones, and no request may wait for a compiler
    kernel = find_kernel(num_heads, keys.is_mxfp4, queries.q.device) if takes(queries, weights, keys) else None
    if kernel is None or not 0 < count * view.longest <= MOST_SCORES:
        return paired_scores.index_scores_pdl(queries, weights, keys, view, scale=scale, top_k=top_k, tokens=tokens)
    scores = torch.empty((count, view.longest), dtype=torch.float32, device=queries.q.device)
    assert queries.q.is_contiguous() and weights.stride(1) == 1 and view.page_table.stride(1) == 1
    assert queries.cos_sin.is_contiguous() and keys.scales is not None
    parts = min(ceil_div(view.longest, KEYS), max(1, indexer.PROGRAMS // count))
    call = _Call(
        queries.q.data_ptr(), queries.positions.data_ptr(), queries.cos_sin.data_ptr(), weights.data_ptr(),
        view.requests.data_ptr(), view.visible.data_ptr(), view.page_table.data_ptr(), keys.values.data_ptr(),
        keys.scales.data_ptr(), scores.data_ptr(), weights.stride(0), view.page_table.stride(0), keys.values.stride(0),
        keys.values.stride(1), keys.per_page, first, view.longest, top_k, queries.cos_sin.shape[1],
        int(weights.dtype == torch.bfloat16), parts, scale,
    )
    kernel.launch(count * parts, THREADS, call, is_dependent=True)
    return scores

"""Exact selection of the highest scores in own CUDA C++ (``csrc/cuda/select_entries.cu``), a block a token.

T tokens, N entries.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_uint64, c_void_p

import torch

from headrace.kernels.cuda_source import CudaKernel, cache_compiled, fallback, load_kernel
from headrace.kernels.sparse_attention import EntryView, indexer

MOST_HELD = 4096
"""Scores of a row that ``select_short`` holds in registers: 8 for each of its 512 threads."""
KERNELS = {"select_short": 512, "select_long": 1024}
"""Entry points and their threads, as in the source."""


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        ("scores", c_void_p), ("requests", c_void_p), ("visible", c_void_p), ("table", c_void_p), ("slots", c_void_p),
        ("table_width", c_uint64), ("columns", c_int), ("first_token", c_int), ("top_k", c_int), ("per_page", c_int),
    )


@cache_compiled
def find_kernels(device: torch.device) -> dict[str, CudaKernel] | None:
    """All kernels by entry point, compiled unless cached, so that none is loaded while a graph is captured; None, with
    a warning, where that fails."""
    with fallback("entries are selected in Triton"):
        return {entry: load_kernel("select_entries", device, 0, entry) for entry in KERNELS}
    return None


def select_entries(
    scores: torch.Tensor, view: EntryView, *, top_k: int, per_page: int, tokens: slice
) -> torch.Tensor:
    """See `SELECT_ENTRIES`; in ascending order, and of equal scores that do not all fit the first are taken."""
    kernels = find_kernels(scores.device)
    if kernels is None:
        return indexer.select_entries_pdl(scores, view, top_k=top_k, per_page=per_page, tokens=tokens)
    assert view.page_table.stride(1) == 1 and scores.is_contiguous()
    out = torch.empty((len(scores), top_k), dtype=torch.int64, device=scores.device)
    if len(scores):
        entry = "select_short" if scores.shape[1] <= MOST_HELD else "select_long"
        call = _Call(
            scores.data_ptr(), view.requests.data_ptr(), view.visible.data_ptr(), view.page_table.data_ptr(),
            out.data_ptr(), view.page_table.stride(0), scores.shape[1], tokens.indices(len(view.visible))[0], top_k,
            per_page,
        )
        kernels[entry].launch(len(scores), KERNELS[entry], call, is_dependent=True)
    return out

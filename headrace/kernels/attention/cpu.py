"""Paged attention by own C++ kernels: decode split over keys, prefill in tiles; reads keys and values from the pages
without gathering them."""

from __future__ import annotations

import torch

from headrace.kernels.native import NATIVE


def paged_attention(
    q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], step: tuple[torch.Tensor, torch.Tensor, torch.Tensor], *,
    scale: float,
    softcap: float = 0.0, window: int = 0, sinks: torch.Tensor | None = None, scales: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Causal attention of ``q`` [T, H, E] on k [P, page_size, K, E] and v [P, page_size, K, V], to [T, H, V]; None
    while the native library is not loaded. ``step`` is query_start [R + 1], kv_lens [R] and page_table [R, *], all
    int32. Query i of a request's Q, at the end of its L positions, sees positions up to L - Q + i, with ``window`` > 0
    only the last ``window`` of these. ``sinks`` [H] float32. ``scales`` [P, 2, K, page_size] float32 for int8 pages
    (`headrace.kernels.attention.reference`)."""
    ops = NATIVE.find()
    return None if ops is None else ops.paged_attention(q, *pages, *step, scale, softcap, window, sinks, scales)

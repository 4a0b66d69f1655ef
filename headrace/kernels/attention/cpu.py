"""Paged attention by own C++ kernels: decode split over keys, prefill in tiles; reads keys and values where they
lie."""

from __future__ import annotations

import torch

from headrace.kernels.native import NATIVE


def paged_attention(
    q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], step: tuple[torch.Tensor, torch.Tensor, torch.Tensor], *,
    scale: float,
    softcap: float = 0.0, window: int = 0, sinks: torch.Tensor | None = None, scales: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """``q`` [T, H, E] on k [P, page, K, E] and v [P, page, K, V] to [T, H, V], or None while there are no kernels.
    ``step`` is query_start [R + 1], kv_lens [R] and page_table [R, *], all int32; query i of Q at the end of L
    positions sees those up to L - Q + i, and with ``window`` the latest that many. ``sinks`` [H] float32. ``scales``
    are those of pages of codes (`headrace.kernels.attention.reference`)."""
    ops = NATIVE.find()
    return None if ops is None else ops.paged_attention(q, *pages, *step, scale, softcap, window, sinks, scales)

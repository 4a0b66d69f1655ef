"""Attention of one request written out in plain torch: the oracle of every backend, and their path for rare features.

Q query tokens at the end of L cached positions, H heads, K kv heads, E head dim.
"""

from __future__ import annotations

import torch


def attend_densely(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int = 0, softcap: float = 0.0,
    sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """``q`` [Q, H, E] on ``k`` [L, K, E] and ``v`` [L, K, E_value]; returns [Q, H, E_value] in q's dtype.

    Query i sits at position L - Q + i and sees its own and earlier positions, with ``window`` > 0 the latest that many.
    Computed in float32 with a dense Q x L matrix per head. ``sinks`` [H] adds exp(sink) to the softmax denominator.
    """
    num_queries, num_heads, _ = q.shape
    length, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    # [K, G, Q, L]: G query heads share a kv head
    logits = torch.einsum("qkge,lke->kgql", q.float().unflatten(1, (num_kv_heads, group)), k.float()) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    query_at = torch.arange(length - num_queries, length, device=q.device)[:, None]
    key_at = torch.arange(length, device=q.device)
    seen = key_at <= query_at
    if window:
        seen &= key_at > query_at - window
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(num_kv_heads, group, 1, 1).expand(-1, -1, num_queries, -1)
        # the sink joins the denominator only: its weight is dropped below
        logits = torch.cat((logits, sink), dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., :length]
    return torch.einsum("kgql,lke->qkge", weights, v.float()).flatten(1, 2).to(q.dtype)


MOST_LOT = 16
MOST_CODE = 127
LEAST_CODED = 1e-30
"""Where nothing is larger, all codes are 0."""


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [..., E] to codes [..., E] int8 and scales [...] float32; a scale is no number, or infinite, where one of
    its numbers is."""
    x = x.float()
    top = x.abs().amax(-1)
    factor = torch.where(top > LEAST_CODED, MOST_CODE / top, 0.0)
    return torch.round(x * factor[..., None]).nan_to_num().to(torch.int8), top / MOST_CODE


def write_codes(
    pages: tuple[torch.Tensor, torch.Tensor], scales: torch.Tensor, slots: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor
) -> None:
    """Put ``k`` and ``v`` [T, K, E] at ``slots`` [T] int64 of pages of codes."""
    page_size = pages[0].shape[1]
    lot, quad = _sizes(page_size)
    page, place = slots // page_size, slots % page_size
    token = place % lot
    for side, (x, stored) in enumerate(((k, pages[0]), (v, pages[1]))):
        codes, scale = encode(x)
        scales[page, side, :, place] = scale
        if side == 0:
            _keys(stored)[page, place // lot, :, :, token] = codes.unflatten(-1, (-1, 4))
        else:
            _values(stored)[page, place // lot, :, token // quad, :, token % quad] = codes


def read_codes(
    pages: tuple[torch.Tensor, torch.Tensor], scales: torch.Tensor, page_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of some pages as float32 [positions, K, E]."""
    k, v = (stored.index_select(0, page_ids) for stored in pages)
    chosen = scales.index_select(0, page_ids).permute(1, 0, 3, 2).flatten(1, 2)[..., None]
    keys = _keys(k).permute(0, 1, 4, 2, 3, 5).flatten(0, 2).flatten(2)
    values = _values(v).permute(0, 1, 3, 5, 2, 4).flatten(0, 3)
    return keys * chosen[0], values * chosen[1]


def _sizes(page_size: int) -> tuple[int, int]:
    lot = min(page_size, MOST_LOT)
    return lot, min(lot, 4)


def _keys(pages: torch.Tensor) -> torch.Tensor:
    """[P, page_size, K, E] as [P, page_size / L, K, E / 4, L, 4]."""
    num_pages, page_size, num_kv_heads, dim = pages.shape
    lot, _ = _sizes(page_size)
    return pages.view(num_pages, page_size // lot, num_kv_heads, dim // 4, lot, 4)


def _values(pages: torch.Tensor) -> torch.Tensor:
    """[P, page_size, K, E] as [P, page_size / L, K, L / F, E, F]."""
    num_pages, page_size, num_kv_heads, dim = pages.shape
    lot, quad = _sizes(page_size)
    return pages.view(num_pages, page_size // lot, num_kv_heads, lot // quad, dim, quad)

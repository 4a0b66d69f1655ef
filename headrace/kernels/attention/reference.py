"""Attention of one request in plain torch: the oracle of every backend, and their path for rare features. Also the
layout of int8 KV pages, which the C++ kernels share (``codes.h``).

Q query tokens at the end of L cached positions, H heads, K kv heads, E head dim, P pages.

An int8 page holds codes -127 to 127 with a float32 scale per position, kv head and side, in ``scales`` [P, 2, K,
page_size], keys first. Positions are stored in blocks of 16 (or a smaller page), and inside a block so that the four
codes that an int8 dot-product instruction adds up are adjacent: keys four dims of one position, values four positions
of one dim. `_keys` and `_values` are views in that order of pages with the nominal shape [P, page_size, K, E].
"""

from __future__ import annotations

import torch


def attend_densely(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int = 0, softcap: float = 0.0,
    sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """``q`` [Q, H, E] on ``k`` [L, K, E] and ``v`` [L, K, E_value]; returns [Q, H, E_value] in q's dtype.

    Query i is at position L - Q + i and sees its own and earlier positions, with ``window`` > 0 only the last
    ``window`` of these. Computed in float32 with a dense Q x L matrix per head. ``softcap`` > 0 replaces logits x by
    softcap * tanh(x / softcap). ``sinks`` [H] adds exp(sink) to the softmax denominator.
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
        # the sink is part of the denominator only: its own weight is dropped below
        logits = torch.cat((logits, sink), dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., :length]
    return torch.einsum("kgql,lke->qkge", weights, v.float()).flatten(1, 2).to(q.dtype)


MOST_LOT = 16
"""Positions in a block of codes; pages of fewer are one block."""
MOST_CODE = 127
LEAST_CODED = 1e-30
"""A row with no larger magnitude gets codes 0: the inverse of its scale might overflow."""


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [..., E] to codes [..., E] int8 and scales [...] float32, value = code * scale. NaN or infinite values
    make their scale NaN or infinite, so that decoding does not hide them."""
    x = x.float()
    top = x.abs().amax(-1)
    factor = torch.where(top > LEAST_CODED, MOST_CODE / top, 0.0)
    return torch.round(x * factor[..., None]).nan_to_num().to(torch.int8), top / MOST_CODE


def write_codes(
    pages: tuple[torch.Tensor, torch.Tensor], scales: torch.Tensor, slots: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor
) -> None:
    """Encode ``k`` and ``v`` [T, K, E] and store them at ``slots`` [T] int64 (page * page_size + offset) of int8
    ``pages`` and ``scales`` [P, 2, K, page_size], in place."""
    page_size = pages[0].shape[1]
    lot, quad = _sizes(page_size)
    page, place = slots // page_size, slots % page_size
    token = place % lot  # position within its block
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
    """Keys and values of the pages ``page_ids`` [n], in that order, as float32 [n * page_size, K, E]."""
    k, v = (stored.index_select(0, page_ids) for stored in pages)
    # scales [n, 2, K, page_size] to [2, n * page_size, K, 1]; keys and values back to position, head, dim order
    chosen = scales.index_select(0, page_ids).permute(1, 0, 3, 2).flatten(1, 2)[..., None]
    keys = _keys(k).permute(0, 1, 4, 2, 3, 5).flatten(0, 2).flatten(2)
    values = _values(v).permute(0, 1, 3, 5, 2, 4).flatten(0, 3)
    return keys * chosen[0], values * chosen[1]


def _sizes(page_size: int) -> tuple[int, int]:
    """(positions in a block, positions whose value codes are adjacent)."""
    lot = min(page_size, MOST_LOT)
    return lot, min(lot, 4)


def _keys(pages: torch.Tensor) -> torch.Tensor:
    """Key pages [P, page_size, K, E] viewed as stored: [P, page_size / L, K, E / 4, L, 4], L positions in a block."""
    num_pages, page_size, num_kv_heads, dim = pages.shape
    lot, _ = _sizes(page_size)
    return pages.view(num_pages, page_size // lot, num_kv_heads, dim // 4, lot, 4)


def _values(pages: torch.Tensor) -> torch.Tensor:
    """Value pages [P, page_size, K, E] viewed as stored: [P, page_size / L, K, L / F, E, F], F adjacent positions."""
    num_pages, page_size, num_kv_heads, dim = pages.shape
    lot, quad = _sizes(page_size)
    return pages.view(num_pages, page_size // lot, num_kv_heads, lot // quad, dim, quad)

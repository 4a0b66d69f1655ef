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
        logits = torch.cat((logits, sink), dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., :length]
    return torch.einsum("kgql,lke->qkge", weights, v.float()).flatten(1, 2).to(q.dtype)

"""Attention within spans by torch's own kernels: spans of one length together, or all in one launch on a GPU."""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F

from headrace.kernels.span_attention import Spans


def span_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans, scale: float
) -> torch.Tensor:
    """See `SPAN_ATTENTION`."""
    out, start = torch.empty_like(q, memory_format=torch.contiguous_format), 0
    for length, same in groupby(spans.lengths):
        count = sum(1 for _ in same)
        end = start + count * length
        # [n, H, L, E]
        own_q, own_k, own_v = (x[start:end].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))
        found = F.scaled_dot_product_attention(own_q, own_k, own_v, scale=scale)
        out[start:end] = found.transpose(1, 2).flatten(0, 1)
        start = end
    return out


def flash_span_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans, scale: float
) -> torch.Tensor:
    """See `SPAN_ATTENTION`; FlashAttention-2 on a GPU, in half precision."""
    from torch.nn.attention.varlen import varlen_attn  # takes a while, and is for GPUs only

    longest, own = max(spans.lengths), q.shape[-1] ** -0.5
    # the kernel's scale is 1 / sqrt(E); another one is a factor of the queries
    q = q if abs(scale - own) < 1e-6 * own else q * (scale / own)
    out = varlen_attn(q, k, v, spans.starts, spans.starts, longest, longest)
    assert isinstance(out, torch.Tensor)
    return out

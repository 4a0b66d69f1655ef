"""Attention within spans by torch's own kernel: spans of one length together.

T tokens, H heads, E head dim, n spans of L tokens. Any strides are taken; nothing is overwritten.
"""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F

from headrace.kernels.span_attention import Spans


def span_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans, scale: float,
    cos_sin: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `SPAN_ATTENTION`."""
    if cos_sin is not None:
        q, k = rotate_halves(q, cos_sin), rotate_halves(k, cos_sin)
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


def rotate_halves(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate [T, H, E] by ``cos_sin`` [T, E], in float32; a new tensor in x's dtype."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

"""Norm, rotation and page write in plain torch: the oracle and the fallback. T tokens, H heads, K kv heads, E head
dim."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F

from headrace.kernels.codes import write_codes
from headrace.kernels.rope_write import HeadShape


def rope_write(
    qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor | None, slots: torch.Tensor,
    k_pages: torch.Tensor, v_pages: torch.Tensor,
    *, q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None, **shape: Unpack[HeadShape],
) -> torch.Tensor:
    """See `ROPE_WRITE`. Su et al., arXiv:2104.09864; norms and rotation are computed in float32."""
    num_heads, num_kv_heads, head_dim = shape["num_heads"], shape["num_kv_heads"], shape["head_dim"]
    scales = shape.get("scales")
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if q_norm is not None and k_norm is not None:
        q = _norm_heads(qk[:, :num_heads], q_norm, shape["norm_eps"], shape["norm_offset"])
        k = _norm_heads(qk[:, num_heads:], k_norm, shape["norm_eps"], shape["norm_offset"])
        qk = torch.cat((q, k), dim=1)
    if cos_sin is not None:
        qk = rotate(qk, cos_sin.index_select(0, positions), shape["rotary_dim"], shape["interleaved"])
    qk = qk.to(qkv.dtype)
    if scales is not None:
        write_codes((k_pages, v_pages), scales, slots, qk[:, num_heads:], v)
        return qk[:, :num_heads].contiguous()
    k_pages.view(-1, num_kv_heads, head_dim).index_copy_(0, slots, qk[:, num_heads:].to(k_pages.dtype))
    v_pages.view(-1, num_kv_heads, v.shape[-1]).index_copy_(0, slots, v.to(v_pages.dtype))
    return qk[:, :num_heads].contiguous()


def _norm_heads(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """RMS norm of [T, heads, E], in float32: over the last dim, or the last two where ``weight`` is as long."""
    shape = x.shape[2:] if len(weight) == x.shape[2] else x.shape[1:]
    return F.rms_norm(x.float(), shape, weight.float().view(shape) + offset, eps)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, rotary_dim: int, interleaved: bool) -> torch.Tensor:
    """Rotate the first ``rotary_dim`` dims of [T, heads, E] by ``cos_sin`` [T, rotary_dim]; float32, a new tensor."""
    half = rotary_dim // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    first, second = (
        (x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]) if interleaved else (x[..., :half], x[..., half:rotary_dim])
    )
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    out_first, out_second = (
        (out[..., 0:rotary_dim:2], out[..., 1:rotary_dim:2]) if interleaved
        else (out[..., :half], out[..., half:rotary_dim])
    )
    torch.sub(first * cos, second * sin, out=out_first)
    torch.add(second * cos, first * sin, out=out_second)
    if rotary_dim < x.shape[-1]:
        out[..., rotary_dim:] = x[..., rotary_dim:]
    return out

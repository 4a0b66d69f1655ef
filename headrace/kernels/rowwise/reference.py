"""Row-wise operations in plain torch: the oracle and the fallback."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F

from headrace.kernels.attention.reference import write_codes
from headrace.kernels.rowwise import HeadShape


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """See `RMS_NORM`. Zhang & Sennrich, arXiv:1910.07467."""
    scale = weight.float()
    if offset:
        scale = scale + offset
    return F.rms_norm(x.float(), weight.shape, scale, eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ADD_RMS_NORM`; writes the new residual in place."""
    # partial sums [S, T, D] are rounded first, as the product would have been
    residual.add_(x if x.dim() == 2 else x.sum(0).to(residual.dtype))
    return rms_norm(residual, weight, eps, offset), residual


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ADD_LAYER_NORM`; writes the new residual in place."""
    residual.add_(x if x.dim() == 2 else x.sum(0).to(residual.dtype))
    weight = weight + offset if offset else weight
    return F.layer_norm(residual, weight.shape, weight, bias, eps), residual


def write_sum(x: torch.Tensor | None, residual: torch.Tensor, out: torch.Tensor) -> None:
    """See `WRITE_SUM`."""
    if x is None:
        out.copy_(residual)
    else:
        torch.add(residual, x if x.dim() == 2 else x.sum(0).to(residual.dtype), out=out)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """See `SILU_MUL`. Shazeer, arXiv:2002.05202 (SwiGLU)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    """See `GELU_TANH_MUL`. Shazeer, arXiv:2002.05202 (GEGLU)."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def clamped_swiglu(x: torch.Tensor, *, limit: float, alpha: float, up_offset: float) -> torch.Tensor:
    """See `CLAMPED_SWIGLU`. Computed in float32 and rounded once."""
    gate, up = x.float().chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (gate * torch.sigmoid(gate * alpha)).mul_(up.clamp(-limit, limit).add_(up_offset)).to(x.dtype)


def rope_write(
    qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor | None, slots: torch.Tensor,
    k_pages: torch.Tensor, v_pages: torch.Tensor,
    *, q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None, **shape: Unpack[HeadShape],
) -> torch.Tensor:
    """See `ROPE_WRITE`. Su et al., arXiv:2104.09864; norms and rotation are computed in float32."""
    num_heads, num_kv_heads, head_dim = shape["num_heads"], shape["num_kv_heads"], shape["head_dim"]
    scales = shape.get("scales")
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)  # [T, H of q + K of k + K of v, E]
    qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if q_norm is not None and k_norm is not None:
        q = _norm_heads(qk[:, :num_heads], q_norm, shape["norm_eps"], shape["norm_offset"])
        k = _norm_heads(qk[:, num_heads:], k_norm, shape["norm_eps"], shape["norm_offset"])
        qk = torch.cat((q, k), dim=1)
    if cos_sin is not None:
        qk = rotate(qk, cos_sin.index_select(0, positions), shape["rotary_dim"], shape["interleaved"])
    qk = qk.to(qkv.dtype)  # float32 after norm or rotation
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
    # out_first and out_second are views of out: each product is written in place
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


def latent_write(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor], places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    pages: torch.Tensor, out: torch.Tensor, *, norm_weight: torch.Tensor, norm_eps: float, interleaved: bool,
) -> None:
    """See `LATENT_WRITE`."""
    q_rope, latent, k_rope = parts
    write_latents((q_rope, rms_norm(latent, norm_weight, norm_eps), k_rope), places, pages, out, interleaved)


def write_latents(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor], places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    pages: torch.Tensor, out: torch.Tensor, interleaved: bool,
) -> None:
    """As `LATENT_WRITE`, of latents that are normalised."""
    (q_rope, latent, k_rope), (positions, cos_sin, slots) = parts, places
    num_heads, width = q_rope.shape[1:]
    # k_rope is one more head: [T, H + 1, E] is rotated in one call
    both = torch.cat((q_rope, k_rope.unsqueeze(1)), dim=1)
    both = rotate(both, cos_sin.index_select(0, positions), width, interleaved).to(q_rope.dtype)
    rows = torch.cat((latent, both[:, num_heads]), dim=-1)
    pages.view(-1, pages.shape[-1]).index_copy_(0, slots, rows.to(pages.dtype))
    out.copy_(both[:, :num_heads])

"""Norm, rotation and page write fused: reads qkv once, writes q, k and v once.

T tokens, H heads, K kv heads, E head dim. A program takes one token and a few of its H + 2K heads. Each dim is read
together with the dim it rotates with (the second read hits the cache), so both rotary layouts are the same code.
"""

from functools import partial
from typing import Unpack

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous
from headrace.kernels.rope_write import HeadShape

HEADS_AT_ONCE = 8


@triton.jit
def _rope_write_kernel(
    qkv_ptr, positions_ptr, cos_sin_ptr, slots_ptr, q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr,
    qkv_stride, page_stride_k, page_stride_v, norm_eps, norm_offset,
    PAGE: tl.constexpr, H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, HEADS: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dim = tl.arange(0, BLOCK_E)
    is_q, is_k, is_v = head < H, (head >= H) & (head < H + K), (head >= H + K) & (head < H + 2 * K)
    inside = (head < H + 2 * K) & (dim < E)[None, :]
    if INTERLEAVED:
        partner = tl.where(dim < ROTARY, dim ^ 1, dim)
        frequency = dim // 2
        sign = tl.where(dim % 2 == 0, -1.0, 1.0)
    else:
        partner = tl.where(dim < ROTARY // 2, dim + ROTARY // 2, tl.where(dim < ROTARY, dim - ROTARY // 2, dim))
        frequency = tl.where(dim < ROTARY // 2, dim, dim - ROTARY // 2)
        sign = tl.where(dim < ROTARY // 2, -1.0, 1.0)
    if NORM:
        q_weight = tl.load(q_norm_ptr + dim, mask=dim < E, other=0.0).to(tl.float32)[None, :]
        k_weight = tl.load(k_norm_ptr + dim, mask=dim < E, other=0.0).to(tl.float32)[None, :]
        if ROTARY > 0:
            q_mate_weight = tl.load(q_norm_ptr + partner, mask=dim < E, other=0.0).to(tl.float32)[None, :]
            k_mate_weight = tl.load(k_norm_ptr + partner, mask=dim < E, other=0.0).to(tl.float32)[None, :]
    wait_for_previous(PDL)
    source = qkv_ptr + token * qkv_stride + head * E
    raw = tl.load(source + dim[None, :], mask=inside, other=0.0)
    x = raw.to(tl.float32)
    if ROTARY > 0:
        mate = tl.load(source + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / E + norm_eps)[:, None]
        x = x * rstd * (tl.where(is_q, q_weight, k_weight) + norm_offset)
        if ROTARY > 0:
            mate = mate * rstd * (tl.where(is_q, q_mate_weight, k_mate_weight) + norm_offset)
    if ROTARY > 0:
        turned = dim < ROTARY
        table = cos_sin_ptr + tl.load(positions_ptr + token) * ROTARY + frequency
        cos = tl.load(table, mask=turned, other=1.0)
        sin = tl.load(table + ROTARY // 2, mask=turned, other=0.0)
        x = x * cos[None, :] + mate * (sin * sign)[None, :]
    tl.store(q_ptr + token * (H * E) + head * E + dim[None, :], x.to(q_ptr.dtype.element_ty), mask=inside & is_q)
    slot = tl.load(slots_ptr + token)
    page, at = slot // PAGE, slot % PAGE
    k_at = k_ptr + page * page_stride_k + at * (K * E) + (head - H) * E + dim[None, :]
    tl.store(k_at, x.to(k_ptr.dtype.element_ty), mask=inside & is_k)
    v_at = v_ptr + page * page_stride_v + at * (K * E) + (head - H - K) * E + dim[None, :]
    tl.store(v_at, raw.to(v_ptr.dtype.element_ty), mask=inside & is_v)


def rope_write(
    qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor | None, slots: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor,
    *, q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None, pdl: bool = False, **shape: Unpack[HeadShape],
) -> torch.Tensor:
    """See `ROPE_WRITE`."""
    num_heads, num_kv_heads, head_dim = shape["num_heads"], shape["num_kv_heads"], shape["head_dim"]
    q = torch.empty((qkv.shape[0], num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    has_norm = q_norm is not None and k_norm is not None
    if qkv.shape[0]:
        _rope_write_kernel[(qkv.shape[0], ceil_div(num_heads + 2 * num_kv_heads, HEADS_AT_ONCE))](
            qkv, positions, qkv if cos_sin is None else cos_sin, slots, q, k_pages, v_pages,
            q_norm if has_norm else qkv, k_norm if has_norm else qkv,
            qkv.stride(0), k_pages.stride(0), v_pages.stride(0), shape["norm_eps"], shape["norm_offset"],
            PAGE=k_pages.shape[1], H=num_heads, K=num_kv_heads, E=head_dim, ROTARY=0 if cos_sin is None else shape["rotary_dim"],
            INTERLEAVED=shape["interleaved"], NORM=has_norm, HEADS=HEADS_AT_ONCE, BLOCK_E=next_power_of_2(head_dim), PDL=pdl,
            num_warps=4, launch_pdl=pdl,
        )
    return q


rope_write_pdl = partial(rope_write, pdl=True)

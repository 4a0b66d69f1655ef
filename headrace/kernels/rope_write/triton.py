"""Norm, rotation and page write fused: reads qkv once, writes q, k and v once.

T tokens, H heads, K kv heads, E head dim. A program takes one token and a few of its H + 2K heads, as three tiles: the
dims that come first in their rotated pairs, those that come second, and the rest that is not rotated.
"""

from typing import Unpack

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous
from headrace.kernels.rope_write import HeadShape

HEADS_AT_ONCE = 8


@triton.jit
def _load_tile(source, dim, inside):
    return tl.load(source + dim[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _norm_weight(q_norm_ptr, k_norm_ptr, dim, count, is_q, offset):
    """[HEADS, dims]: the q heads' weight or the k heads'."""
    q_weight = tl.load(q_norm_ptr + dim, mask=dim < count, other=0.0).to(tl.float32)
    k_weight = tl.load(k_norm_ptr + dim, mask=dim < count, other=0.0).to(tl.float32)
    return tl.where(is_q, q_weight[None, :], k_weight[None, :]) + offset


@triton.jit
def _full_norm_weight(q_norm_ptr, k_norm_ptr, head, dim, inside, is_q, is_k, offset, H: tl.constexpr, E: tl.constexpr):
    """[HEADS, dims]: each head's own part of the weight."""
    q_weight = tl.load(q_norm_ptr + head * E + dim[None, :], mask=inside & is_q, other=0.0).to(tl.float32)
    k_weight = tl.load(k_norm_ptr + (head - H) * E + dim[None, :], mask=inside & is_k, other=0.0).to(tl.float32)
    return tl.where(is_q, q_weight, k_weight) + offset


@triton.jit
def _mean_square(source, COUNT: tl.constexpr):
    at = tl.arange(0, triton.next_power_of_2(COUNT))
    x = tl.load(source + at, mask=at < COUNT, other=0.0).to(tl.float32)
    return tl.sum(x * x, axis=0) / COUNT


@triton.jit
def _store_tile(x, dim, inside, q_row, k_row, v_row, is_q, is_k, is_v):
    tl.store(q_row + dim[None, :], x.to(q_row.dtype.element_ty), mask=inside & is_q)
    tl.store(k_row + dim[None, :], x.to(k_row.dtype.element_ty), mask=inside & is_k)
    tl.store(v_row + dim[None, :], x.to(v_row.dtype.element_ty), mask=inside & is_v)


@triton.jit
def _rope_write_kernel(
    qkv_ptr, positions_ptr, cos_sin_ptr, slots_ptr, q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr,
    qkv_stride, page_stride_k, page_stride_v, norm_eps, norm_offset,
    PAGE: tl.constexpr, H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, FULL: tl.constexpr, HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = ROTARY // 2
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    is_q, is_k, is_v = head < H, (head >= H) & (head < H + K), (head >= H + K) & (head < H + 2 * K)
    pair = tl.arange(0, BLOCK_HALF)
    first, second = (2 * pair, 2 * pair + 1) if INTERLEAVED else (pair, pair + HALF)
    rest = ROTARY + tl.arange(0, BLOCK_REST)
    in_half = (head < H + 2 * K) & (pair < HALF)[None, :]
    in_rest = (head < H + 2 * K) & (rest < E)[None, :]
    if FULL:
        first_weight = _full_norm_weight(q_norm_ptr, k_norm_ptr, head, first, in_half, is_q, is_k, norm_offset, H, E)
        second_weight = _full_norm_weight(q_norm_ptr, k_norm_ptr, head, second, in_half, is_q, is_k, norm_offset, H, E)
        rest_weight = _full_norm_weight(q_norm_ptr, k_norm_ptr, head, rest, in_rest, is_q, is_k, norm_offset, H, E)
    elif NORM:
        first_weight = _norm_weight(q_norm_ptr, k_norm_ptr, first, E, is_q, norm_offset)
        second_weight = _norm_weight(q_norm_ptr, k_norm_ptr, second, E, is_q, norm_offset)
        rest_weight = _norm_weight(q_norm_ptr, k_norm_ptr, rest, E, is_q, norm_offset)
    wait_for_previous(PDL)

    source = qkv_ptr + token * qkv_stride + head * E
    slot = tl.load(slots_ptr + token)
    page, at = slot // PAGE, slot % PAGE
    q_row = q_ptr + token * (H * E) + head * E
    k_row = k_ptr + page * page_stride_k + at * (K * E) + (head - H) * E
    v_row = v_ptr + page * page_stride_v + at * (K * E) + (head - H - K) * E
    square = tl.zeros([HEADS], tl.float32)
    if ROTARY > 0:
        x1, x2 = _load_tile(source, first, in_half), _load_tile(source, second, in_half)
        square += tl.sum(x1 * x1 + x2 * x2, axis=1)
    if ROTARY < E:
        x3 = _load_tile(source, rest, in_rest)
        square += tl.sum(x3 * x3, axis=1)
    if FULL:  # every program goes through all heads: what others have of them is in the cache
        row = qkv_ptr + token * qkv_stride
        rstd = tl.rsqrt(tl.where(is_q, _mean_square(row, H * E), _mean_square(row + H * E, K * E)) + norm_eps)
    elif NORM:
        rstd = tl.rsqrt(square / E + norm_eps)[:, None]
    if ROTARY > 0:
        table = cos_sin_ptr + tl.load(positions_ptr + token) * ROTARY + pair
        cos = tl.load(table, mask=pair < HALF, other=1.0)[None, :]
        sin = tl.load(table + HALF, mask=pair < HALF, other=0.0)[None, :]
        n1, n2 = x1, x2
        if NORM:
            n1, n2 = x1 * rstd * first_weight, x2 * rstd * second_weight
        _store_tile(tl.where(is_v, x1, n1 * cos - n2 * sin), first, in_half, q_row, k_row, v_row, is_q, is_k, is_v)
        _store_tile(tl.where(is_v, x2, n2 * cos + n1 * sin), second, in_half, q_row, k_row, v_row, is_q, is_k, is_v)
    if ROTARY < E:
        n3 = x3
        if NORM:
            n3 = tl.where(is_v, x3, x3 * rstd * rest_weight)
        _store_tile(n3, rest, in_rest, q_row, k_row, v_row, is_q, is_k, is_v)


def _launch(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor],
    pages: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor | None, torch.Tensor | None], shape: HeadShape, *, pdl: bool,
) -> torch.Tensor:
    (qkv, positions, cos_sin, slots), (k_pages, v_pages), (q_norm, k_norm) = inputs, pages, norms
    num_heads, num_kv_heads, head_dim = shape["num_heads"], shape["num_kv_heads"], shape["head_dim"]
    q = torch.empty((qkv.shape[0], num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    rotary_dim = 0 if cos_sin is None else shape["rotary_dim"]
    has_norm = q_norm is not None and k_norm is not None
    if qkv.shape[0]:
        _rope_write_kernel[(qkv.shape[0], ceil_div(num_heads + 2 * num_kv_heads, HEADS_AT_ONCE))](
            qkv, positions, qkv if cos_sin is None else cos_sin, slots, q, k_pages, v_pages,
            q_norm if has_norm else qkv, k_norm if has_norm else qkv,
            qkv.stride(0), k_pages.stride(0), v_pages.stride(0), shape["norm_eps"], shape["norm_offset"],
            PAGE=k_pages.shape[1], H=num_heads, K=num_kv_heads, E=head_dim, ROTARY=rotary_dim,
            INTERLEAVED=shape["interleaved"],
            NORM=has_norm, FULL=has_norm and q_norm.shape[0] > head_dim, HEADS=HEADS_AT_ONCE,
            BLOCK_HALF=next_power_of_2(max(1, rotary_dim // 2)),
            BLOCK_REST=next_power_of_2(max(1, head_dim - rotary_dim)), PDL=pdl, num_warps=4, launch_pdl=pdl,
        )
    return q


def rope_write(
    qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor | None, slots: torch.Tensor,
    k_pages: torch.Tensor, v_pages: torch.Tensor,
    *, q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None, **shape: Unpack[HeadShape],
) -> torch.Tensor:
    """See `ROPE_WRITE`."""
    return _launch((qkv, positions, cos_sin, slots), (k_pages, v_pages), (q_norm, k_norm), shape, pdl=False)


def rope_write_pdl(
    qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor | None, slots: torch.Tensor,
    k_pages: torch.Tensor, v_pages: torch.Tensor,
    *, q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None, **shape: Unpack[HeadShape],
) -> torch.Tensor:
    """See `ROPE_WRITE`; with programmatic dependent launch."""
    return _launch((qkv, positions, cos_sin, slots), (k_pages, v_pages), (q_norm, k_norm), shape, pdl=True)

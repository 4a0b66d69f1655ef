"""What stands between the projections of latent attention and its product with the pages, in Triton: one kernel that
normalises latents, rotates a part of queries and keys, and writes pages."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous

HEADS_AT_ONCE = 16
"""Query heads that a program rotates."""


@triton.jit
def _rotate_rows(source, target, cos, sin, pair, inside, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotate rows [n] of pairs, from pointers ``source`` [n, 1] to ``target`` [n, 1], which may be the same."""
    first, second = (2 * pair, 2 * pair + 1) if INTERLEAVED else (pair, pair + HALF)
    x = tl.load(source + first[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(source + second[None, :], mask=inside, other=0.0).to(tl.float32)
    # keys are rounded as queries are, whatever pages hold
    new_x, new_y = (x * cos - y * sin).to(source.dtype.element_ty), (y * cos + x * sin).to(source.dtype.element_ty)
    tl.store(target + first[None, :], new_x.to(target.dtype.element_ty), mask=inside)
    tl.store(target + second[None, :], new_y.to(target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["eps"])
def _latent_write_kernel(
    q_ptr, latent_ptr, k_ptr, positions_ptr, cos_sin_ptr, slots_ptr, pages_ptr, out_ptr, weight_ptr, q_stride,
    q_head_stride, latent_stride, k_stride, page_stride, row_stride, out_stride, out_head_stride, eps,
    PAGE: tl.constexpr, H: tl.constexpr, L: tl.constexpr, E: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_HALF: tl.constexpr, PDL: tl.constexpr,
):
    HALF: tl.constexpr = E // 2
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair, dim = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_L)
    in_latent = (dim < L) & (part == 0)
    weight = tl.load(weight_ptr + dim, mask=in_latent, other=0.0).to(tl.float32)  # no kernel writes it
    wait_for_previous(PDL)
    table = cos_sin_ptr + tl.load(positions_ptr + token) * E + pair
    cos = tl.load(table, mask=pair < HALF, other=1.0)[None, :]
    sin = tl.load(table + HALF, mask=pair < HALF, other=0.0)[None, :]
    if part == 0:
        slot = tl.load(slots_ptr + token)
        row = pages_ptr + slot // PAGE * page_stride + slot % PAGE * row_stride
        x = tl.load(latent_ptr + token * latent_stride + dim, mask=in_latent, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / L + eps) * weight
        tl.store(row + dim, x.to(latent_ptr.dtype.element_ty).to(pages_ptr.dtype.element_ty), mask=in_latent)
        only = tl.arange(0, 1)[:, None]
        _rotate_rows(
            k_ptr + token * k_stride + only, row + L + only, cos, sin, pair, (pair < HALF)[None, :], HALF, INTERLEAVED
        )
    else:
        head = ((part - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        _rotate_rows(
            q_ptr + token * q_stride + head * q_head_stride, out_ptr + token * out_stride + head * out_head_stride, cos,
            sin, pair, (head < H) & (pair < HALF)[None, :], HALF, INTERLEAVED
        )


def latent_write(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor], places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    pages: torch.Tensor, out: torch.Tensor, *, norm_weight: torch.Tensor, norm_eps: float, interleaved: bool,
    pdl: bool = False,
) -> None:
    """See `LATENT_WRITE`."""
    (q, latent, k), (positions, cos_sin, slots) = parts, places
    num_tokens, num_heads, width = q.shape
    if not num_tokens:
        return
    heads = min(HEADS_AT_ONCE, next_power_of_2(num_heads))
    _latent_write_kernel[(num_tokens, 1 + ceil_div(num_heads, heads))](
        q, latent, k, positions, cos_sin, slots, pages, out, norm_weight, q.stride(0), q.stride(1), latent.stride(0),
        k.stride(0), pages.stride(0), pages.stride(1), out.stride(0), out.stride(1), norm_eps, PAGE=pages.shape[1],
        H=num_heads, L=latent.shape[1], E=width, INTERLEAVED=interleaved, HEADS=heads,
        BLOCK_L=next_power_of_2(latent.shape[1]), BLOCK_HALF=next_power_of_2(width // 2), PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )


latent_write_pdl = partial(latent_write, pdl=True)

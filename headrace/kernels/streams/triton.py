"""Hyper-connections in Triton. T tokens, S streams, D hidden size, W = (2 + S) S weights of a token, K splits."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from headrace.kernels.collective import LentSum
from headrace.kernels.launch import ceil_div, next_power_of_2, wait_for_previous
from headrace.kernels.streams import Passed, Pending, StreamMix, StreamShape, end_pass

PROGRAMS = 256
"""Programs among which a step's products are split, about twice the multiprocessors of a large GPU."""
MOST_SPLITS = 32
COLUMNS = 1024
"""Columns of a program of `_write_kernel`."""


@triton.jit
def _product_kernel(
    streams_ptr, fn_ptr, sums_ptr, num_tokens, token_stride, stream_stride, D: tl.constexpr, S: tl.constexpr,
    W: tl.constexpr, BLOCK_W: tl.constexpr, TOKENS: tl.constexpr, INNER: tl.constexpr, SHARE: tl.constexpr,
    PDL: tl.constexpr,
):
    # a program: some tokens, and a share of the S * D products; sums [K, T, BLOCK_W], column W has the sum of squares
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    weight, inner = tl.arange(0, BLOCK_W), tl.arange(0, INNER)
    is_token = token < num_tokens
    total = tl.zeros([TOKENS, BLOCK_W], tl.float32)
    squares = tl.zeros([TOKENS], tl.float32)
    first = tl.program_id(1) * SHARE
    wait_for_previous(PDL)
    for at in range(first, first + SHARE, INNER):  # INNER divides D: a block lies within one stream
        x = tl.load(
            streams_ptr + token[:, None] * token_stride + at // D * stream_stride + (at % D + inner)[None, :],
            mask=is_token[:, None] & (inner >= 0)[None, :], other=0.0,
        )
        fn = tl.load(
            fn_ptr + weight[None, :].to(tl.int64) * (S * D) + (at + inner)[:, None],
            mask=(weight < W)[None, :] & (inner >= 0)[:, None], other=0.0,
        )
        if x.dtype == tl.bfloat16:  # fn as the sum of two of 16 bits: an error of 2 ** -17
            high = fn.to(tl.bfloat16)
            total = tl.dot(x, high, total)
            total = tl.dot(x, (fn - high.to(tl.float32)).to(tl.bfloat16), total)
            x = x.to(tl.float32)
        else:  # fn is split in three: as exact as float32
            x = x.to(tl.float32)
            total = tl.dot(x, fn, total, input_precision="tf32x3")
        squares += tl.sum(x * x, axis=1)
    total = tl.where(weight[None, :] == W, squares[:, None], total)
    out = sums_ptr + (tl.program_id(1) * num_tokens + token)[:, None] * BLOCK_W + weight[None, :]
    tl.store(out, total, mask=is_token[:, None] & (weight >= 0)[None, :])


@triton.jit
def _read_kernel(
    streams_ptr, sums_ptr, scale_ptr, base_ptr, norm_ptr, x_ptr, post_ptr, mix_ptr, num_tokens, token_stride,
    stream_stride, eps, norm_eps, D: tl.constexpr, BLOCK_D: tl.constexpr, S: tl.constexpr, W: tl.constexpr,
    BLOCK_W: tl.constexpr, SPLITS: tl.constexpr, ITERATIONS: tl.constexpr, PDL: tl.constexpr,
):
    # two programs a token: one for its input, one for what is written back later
    token = tl.program_id(0).to(tl.int64)
    stream, split = tl.arange(0, S), tl.arange(0, SPLITS)
    wait_for_previous(PDL)
    row = sums_ptr + (split * num_tokens + token) * BLOCK_W
    if tl.program_id(1) == 0:
        column = tl.arange(0, BLOCK_D)
        inside = column < D
        streams = tl.load(  # S x D values, in registers
            streams_ptr + token * token_stride + stream[:, None] * stream_stride + column[None, :],
            mask=inside[None, :] & (stream >= 0)[:, None], other=0.0,
        ).to(tl.float32)
        norm = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(tl.load(row + W), axis=0) / (S * D) + norm_eps)
        pre = tl.sum(tl.load(row[:, None] + stream[None, :]), axis=0) * rstd * tl.load(scale_ptr)
        pre = 1.0 / (1.0 + tl.exp(-(pre + tl.load(base_ptr + stream)))) + eps
        x = tl.sum(streams * pre[:, None], axis=0).to(x_ptr.dtype.element_ty).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=0) / D + norm_eps)
        tl.store(x_ptr + token * D + column, (x * rstd * norm).to(x_ptr.dtype.element_ty), mask=inside)
    else:
        rstd = tl.rsqrt(tl.sum(tl.load(row + W), axis=0) / (S * D) + norm_eps)
        post = tl.sum(tl.load(row[:, None] + (S + stream)[None, :]), axis=0) * rstd * tl.load(scale_ptr + 1)
        tl.store(post_ptr + token * S + stream, 2.0 / (1.0 + tl.exp(-(post + tl.load(base_ptr + S + stream)))))
        cell = stream[:, None] * S + stream[None, :]
        mix = tl.sum(tl.load(row[:, None, None] + (2 * S + cell)[None, :, :]), axis=0) * rstd * tl.load(scale_ptr + 2)
        mix = mix + tl.load(base_ptr + 2 * S + cell)
        # softmax of rows, then columns: the order of the reference, whose ``eps`` are not symmetric
        mix = tl.exp(mix - tl.max(mix, axis=1)[:, None])
        mix = mix / tl.sum(mix, axis=1)[:, None] + eps
        mix = mix / (tl.sum(mix, axis=0)[None, :] + eps)
        # Sinkhorn-Knopp, as the reference: rows and columns in turn, columns last
        for _ in range(ITERATIONS - 1):
            mix = mix / (tl.sum(mix, axis=1)[:, None] + eps)
            mix = mix / (tl.sum(mix, axis=0)[None, :] + eps)
        tl.store(mix_ptr + token * (S * S) + cell, mix)


def read_streams(
    streams: torch.Tensor, mix: StreamMix, norm: torch.Tensor, shape: StreamShape, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `READ_STREAMS`; the last dim of streams is contiguous."""
    num_tokens, num_streams, width = streams.shape
    num_weights = (2 + num_streams) * num_streams
    block_w = max(16, next_power_of_2(num_weights + 1))
    x = torch.empty((num_tokens, width), dtype=streams.dtype, device=streams.device)
    post = torch.empty((num_tokens, num_streams), dtype=torch.float32, device=streams.device)
    mixing = torch.empty((num_tokens, num_streams, num_streams), dtype=torch.float32, device=streams.device)
    if not num_tokens:
        return x, post, mixing
    inner = min(64 if num_tokens > 64 else 128, width & -width)
    tokens = 16 if num_tokens <= 64 else 64
    splits = _choose_splits(ceil_div(num_tokens, tokens), num_streams * width // inner)
    sums = torch.empty((splits, num_tokens, block_w), dtype=torch.float32, device=streams.device)
    strides = streams.stride(0), streams.stride(1)
    _product_kernel[(ceil_div(num_tokens, tokens), splits)](
        streams, mix.fn, sums, num_tokens, *strides, D=width, S=num_streams, W=num_weights, BLOCK_W=block_w,
        TOKENS=tokens, INNER=inner, SHARE=num_streams * width // splits, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )
    _read_kernel[(num_tokens, 2)](
        streams, sums, mix.scale, mix.base, norm, x, post, mixing, num_tokens, *strides, shape.eps, shape.norm_eps,
        D=width, BLOCK_D=next_power_of_2(width), S=num_streams, W=num_weights, BLOCK_W=block_w, SPLITS=splits,
        ITERATIONS=shape.iterations, PDL=pdl, num_warps=8, launch_pdl=pdl,
    )
    return x, post, mixing


def _choose_splits(blocks: int, pieces: int) -> int:
    """The largest power of two that divides ``pieces`` and for which programs are not far more than `PROGRAMS`."""
    splits = 1
    while splits < MOST_SPLITS and blocks * splits < PROGRAMS and pieces % (2 * splits) == 0:
        splits *= 2
    return splits


@triton.jit
def _write_kernel(
    streams_ptr, out_ptr, post_ptr, mix_ptr, new_ptr, token_stride, stream_stride, out_stride, D: tl.constexpr,
    S: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    wait_for_previous(PDL)
    out = tl.load(out_ptr + token * out_stride + column, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(S):
        total = out * tl.load(post_ptr + token * S + k)
        for j in tl.static_range(S):  # the streams are read once from memory, then from the cache
            own = tl.load(streams_ptr + token * token_stride + j * stream_stride + column, mask=inside, other=0.0)
            total += own.to(tl.float32) * tl.load(mix_ptr + token * (S * S) + j * S + k)
        tl.store(new_ptr + (token * S + k) * D + column, total.to(new_ptr.dtype.element_ty), mask=inside)


def write_streams(
    streams: torch.Tensor, out: torch.Tensor, post: torch.Tensor, mix: torch.Tensor, *, pdl: bool = False
) -> torch.Tensor:
    """See `WRITE_STREAMS`; the last dims of streams and out are contiguous."""
    num_tokens, num_streams, width = streams.shape
    new = torch.empty((num_tokens, num_streams, width), dtype=streams.dtype, device=streams.device)
    if num_tokens:
        block = min(COLUMNS, next_power_of_2(width))
        _write_kernel[(num_tokens, ceil_div(width, block))](
            streams, out, post, mix, new, streams.stride(0), streams.stride(1), out.stride(0), D=width, S=num_streams,
            BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )
    return new


def write_read_streams(
    streams: torch.Tensor, pending: Pending, mix: StreamMix, norm: torch.Tensor, shape: StreamShape, *,
    ranks: LentSum | None = None, group: int | None = None, pdl: bool = False,
) -> Passed | None:
    """See `WRITE_READ_STREAMS`: one after the other."""
    if ranks is not None:
        return None
    new = write_streams(streams, pending.whole, pending.post, pending.mix, pdl=pdl)
    return end_pass((new, *read_streams(new, mix, norm, shape, pdl=pdl)), group)


read_streams_pdl = partial(read_streams, pdl=True)
write_read_streams_pdl = partial(write_read_streams, pdl=True)
write_streams_pdl = partial(write_streams, pdl=True)

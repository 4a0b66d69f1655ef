"""Hyper-connections of four streams by own CUDA C++ (``csrc/cuda/streams.cu``, which says how it works).

T tokens, S streams, D hidden size, K splits, W = (2 + S) S weights of a token.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass

import torch

from headrace.kernels.collective import LentSum
from headrace.kernels.cuda_source import CudaKernel, cache_compiled, fallback, load_kernel
from headrace.kernels.launch import ceil_div
from headrace.kernels.streams import Passed, Pending, StreamMix, StreamShape, end_pass, few, groups, triton

WORKERS, ROW, VECTOR, TOKENS, COLUMNS = 256, 32, 8, 16, 32
"""As in the source: threads that sum streams (32 more make the weights), floats of a row of sums, values that a thread
loads at once, tokens and columns of a warp."""


@dataclass(frozen=True)
class Tile:
    """Warps of a block that have other tokens, and other columns of the same; blocks of a multiprocessor; columns are
    cut in ``splits``."""

    token_warps: int
    column_warps: int
    blocks: int
    splits: int


def choose_tile(num_tokens: int, width: int) -> Tile:
    """For few tokens as many blocks as there can be. For many, columns in 8 parts: more would write more sums."""
    if num_tokens <= 256:
        return Tile(1, 4, 1, ceil_div(width, 4 * COLUMNS))
    return Tile(4, 1, 3, min(8 if num_tokens > 1024 else 32, ceil_div(width, COLUMNS)))


class _Mix(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("streams", "out", "post", "mix", "fresh", "fn", "sums")),
        *((name, c_int64) for name in ("token_stride", "stream_stride", "out_stride")),
        *((name, c_int) for name in ("tokens", "tiles", "width", "steps")),
    )


class _Read(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("streams", "sums", "scale", "base", "norm", "x", "post", "mix")),
        *((name, c_int64) for name in ("token_stride", "stream_stride")),
        *((name, c_int) for name in ("tokens", "splits", "width", "iterations")),
        *((name, c_float) for name in ("eps", "norm_eps")),
    )


@cache_compiled
def find_kernel(entry: str, device: torch.device, **constants: int) -> CudaKernel | None:
    """A kernel of the source, compiled (a second) unless cached; None, with a warning, where that fails."""
    macros = {"WRITES": 1, "TOKEN_WARPS": 1, "COLUMN_WARPS": 4, "BLOCKS": 1, "VECTORS": 2} | constants
    with fallback("hyper-connections are computed by Triton kernels"):
        return load_kernel("streams", device, 0, entry, **macros)
    return None


def find_kernels(width: int, tile: Tile, device: torch.device, *, writes: bool) -> tuple[CudaKernel, CudaKernel] | None:
    """``mix_streams`` and ``read_streams``; None where they cannot be compiled."""
    mix = find_kernel(
        "mix_streams", device, WRITES=int(writes), TOKEN_WARPS=tile.token_warps, COLUMN_WARPS=tile.column_warps,
        BLOCKS=tile.blocks,
    )
    read = find_kernel("read_streams", device, VECTORS=ceil_div(width, VECTOR * WORKERS))
    return None if mix is None or read is None else (mix, read)


def _point_at(*tensors: torch.Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def read_streams(
    streams: torch.Tensor, mix: StreamMix, norm: torch.Tensor, shape: StreamShape, *, tile: Tile | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `READ_STREAMS`; the last dim of streams is contiguous."""
    if tile is None and few.can_run(streams):
        return few.pass_streams(streams, None, mix, norm, shape)[1:]
    if tile is None and groups.can_run(streams):
        return groups.pass_streams(streams, None, mix, norm, shape)[1:]
    tile = tile or choose_tile(len(streams), streams.shape[2])
    kernels = find_kernels(streams.shape[2], tile, streams.device, writes=False)
    if kernels is None or not len(streams):
        return triton.read_streams(streams, mix, norm, shape, pdl=True)
    # what is not read may be any tensor
    sums = _sum_products(kernels[0], tile, streams, (streams, mix.base, mix.base), streams, mix.fn)
    return _finish(kernels[1], streams, sums, mix, norm, shape)


def write_read_streams(
    streams: torch.Tensor, pending: Pending, mix: StreamMix, norm: torch.Tensor, shape: StreamShape, *,
    ranks: LentSum | None = None, group: int | None = None, tile: Tile | None = None,
) -> Passed | None:
    """See `WRITE_READ_STREAMS`; the last dims of streams and of what is pending are contiguous."""
    if ranks is not None:
        heard = None if ranks.is_muted else ranks
        if few.can_sum(streams, pending, ranks):
            return end_pass(few.pass_streams(streams, pending, mix, norm, shape, heard), group)
        if groups.can_sum(streams, pending, ranks):
            rows = groups.allocate_rows(streams, group)
            return end_pass(groups.pass_streams(streams, pending, mix, norm, shape, heard, rows), group, rows)
        return None
    if tile is None and few.can_run(streams):
        return end_pass(few.pass_streams(streams, pending, mix, norm, shape), group)
    if tile is None and groups.can_run(streams, pending):
        rows = groups.allocate_rows(streams, group)
        return end_pass(groups.pass_streams(streams, pending, mix, norm, shape, None, rows), group, rows)
    tile = tile or choose_tile(len(streams), streams.shape[2])
    kernels = find_kernels(streams.shape[2], tile, streams.device, writes=True)
    if kernels is None or not len(streams):
        return triton.write_read_streams(streams, pending, mix, norm, shape, group=group, pdl=True)
    new = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    sums = _sum_products(kernels[0], tile, streams, (pending.whole, pending.post, pending.mix), new, mix.fn)
    return end_pass((new, *_finish(kernels[1], new, sums, mix, norm, shape)), group)


def _sum_products(
    kernel: CudaKernel, tile: Tile, streams: torch.Tensor, pending: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    new: torch.Tensor, fn: torch.Tensor
) -> torch.Tensor:
    """Write what is ``pending`` (out, post, mix) back to ``new``; partial sums [K, T, ROW] of products and squares."""
    num_tokens, _, width = streams.shape
    sums = torch.empty((tile.splits, num_tokens, ROW), dtype=torch.float32, device=streams.device)
    tiles = ceil_div(num_tokens, TOKENS * tile.token_warps)
    call = _Mix(
        *_point_at(streams, *pending, new, fn, sums), streams.stride(0) // VECTOR, streams.stride(1) // VECTOR,
        pending[0].stride(0) // VECTOR, num_tokens, tiles, width // VECTOR,
        ceil_div(width, COLUMNS * tile.column_warps * tile.splits),
    )
    kernel.launch(tiles * tile.splits, 32 * tile.token_warps * tile.column_warps, call, is_dependent=True)
    return sums


def _finish(
    kernel: CudaKernel, streams: torch.Tensor, sums: torch.Tensor, mix: StreamMix, norm: torch.Tensor,
    shape: StreamShape
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_tokens, num_streams, width = streams.shape
    x = torch.empty((num_tokens, width), dtype=streams.dtype, device=streams.device)
    post = torch.empty((num_tokens, num_streams), dtype=torch.float32, device=streams.device)
    mixing = torch.empty((num_tokens, num_streams, num_streams), dtype=torch.float32, device=streams.device)
    call = _Read(
        *_point_at(streams, sums, mix.scale, mix.base, norm, x, post, mixing),
        streams.stride(0) // VECTOR, streams.stride(1) // VECTOR, num_tokens, len(sums), width // VECTOR,
        shape.iterations, shape.eps, shape.norm_eps,
    )
    kernel.launch(num_tokens, WORKERS + 32, call, is_dependent=True)
    return x, post, mixing

"""Hyper-connections of four streams for few tokens by own CUDA C++ (``csrc/cuda/streams_few.cu``, which says how it
works): one kernel, whose blocks exchange sums within a cluster.

T tokens, S streams, D hidden size, W = (2 + S) S weights of a token.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch

from headrace.kernels.cuda_source import CudaKernel, cache_compiled, fallback, load_kernel
from headrace.kernels.launch import ceil_div
from headrace.kernels.streams import Pending, StreamMix, StreamShape

CLUSTER = 16
"""Blocks that have the columns of a token."""
COLUMN_STEP = 32 * CLUSTER
"""Hidden sizes are multiples of it: a block has whole warps of a thread for each column."""
TILES = {1: 1, 2: 2, 4: 4, 8: 4}
"""Tokens of a cluster, and those of them whose sums a thread has at once."""
CLUSTERS = 8
"""Up to so many are launched, each with as few tokens as it may."""
MOST_TOKENS = CLUSTERS * max(TILES)


class _Call(ctypes.Structure):
    """``Call`` of the source."""

    _fields_ = (
        *(
            (name, c_void_p) for name in
            (
                "streams", "out", "more", "post", "mix", "fresh", "fn", "scale", "base", "norm", "x", "new_post",
                "new_mix",
            )
        ),
        *((name, c_int64) for name in ("token_stride", "stream_stride", "out_stride", "more_stride")),
        *((name, c_int) for name in ("tokens", "width", "iterations")),
        *((name, c_float) for name in ("eps", "norm_eps")),
    )


def choose_tile(num_tokens: int) -> int:
    """Tokens of a cluster."""
    return next(tile for tile in TILES if num_tokens <= tile * CLUSTERS)


@cache_compiled
def find_kernel(width: int, tile: int, device: torch.device, *, writes: bool) -> CudaKernel | None:
    """The kernel, compiled (a second) unless cached; None, with a warning, where that fails, or where no cluster of
    that size can run."""
    shared_bytes = 4 * 24 * 4 * width // CLUSTER
    with fallback("hyper-connections of few tokens take two kernels"), torch.cuda.device(device):
        kernel = load_kernel(
            "streams_few", device, shared_bytes, "pass_streams", CLUSTER=CLUSTER, COLUMNS=width // CLUSTER,
            TOKENS=tile, GROUP=TILES[tile], WRITES=int(writes),
        )
        return kernel if kernel.count_clusters(CLUSTER, width // CLUSTER + 32) else None
    return None


def can_run(streams: torch.Tensor) -> bool:
    """Whether `pass_streams` takes these streams."""
    num_tokens, _, width = streams.shape
    if not 0 < num_tokens <= MOST_TOKENS or width % COLUMN_STEP:
        return False
    tile = choose_tile(num_tokens)
    return all(find_kernel(width, tile, streams.device, writes=writes) is not None for writes in (False, True))


def pass_streams(
    streams: torch.Tensor, pending: Pending | None, mix: StreamMix, norm: torch.Tensor, shape: StreamShape
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `WRITE_READ_STREAMS`; without anything ``pending`` the streams are returned as they are."""
    num_tokens, num_streams, width = streams.shape
    kernel = find_kernel(width, tile := choose_tile(num_tokens), streams.device, writes=pending is not None)
    assert kernel is not None, "see can_run"
    new = streams if pending is None else torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    x = torch.empty((num_tokens, width), dtype=streams.dtype, device=streams.device)
    post = torch.empty((num_tokens, num_streams), dtype=torch.float32, device=streams.device)
    mixing = torch.empty((num_tokens, num_streams, num_streams), dtype=torch.float32, device=streams.device)
    before = (None,) * 4 if pending is None else (pending.out, pending.more, pending.post, pending.mix)
    strides = (
        0 if tensor is None else tensor.stride(0) for tensor in (before[0], before[1])
    )
    call = _Call(
        *(
            None if tensor is None else tensor.data_ptr()
            for tensor in (streams, *before, new, mix.fn, mix.scale, mix.base, norm, x, post, mixing)
        ),
        streams.stride(0), streams.stride(1), *strides, num_tokens, width, shape.iterations, shape.eps,
        shape.norm_eps,
    )
    kernel.launch(ceil_div(num_tokens, tile) * CLUSTER, width // CLUSTER + 32, call, is_dependent=True)
    return new, x, post, mixing

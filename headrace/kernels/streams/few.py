"""Hyper-connections of four streams for few tokens by own CUDA C++ (``csrc/cuda/streams_few.cu``, which says how it
works): one kernel, whose blocks exchange sums within a cluster.

T tokens, S streams, D hidden size, W = (2 + S) S weights of a token.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch

from headrace.kernels.collective import LentSum
from headrace.kernels.collective.calls import TYPES, Call, is_flat
from headrace.kernels.cuda_source import CudaKernel, cache_compiled, fallback, load_kernel
from headrace.kernels.launch import ceil_div
from headrace.kernels.streams import Pending, StreamMix, StreamShape

CLUSTER = 16
"""Blocks that have the columns of a token."""
COLUMN_STEP = 32 * CLUSTER
"""Hidden sizes are multiples of it: a block has whole warps of a thread for each column."""
ROWS, HELD = 96, 32
"""Rows of a width's weights, and those of them that threads hold in registers where a cluster has one token."""
TILES = {1: 1, 2: 2, 4: 4, 8: 4}
"""Tokens of a cluster, and those of them whose sums a thread has at once."""
CLUSTERS = 8
"""Up to so many are launched, each with as few tokens as it may."""
MOST_TOKENS = CLUSTERS * max(TILES)


class _Call(ctypes.Structure):
    """``Call`` of the source, of one rank."""

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


class _RankedCall(_Call):
    """The same of several."""

    _fields_ = (("ranks", Call),)


def choose_tile(num_tokens: int) -> int:
    """Tokens of a cluster."""
    return next(tile for tile in TILES if num_tokens <= tile * CLUSTERS)


def count_held(tile: int) -> int:
    """Rows of weights in registers."""
    return HELD if tile == 1 else 0


def count_shared_bytes(width: int, tile: int) -> int:
    """Of a block, for the other rows."""
    return 4 * (ROWS - count_held(tile)) * width // CLUSTER


@cache_compiled
def find_kernel(
    width: int, tile: int, device: torch.device, *, writes: bool, ranks: int = 1
) -> tuple[CudaKernel, int] | None:
    """The kernel, compiled (a second) unless cached, and how many clusters run at once; None, with a warning, where
    that fails, or where no cluster of that size can run. ``ranks``: those over which what is pending is added up."""
    held, shared_bytes = count_held(tile), count_shared_bytes(width, tile)
    with fallback("hyper-connections of few tokens take two kernels"), torch.cuda.device(device):
        kernel = load_kernel(
            "streams_few", device, shared_bytes, "pass_streams", CLUSTER=CLUSTER, COLUMNS=width // CLUSTER,
            TOKENS=tile, GROUP=TILES[tile], HELD=held, WRITES=int(writes), WORLD=ranks, TYPE=TYPES[torch.bfloat16],
        )
        kernel.share_multiprocessors()  # with the kernels before and behind it
        count = kernel.count_clusters(CLUSTER, width // CLUSTER + 32)
        return (kernel, count) if count else None
    return None


def can_run(streams: torch.Tensor) -> bool:
    """Whether `pass_streams` takes these streams."""
    num_tokens, _, width = streams.shape
    if not 0 < num_tokens <= MOST_TOKENS or width % COLUMN_STEP:
        return False
    tile = choose_tile(num_tokens)
    return all(find_kernel(width, tile, streams.device, writes=writes) is not None for writes in (False, True))


def can_sum(streams: torch.Tensor, pending: Pending, ranks: LentSum) -> bool:
    """Whether `pass_streams` also adds up over ranks: all clusters run at once, as they wait for the same of others.
    What is pending must be as `Collectives.all_reduce` takes it, which a rank without this kernel calls."""
    num_tokens, _, width = streams.shape
    parts = [pending.out] if pending.more is None else [pending.out, pending.more]
    if not can_run(streams) or not all(map(is_flat, parts)):
        return False
    found = find_kernel(width, tile := choose_tile(num_tokens), streams.device, writes=True, ranks=ranks.size)
    return found is not None and ceil_div(num_tokens, tile) <= found[1]


def pass_streams(
    streams: torch.Tensor, pending: Pending | None, mix: StreamMix, norm: torch.Tensor, shape: StreamShape,
    ranks: LentSum | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `WRITE_READ_STREAMS`; without anything ``pending`` the streams are returned as they are."""
    num_tokens, num_streams, width = streams.shape
    size = 1 if ranks is None else ranks.size
    found = find_kernel(
        width, tile := choose_tile(num_tokens), streams.device, writes=pending is not None, ranks=size
    )
    assert found is not None, "see can_run and can_sum"
    new = streams if pending is None else torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    x = torch.empty((num_tokens, width), dtype=streams.dtype, device=streams.device)
    post = torch.empty((num_tokens, num_streams), dtype=torch.float32, device=streams.device)
    mixing = torch.empty((num_tokens, num_streams, num_streams), dtype=torch.float32, device=streams.device)
    before = (None,) * 4 if pending is None else (pending.out, pending.more, pending.post, pending.mix)
    strides = (
        0 if tensor is None else tensor.stride(0) for tensor in (before[0], before[1])
    )
    fields = (
        *(
            None if tensor is None else tensor.data_ptr()
            for tensor in (streams, *before, new, mix.fn, mix.scale, mix.base, norm, x, post, mixing)
        ),
        streams.stride(0), streams.stride(1), *strides, num_tokens, width, shape.iterations, shape.eps,
        shape.norm_eps,
    )
    call = _Call(*fields) if ranks is None else _RankedCall(*fields, ranks.call)
    found[0].launch(ceil_div(num_tokens, tile) * CLUSTER, width // CLUSTER + 32, call, is_dependent=True)
    if ranks is not None:
        ranks.meet()
    return new, x, post, mixing

"""Hyper-connections of four streams for few tokens by own CUDA C++ (``csrc/cuda/streams_few.cu``, which says how it
works): one kernel, whose blocks exchange sums within a cluster.

T tokens, S streams, D hidden size, W = (2 + S) S weights of a token.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch

from headrace.kernels.coded_linear.device_codes import Fp8Rows
from headrace.kernels.collective import LentSum
from headrace.kernels.collective.calls import TYPES, Call, is_flat
from headrace.kernels.cuda_source import CudaKernel, cache_compiled, fallback, load_kernel
from headrace.kernels.streams import Pending, StreamMix, StreamShape, Written

CLUSTER = 16
"""Blocks that have the columns of a token."""
COLUMN_STEP = 32 * CLUSTER
"""Hidden sizes are multiples of it: a block has whole warps of a thread for each column."""
ROWS, HELD = 96, 32
"""Rows of a width's weights, and those of them that threads hold in registers."""
MOST_TOKENS = 8
"""More clusters do not run at once on all GPUs: see ``groups.py``."""


class StreamCall(ctypes.Structure):
    """``Call`` of ``csrc/cuda/stream_weights.cuh``, of one rank."""

    _fields_ = (
        *(
            (name, c_void_p) for name in
            (
                "streams", "out", "more", "post", "mix", "fresh", "fn", "scale", "base", "norm", "x", "new_post",
                "new_mix", "codes", "code_scales",
            )
        ),
        *((name, c_int64) for name in ("token_stride", "stream_stride", "out_stride", "more_stride")),
        *((name, c_int) for name in ("tokens", "width", "iterations")),
        *((name, c_float) for name in ("eps", "norm_eps")),
    )


class RankedCall(StreamCall):
    """The same of several."""

    _fields_ = (("ranks", Call),)


def describe_call(
    streams: torch.Tensor, pending: Pending | None, mix: StreamMix, norm: torch.Tensor, shape: StreamShape,
    ranks: LentSum | None, rows: Fp8Rows | None = None,
) -> tuple[StreamCall, Written]:
    """What a kernel is called with, and the tensors that it writes, as `WRITE_READ_STREAMS` returns them; without
    anything ``pending`` the streams are returned as they are. ``rows``: where x is also written in FP8."""
    num_tokens, num_streams, width = streams.shape
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
            for tensor in (
                streams, *before, new, mix.fn, mix.scale, mix.base, norm, x, post, mixing, *(rows or (None, None))
            )
        ),
        streams.stride(0), streams.stride(1), *strides, num_tokens, width, shape.iterations, shape.eps,
        shape.norm_eps,
    )
    call = StreamCall(*fields) if ranks is None else RankedCall(*fields, ranks.call)
    return call, (new, x, post, mixing)


def count_shared_bytes(width: int) -> int:
    """Of a block, for the rows of weights that are not in registers."""
    return 4 * (ROWS - HELD) * width // CLUSTER


@cache_compiled
def find_kernel(width: int, device: torch.device, *, writes: bool, ranks: int = 1) -> tuple[CudaKernel, int] | None:
    """The kernel, compiled (a second) unless cached, and how many clusters run at once; None, with a warning, where
    that fails, or where no cluster of that size can run. ``ranks``: those over which what is pending is added up."""
    with fallback("hyper-connections of few tokens take two kernels"), torch.cuda.device(device):
        kernel = load_kernel(
            "streams_few", device, count_shared_bytes(width), "pass_streams", CLUSTER=CLUSTER, COLUMNS=width // CLUSTER,
            HELD=HELD, WRITES=int(writes), WORLD=ranks, TYPE=TYPES[torch.bfloat16],
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
    return all(find_kernel(width, streams.device, writes=writes) is not None for writes in (False, True))


def can_sum(streams: torch.Tensor, pending: Pending, ranks: LentSum) -> bool:
    """Whether `pass_streams` also adds up over ranks: all clusters run at once, as they wait for the same of others.
    What is pending must be as `Collectives.all_reduce` takes it, which a rank without this kernel calls."""
    num_tokens, _, width = streams.shape
    if not can_run(streams) or not is_summable(pending):
        return False
    found = find_kernel(width, streams.device, writes=True, ranks=ranks.size)
    return found is not None and num_tokens <= found[1]


def is_summable(pending: Pending) -> bool:
    """Whether `Collectives.all_reduce` takes what is pending."""
    return all(map(is_flat, [pending.out] if pending.more is None else [pending.out, pending.more]))


def pass_streams(
    streams: torch.Tensor, pending: Pending | None, mix: StreamMix, norm: torch.Tensor, shape: StreamShape,
    ranks: LentSum | None = None,
) -> Written:
    """See `WRITE_READ_STREAMS`; without anything ``pending`` the streams are returned as they are."""
    num_tokens, _, width = streams.shape
    found = find_kernel(
        width, streams.device, writes=pending is not None, ranks=1 if ranks is None else ranks.size
    )
    assert found is not None, "see can_run and can_sum"
    call, results = describe_call(streams, pending, mix, norm, shape, ranks)
    found[0].launch(num_tokens * CLUSTER, width // CLUSTER + 32, call, is_dependent=True)
    if ranks is not None:
        ranks.meet()
    return results

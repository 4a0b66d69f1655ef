"""Hyper-connections of four streams for some tens of tokens by own CUDA C++ (``csrc/cuda/streams_groups.cu``, which
says how it works): one kernel, whose blocks all run at once and exchange sums through the L2.

T tokens, S streams, D hidden size.
"""

from __future__ import annotations

from collections import defaultdict
from ctypes import c_int
from itertools import count

import torch

from headrace.kernels.coded_linear.device_codes import Fp8Rows
from headrace.kernels.collective import LentSum
from headrace.kernels.collective.calls import TYPES, is_aligned
from headrace.kernels.cuda_source import CudaKernel, cache_compiled, count_sms, current_stream, fallback, load_kernel
from headrace.kernels.launch import ceil_div
from headrace.kernels.streams import Pending, StreamMix, StreamShape, Written
from headrace.kernels.streams.few import describe_call, is_summable

TOKENS, GROUPS = 16, 4
"""Tokens of a group of blocks, and groups of a call at most."""
MOST_TOKENS = TOKENS * GROUPS
WARPS, WARP_COLUMNS = (8, 14), 16
"""Warps of a block, of so many columns each: the first with which all blocks of all groups run at once."""
CODE_COLUMNS = 128
"""Of a scale in FP8."""
WARP_BYTES, TOKEN_BYTES = 4 * 24 * 4 * WARP_COLUMNS, 4 * (20 + 16 + 4 + 1)
"""Shared memory, as in the source: of a warp its weights; of a token weights of what is pending, sums, weights of
streams and the norm's factor."""
SLOTS = 16
"""Streams of the device that may call. Hazard: of calls at once all blocks must run at once, or they wait for each
other until the launch fails, some ten minutes later."""

_slots: dict[tuple[int | None, int], int] = {}
"""Where calls of a device and one of its streams exchange sums."""
_numbers: defaultdict[int | None, count[int]] = defaultdict(count)
"""Of slots that no stream of a device has."""


def choose_warps(width: int, num_sms: int) -> int | None:
    """Warps of a block; None where blocks do not divide the hidden size, or would not all run at once."""
    for warps in WARPS:
        columns = WARP_COLUMNS * warps
        if width % columns == 0 and GROUPS * width <= columns * num_sms:
            return warps
    return None


def count_shared_bytes(warps: int) -> int:
    """``Shared`` of the source."""
    return warps * WARP_BYTES + TOKENS * TOKEN_BYTES


@cache_compiled
def find_kernel(width: int, device: torch.device, *, writes: bool, ranks: int = 1) -> CudaKernel | None:
    """The kernel, compiled (some seconds) unless cached; None, with a warning, where that fails, and where not all
    blocks run at once. ``ranks``: those over which what is pending is added up."""
    warps = choose_warps(width, count_sms(device))
    if warps is None:
        return None
    with fallback("hyper-connections of some tens of tokens take two kernels"), torch.cuda.device(device):
        kernel = load_kernel(
            "streams_groups", device, count_shared_bytes(warps), "pass_groups", WARPS=warps,
            SPLITS=width // (WARP_COLUMNS * warps), WRITES=int(writes), SLOTS=SLOTS, GROUPS=GROUPS, WORLD=ranks,
            TYPE=TYPES[torch.bfloat16],
        )
        kernel.share_multiprocessors()  # with the kernels before and behind it
        return kernel if kernel.count_resident(32 * warps + 32) else None
    return None


def find_slot(device: torch.device) -> int | None:
    """The place of the current stream's calls; None where too many streams have one. Graphs have that of the stream on
    which they were captured: those of one stream must not be replayed on several at once."""
    key = (device.index, current_stream(torch.cuda.current_device() if device.index is None else device.index))
    slot = _slots.get(key)
    if slot is None:
        slot = _slots.setdefault(key, next(_numbers[device.index]))
    return slot if slot < SLOTS else None


def can_run(streams: torch.Tensor, pending: Pending | None = None) -> bool:
    """Whether `pass_streams` takes these."""
    num_tokens, _, width = streams.shape
    if not 0 < num_tokens <= MOST_TOKENS or not is_aligned(streams):
        return False
    if pending is not None and not all(is_aligned(own) for own in (pending.out, pending.more) if own is not None):
        return False
    found = (find_kernel(width, streams.device, writes=writes) for writes in (False, True))
    return all(kernel is not None for kernel in found) and find_slot(streams.device) is not None


def can_sum(streams: torch.Tensor, pending: Pending, ranks: LentSum) -> bool:
    """Whether `pass_streams` also adds up over ranks. What is pending must be as `Collectives.all_reduce` takes it,
    which a rank without this kernel calls."""
    if not is_summable(pending) or not can_run(streams, pending):
        return False
    return find_kernel(streams.shape[2], streams.device, writes=True, ranks=ranks.size) is not None


def allocate_rows(streams: torch.Tensor, group: int | None) -> Fp8Rows | None:
    """Memory for the FP8 rows of the next product's input, with scales of a ``group`` of columns; None where that is
    not what a block has."""
    (num_tokens, _, width), warps = streams.shape, choose_warps(streams.shape[2], count_sms(streams.device))
    if group != CODE_COLUMNS or warps is None or warps * WARP_COLUMNS != group:
        return None
    return Fp8Rows.allocate(num_tokens, width, group, streams.device)


def pass_streams(
    streams: torch.Tensor, pending: Pending | None, mix: StreamMix, norm: torch.Tensor, shape: StreamShape,
    ranks: LentSum | None = None, rows: Fp8Rows | None = None,
) -> Written:
    """See `WRITE_READ_STREAMS`; without anything ``pending`` the streams are returned as they are. ``rows``: as by
    `allocate_rows`, where x is also written in FP8."""
    num_tokens, _, width = streams.shape
    size = 1 if ranks is None else ranks.size
    kernel = find_kernel(width, streams.device, writes=pending is not None, ranks=size)
    warps, slot = choose_warps(width, count_sms(streams.device)), find_slot(streams.device)
    assert kernel is not None and warps is not None and slot is not None, "see can_run and can_sum"
    call, results = describe_call(streams, pending, mix, norm, shape, ranks, rows)
    blocks = ceil_div(num_tokens, TOKENS) * width // (WARP_COLUMNS * warps)
    kernel.launch(blocks, 32 * warps + 32, call, c_int(slot), is_dependent=True)
    if ranks is not None:
        ranks.meet()
    return results

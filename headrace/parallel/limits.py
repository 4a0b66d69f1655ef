"""`measure_limits`: up to which sizes own kernels serve collectives on this machine, and in which way; `slice_rows`:
which steps are computed in slices.

The former is measured at the start, in tens of milliseconds, by all ranks at once: links between GPUs differ too much
for a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import torch

from headrace.kernels.collective import Collectives, Limits
from headrace.kernels.operation import KernelQuery
from headrace.kernels.rowwise import ADD_RMS_NORM
from headrace.parallel.group import Group

WIDTH = 4096
SIZES = tuple(size << 10 for size in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536))
"""Bytes of a tensor [rows, `WIDTH`] bfloat16."""
CALLS, WARM_CALLS, ROUNDS = 8, 3, 3
DELAY_CYCLES = 1_000_000
"""Of the device's clock, about half a millisecond: as long as the host takes to launch the calls that are timed."""
EPS = 1e-5
ANY = 1 << 40
NEVER = float("inf")

SLICES = 2
"""Of the rows of a large step. While one of them is added up over the ranks, the next is computed."""
LEAST_SLICE_BYTES = 8 << 20
"""Of a slice's rows. Smaller sums take less than the launches that a slice costs."""
SLICE_ROWS = 256
"""A slice is a multiple of it, as tiles of products are at most so large, but for the last one."""
MOST_SENDING_RANKS = 2
"""Copies go to all other ranks, which with more of them takes longer than a sum that each rank makes of a part."""

Call = Callable[[], object]
Clock = Callable[[Call], float]
"""Microseconds that a call takes on the device; infinite for one that returns None, which is not served."""


Times = dict[int, float]
"""Microseconds by bytes of a tensor, of the slowest rank; infinite where a way is not served."""


def slice_rows(num_rows: int, row_bytes: int) -> list[int]:
    """The lengths of the slices in which so many rows go through layers, where a group's `Group.can_slice` says so; of
    steps that are not large one slice."""
    count = min(SLICES, num_rows * row_bytes // LEAST_SLICE_BYTES)
    if count < 2:
        return [num_rows]
    length = -(-num_rows // (count * SLICE_ROWS)) * SLICE_ROWS
    return [min(length, num_rows - at) for at in range(0, num_rows, length)]


def choose_limits(timings: Mapping[str, Times]) -> Limits:
    """The sizes up to which each way is the fastest. ``timings`` are those of ``sum_one``, ``sum_two`` and
    ``library`` for sums; of ``fused_one`` and ``fused_two``, a sum in one or two steps with a norm, and ``norm``, the
    norm alone; of ``gather`` and ``library_gather``."""
    own = _fastest(timings["sum_one"], timings["sum_two"])
    best = _fastest(own, timings["library"])
    one_step = _last_win(timings["sum_one"], timings["sum_two"])
    fused = {size: timings["fused_one" if size <= one_step else "fused_two"][size] for size in own}
    return Limits(
        one_step=one_step,
        fused=_last_win(fused, {size: best[size] + took for size, took in timings["norm"].items()}),
        sums=_last_win(own, timings["library"]),
        gathers=_last_win(timings["gather"], timings["library_gather"]),
    )


def _fastest(one: Times, other: Times) -> Times:
    return {size: min(took, other[size]) for size, took in one.items()}


def _last_win(ours: dict[int, float], theirs: dict[int, float]) -> int:
    """The largest size up to which ``ours`` is not slower; 0 for none. One size where it is slower, with larger ones
    where it is not, is noise."""
    last = num_losses = 0
    for size in sorted(ours):
        if ours[size] < NEVER and ours[size] <= theirs[size]:
            last, num_losses = size, 0
        else:
            num_losses += 1
        if num_losses == 2:
            break
    return last


@cache
def begin_norm(device: torch.device) -> Future[object]:
    """Run the norm that `measure_limits` times once, on a thread: at a first start Triton is imported for it, and
    compiles it, while ranks meet. It must have ended before ranks are timed: at times it holds Python's lock."""

    def run() -> object:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        x = torch.ones(SIZES[0] // 2 // WIDTH, WIDTH, dtype=torch.bfloat16, device=device)
        return ADD_RMS_NORM.choose(_query(device))(x, x.clone(), x[0].clone(), EPS)

    threads = ThreadPoolExecutor(1, "norm")
    begun = threads.submit(run)
    threads.shutdown(wait=False)
    return begun


def measure_limits(base: Group, collectives: Collectives, device: torch.device, clock: Clock | None = None) -> Limits:
    """Measure, and leave ``collectives.limits`` as they were; the same result on all ranks, which must all call it."""
    kept, time_calls = collectives.limits, clock or clock_of(device)
    timings: dict[str, Times] = {}
    for size in SIZES:
        took = []
        ways = _list_ways(base, collectives, torch.ones(size // 2 // WIDTH, WIDTH, dtype=torch.bfloat16, device=device))
        for name, call in ways.items():
            collectives.limits = Limits(0 if name.endswith("_two") else ANY, ANY, ANY, ANY)
            took.append(time_calls(call))
        for name, slowest in zip(ways, _slowest(base, took), strict=True):
            timings.setdefault(name, {})[size] = slowest
    collectives.limits = kept
    return choose_limits(timings)


def _list_ways(base: Group, collectives: Collectives, x: torch.Tensor) -> dict[str, Call]:
    """What is timed for tensors like ``x``. Some overwrite their tensors, whose values do not matter."""
    own, stream, weight = x.clone(), x.clone(), x[0].clone()
    norm = ADD_RMS_NORM.choose(_query(x.device))

    def fused() -> object:
        return collectives.reduce_add_norm(x, stream, weight, eps=EPS, offset=0.0)

    return {
        "sum_one": lambda: collectives.all_reduce(x),
        "sum_two": lambda: collectives.all_reduce(x),
        "library": lambda: base.all_reduce(own),
        "norm": lambda: norm(x, stream, weight, EPS),
        "fused_one": fused,
        "fused_two": fused,
        "gather": lambda: collectives.all_gather(x),
        "library_gather": lambda: base.all_gather(x, [WIDTH] * base.size),
    }


def _query(device: torch.device) -> KernelQuery:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return KernelQuery(device.type, "bfloat16", capability, {"width": WIDTH})


def _slowest(base: Group, took: Sequence[float]) -> list[float]:
    """Of each time that of the slowest rank."""
    agreed = base.agree([-ANY if t == NEVER else -round(1000 * t) for t in took])
    return [NEVER if -value == ANY else -value / 1000 for value in agreed]


def clock_of(device: torch.device) -> Clock:
    """A clock for calls on a GPU, of the best of some rounds: in the others, a rank may have been late. In each, the
    device first waits, so that it then finds all calls launched; an untimed call lines the ranks up."""

    def time_calls(call: Call) -> float:
        for _ in range(WARM_CALLS):
            if call() is None:
                return NEVER
        with torch.cuda.device(device):
            return min(time_round(call) for _ in range(ROUNDS))

    def time_round(call: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(DELAY_CYCLES)
        call()
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000 / CALLS

    return time_calls

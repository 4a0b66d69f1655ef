"""Seconds that calls take on a GPU, as a captured graph replays them: without the host's time for launches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

REPEATS = 5
CHAIN_CALLS = 8
"""Calls of a chain, at least."""
FLUSH_BYTES = 128 << 20
FLUSHES = 8
"""So much is written so many times before a measurement of a single call: nothing is then read from the GPU's cache,
and the GPU is busy for some 250 us while the host launches."""

Timer = Callable[[list[Callable[[], Any]]], float]
"""Measures calls of the same work on different memory, one after the other: seconds of one."""


def time_chain(calls: list[Callable[[], Any]]) -> float:
    """Seconds of a call on the current GPU, the least of `REPEATS`, in a captured graph of calls one after the other,
    as a step replays them: kernels overlap where they can, and no weight is in the cache if the calls' are too many
    for it. A single call is measured by itself."""
    if len(calls) == 1:
        return time_on_gpu(calls[0])
    repeats = -(-CHAIN_CALLS // len(calls))

    def run_all() -> None:
        for call in calls * repeats:
            call()

    calls[0]()
    run = _capture(run_all)
    run()
    return _time(run, lambda: None) / (repeats * len(calls))


def time_on_gpu(call: Callable[[], Any]) -> float:
    """Seconds of a call on the current GPU, the least of `REPEATS`, with a cold cache, as a captured graph replays it:
    without the host's time for launches. What cannot be captured is launched while the GPU is busy with writing."""
    call()
    run = _capture(call)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def prepare() -> None:
        for _ in range(FLUSHES):
            flush.zero_()

    return _time(run, prepare)


def _time(run: Callable[[], Any], prepare: Callable[[], None]) -> float:
    """Seconds of ``run`` after ``prepare`` on the current GPU."""
    least = math.inf
    for _ in range(REPEATS):
        prepare()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        least = min(least, start.elapsed_time(end) / 1e3)
    return least


def _capture(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a graph's replay; itself if it cannot be captured."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                call()
            finally:
                graph.capture_end()
    except RuntimeError:
        return call
    return graph.replay

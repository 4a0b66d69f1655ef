"""Attention of encoders on Hopper: own CUDA C++ beside torch's flash attention, without rotation, in microseconds and
TFLOP/s of the dims that there are: ``python -m benchmarks.span_attention [--seconds 0.3]``. Own kernels with tiles of
128 and of 192 rows; a star is what the operation chooses. ``error``: how far the chosen one is from float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn

from headrace.kernels.cuda_source import count_sms
from headrace.kernels.span_attention import Spans, hopper, reference
from headrace.layers.vision import make_spans

SHAPES: list[tuple[str, int, int, list[int]]] = [
    ("Qwen3-VL-8B, 1 image", 16, 72, [4096]),
    ("Qwen3-VL-8B, 4 images", 16, 72, [4096] * 4),
    ("Qwen3-VL-8B, of all sizes", 16, 72, [4096, 1024, 256, 2304, 600, 8100]),
    ("Qwen2.5-VL-7B, 1 image", 16, 80, [5476]),
    ("Qwen2.5-VL-7B, 4 images", 16, 80, [5476] * 4),
    ("SigLIP-So400m, 16 images", 16, 72, [729] * 16),
    ("SigLIP-So400m, 4,096", 16, 72, [4096]),
    ("CLIP-L, 16 images", 16, 64, [577] * 16),
    ("InternViT-300M, 13 tiles", 16, 64, [1025] * 13),
    ("Pixtral, 1 image", 16, 64, [4096]),
    ("Whisper-large-v3, 1 window", 20, 64, [1500]),
    ("Whisper-large-v3, 16 windows", 20, 64, [1500] * 16),
    ("heads of 128, 1 image", 16, 128, [4096]),
]
"""Name, heads, dims, lengths of spans."""
CALLS = 10
"""Of a captured graph."""


def time_long(call: Callable[[], object], seconds: float) -> float:
    """Seconds of a call, over so many seconds of replays: the clocks settle at what the power allows."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    count, began = 0, 0.0
    for part in (seconds / 3, seconds):  # the first one is not counted
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < part:
            graph.replay()
            count += 1
            torch.cuda.synchronize()
    return (time.perf_counter() - began) / count / CALLS


def attend_by_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans) -> object:
    """Torch's flash attention."""
    longest = max(spans.lengths)
    return varlen_attn(q, k, v, spans.starts, spans.starts, longest, longest)


def measure(heads: int, dim: int, lengths: list[int], seconds: float) -> str:
    """A line of the table."""
    device = torch.device("cuda")
    qkv = torch.randn(sum(lengths), 3, heads, dim, dtype=torch.bfloat16, device=device)
    q, k, v = qkv.unbind(1)
    spans, scale = make_spans(lengths, device), dim**-0.5
    flops = 4 * heads * dim * float(np.square(np.array(lengths, dtype=np.float64)).sum())
    kernels = hopper.find_kernels(dim, q.dtype, device)
    chosen = hopper.choose_groups(lengths, heads, dim, count_sms(device))

    def attend(groups: int) -> torch.Tensor:
        return hopper.attend(q, k, v, spans, scale, kernels[groups], groups)

    line = _tell(time_long(lambda: attend_by_flash(q, k, v, spans), seconds), flops)
    for groups in (2, 3):
        if groups in kernels:
            line += _tell(time_long(partial(attend, groups), seconds), flops) + ("*" if groups == chosen else " ")
        else:
            line += f"{'-':>14} "
    exact = reference.span_attention(q.float(), k.float(), v.float(), spans, scale)
    return f"{line}  {float((attend(chosen) - exact).norm() / exact.norm()):.4f}"


def _tell(seconds: float, flops: float) -> str:
    return f"{seconds * 1e6:7.1f} ({flops / seconds / 1e12:4.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--only", default="", help="part of a shape's name")
    options = parser.parse_args()
    print(f"{'us (TFLOP/s)':30} {'flash':>13} {'own, 128':>14} {'own, 192':>14}   error")
    for name, heads, dim, lengths in SHAPES:
        if options.only in name:
            print(f"{name:30} {measure(heads, dim, lengths, options.seconds)}", flush=True)


if __name__ == "__main__":
    main()

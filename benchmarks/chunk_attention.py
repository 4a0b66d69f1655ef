"""Attention of chunks on Hopper, with and without their keys divided among programs: ``python -m
benchmarks.chunk_attention [--only REGEX] [--seconds S]``.

Timed are CUDA-graph replays of a layer over rotated pages (more than the second-level cache holds). `closed`: the host
knows the lengths; `open`: a captured step. A line: the time of the bytes and that of the products, then microseconds
without and with splits, their ratio, how many splits the longest chunk has, and how far the two results are apart.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.cuda_kernels import BF16, MODELS, PAGE, ROTATED_BYTES, Model, Pool, randn, time_calls
from benchmarks.roofline import BANDWIDTH, MATRIX_RATE
from headrace.layers.attention.contract import AttentionGeometry, AttentionInputs, AttentionParams, KvPages
from headrace.layers.attention.hopper import HopperAttention

Spans = list[tuple[int, int]]
CUDA = torch.device("cuda")
GPT_OSS = Model("gpt-oss", 64, 8, 2880, 2880, 201088, 24, False, dim=64)


@dataclass(frozen=True)
class Step:
    """``spans`` are (query length, kv length), decodes first."""

    name: str
    model: Model
    spans: Spans
    window: int = 0

    @property
    def decodes(self) -> int:
        return next((i for i, (n, _) in enumerate(self.spans) if n > 1), len(self.spans) - 1)

    def count_keys(self) -> list[int]:
        return [min(kv, self.window + n) if self.window else kv for n, kv in self.spans]

    def moved(self) -> float:
        return 4.0 * self.model.kv_heads * self.model.dim * sum(self.count_keys())

    def flops(self) -> float:
        seen = sum(n * (min(kv, self.window) if self.window else kv - (n - 1) / 2) for n, kv in self.spans)
        return 4.0 * self.model.heads * self.model.dim * seen


def list_steps() -> list[Step]:
    model = MODELS[1]
    steps = [
        Step(f"{count}@{context}{' +32' if decodes else ''}", model, [*decodes, (count, context + count)])
        for decodes in ([], [(1, 2048)] * 32) for context in (2048, 8192, 32768) for count in (1, 16, 64, 256)
    ]
    for name, spans in {
        "8192": [(8192, 8192)], "128x64@2048": [(64, 2112)] * 128, "4x2048": [(2048, 2048)] * 4, "512": [(512, 512)],
        "16x512": [(512, 512)] * 16, "8x20": [(20, 20)] * 8, "512@8192": [(512, 8704)], "4x64@8192": [(64, 8256)] * 4,
        "40x200,64@32768": [*[(200, 200)] * 40, (64, 32832)],
    }.items():
        steps.append(Step(name, model, spans))
    tp8 = replace(model, name="8b tp8", heads=4, kv_heads=1)
    steps += [Step(f"tp8 64@{context}", tp8, [(64, context + 64)]) for context in (8192, 32768)]
    for window in (0, 128):
        steps += [
            Step(f"dim64{f' w{window}' if window else ''} {name}", GPT_OSS, spans, window)
            for name, spans in {"64@8192": [(64, 8256)], "2048": [(2048, 2048)], "8192": [(8192, 8192)]}.items()
        ]
    return steps


def make_calls(step: Step, pool: Pool, *, is_open: bool, divides: bool) -> tuple[list[Callable[[], torch.Tensor]], int]:
    """A layer over different pages, and the splits of the chunk that has most."""
    torch.manual_seed(3)
    model, spans = step.model, step.spans
    geometry = AttentionGeometry(
        "cuda", "bfloat16", "bfloat16", (9, 0), model.heads, model.kv_heads, model.dim, model.dim, PAGE, step.window
    )
    first = HopperAttention(geometry, CUDA)
    first._split_workspace = first._split_workspace if divides else None
    query_lens, kv_lens = [n for n, _ in spans], [n for _, n in spans]
    starts = torch.tensor([0, *query_lens], device="cuda").cumsum(0).int()
    num_tokens, longest = sum(query_lens), max(kv_lens)
    q, params = randn(num_tokens, model.heads, model.dim), AttentionParams(model.dim**-0.5, step.window)
    lengths, slots = torch.tensor(kv_lens, device="cuda", dtype=torch.int32), torch.zeros(1, device="cuda")
    pages, calls, most = KvPages(*pool.pages(PAGE)), [], 1
    for table in pool.tables(max(1, min(16, int(ROTATED_BYTES / step.moved()))), len(spans), longest, PAGE):
        inputs = AttentionInputs(
            num_tokens, 0 if is_open else step.decodes, query_lens, kv_lens, max(query_lens), longest, starts, lengths,
            table, slots, has_dynamic_lengths=is_open
        )
        backend = first.twin()
        backend.prepare(inputs)
        if backend._plan.workspace is not None:
            most = max(splits for request, _, _, splits in backend._plan.blocks.tolist() if request >= 0)
        calls.append(partial(backend.attend, q, pages, params))
    return calls, most


def measure(step: Step, pool: Pool, *, is_open: bool) -> str:
    times, outs, most = [], [], 1
    for divides in (False, True):
        calls, most = make_calls(step, pool, is_open=is_open, divides=divides)
        outs.append(calls[0]().float())
        times.append(time_calls(calls, seconds=0.01) * 1e6)
    error = float((outs[1] - outs[0]).norm() / outs[0].norm())
    name = f"{step.name} {'open' if is_open else 'closed'}"
    floors = f"{step.moved() / BANDWIDTH * 1e6:7.1f} {step.flops() / MATRIX_RATE * 1e6:7.1f}"
    return f"{name:<28}{floors}  {times[0]:8.1f} {times[1]:8.1f}  {times[1] / times[0]:5.2f}  {most:3}  {error:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="regular expression on names")
    parser.add_argument("--seconds", type=float, default=60.0, help="stop starting items after this long")
    args = parser.parse_args()
    began, pools = time.time(), dict[tuple[int, int], Pool]()
    for step in list_steps():
        model = step.model
        shape = model.kv_heads, model.dim
        for is_open in (False, True):
            if not re.search(args.only, f"{step.name} {'open' if is_open else 'closed'}"):
                continue
            if is_open and sum(n for n, _ in step.spans[step.decodes :]) == 1:
                continue  # a decode
            if time.time() - began > args.seconds:
                print(f"{step.name}: not run, out of time")
                continue
            if shape not in pools:
                pools[shape] = Pool(44 * 32832 + PAGE * 16, *shape, dtype=BF16)
            print(measure(step, pools[shape], is_open=is_open), flush=True)


if __name__ == "__main__":
    main()

"""Experts in bfloat16 of many tokens, on one GPU: ``python -m benchmarks.many_experts [--tokens 512 2048 8192]``.

Microseconds of a step from choices to sums, in captured chains over several layers' weights: own CUDA C++ beside
torch's grouped products with kernels between them, how fast each multiplies, and single kernels. After ``--seconds`` no
more lines begin.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.cuda_kernels import time_calls
from benchmarks.few_experts import MODELS, POOL_BYTES, STEPS, divide
from headrace.kernels.coded_linear.hopper import Gated
from headrace.kernels.moe import Stacked, hopper, plain_many
from headrace.kernels.moe.pair_order import group_pairs
from headrace.kernels.moe.reference import grouped_mm
from headrace.kernels.moe.triton import gate_pairs, sum_pairs
from headrace.kernels.precompile import precompile
from headrace.kernels.rowwise import Gate

SILU = Gate("silu")


def run_apart(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: Stacked, down: Stacked, gate: Gate
) -> torch.Tensor:
    """One kernel behind the other, as where there is no `MANY_EXPERTS`."""
    order, place, ends = group_pairs(ids, len(down[0]))
    hidden, experts = x.index_select(0, order // ids.shape[1]), ids.flatten().index_select(0, order)
    inner = gate_pairs(grouped_mm(hidden, gate_up[0], None, ends, experts), None, experts, gate)
    return sum_pairs(grouped_mm(inner, down[0], None, ends, experts), place, weights, ids, None, pdl=True)


def make_parts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, stacks: tuple[Stacked, ...]
) -> dict[str, Any]:
    """Single kernels, as calls."""
    gate_up, down = stacks
    num_experts, device = len(down[0]), x.device
    order, place, ends = group_pairs(ids, num_experts)
    rows = hopper.gather_rows(x, order, ends, ids.shape[1], evens_first=False)
    first, second = (plain_many.find_kernel(kind, num_experts, device) for kind in ("silu", ""))
    assert first is not None and second is not None
    inner = plain_many.multiply(rows, *gate_up, ends, first, Gated("silu"))
    out = plain_many.multiply(inner, *down, ends, second)
    return {
        "group": lambda: group_pairs(ids, num_experts),
        "gather": lambda: hopper.gather_rows(x, order, ends, ids.shape[1], evens_first=False),
        "gate and up": lambda: plain_many.multiply(rows, *gate_up, ends, first, Gated("silu")),
        "down": lambda: plain_many.multiply(inner, *down, ends, second),
        "sum": lambda: sum_pairs(out, place, weights, ids, None, pdl=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", nargs="*", type=int, default=[8192, 2048, 512])
    parser.add_argument("--models", nargs="*", default=["Qwen3-30B-A3B", "Qwen3-30B-A3B/2", "Mixtral-8x7B/2"])
    parser.add_argument("--seconds", type=float, default=30)
    args = parser.parse_args()
    began = time.time()
    pool = torch.empty(POOL_BYTES // 2, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
    ways = {"own": plain_many.run_experts, "apart": run_apart}

    def make(name: str, num_tokens: int) -> SimpleNamespace:
        num_experts, top_k, width, inner = MODELS[name]
        torch.manual_seed(num_tokens)
        return SimpleNamespace(
            x=torch.randn(num_tokens, width, device="cuda").bfloat16(),
            ids=torch.rand(num_tokens, num_experts, device="cuda").topk(top_k).indices,
            weights=torch.rand(num_tokens, top_k, device="cuda"),
            layers=list(divide(pool, num_experts, width, inner, has_bias=False)),
            operations=6 * num_tokens * top_k * width * inner,
        )

    def run_all() -> None:
        for name in args.models:
            for num_tokens in args.tokens:
                case = make(name, num_tokens)
                for run in ways.values():
                    run(case.x, case.ids, case.weights, *case.layers[0], SILU)

    precompile(run_all, "experts of many tokens", torch.device("cuda", 0))
    print(f"ready after {time.time() - began:.1f} s", flush=True)
    for name in args.models:
        for num_tokens in args.tokens:
            if time.time() - began > args.seconds:
                return
            case = make(name, num_tokens)
            told = []
            for way, run in ways.items():
                calls = [partial(run, case.x, case.ids, case.weights, *case.layers[i], SILU) for i in range(STEPS)]
                seconds = time_calls(calls)
                told.append(f"{way} {seconds * 1e6:7.1f} ({case.operations / seconds / 1e12:3.0f} TFLOP/s)")
            for part, call in make_parts(case.x, case.ids, case.weights, case.layers[0]).items():
                told.append(f"{part} {time_calls([call]) * 1e6:.1f}")
            print(f"{name:18s} {num_tokens:5d} tokens  " + "  ".join(told), flush=True)


if __name__ == "__main__":
    main()

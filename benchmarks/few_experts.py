"""Experts in bfloat16 of a few tokens, on one GPU: ``python -m benchmarks.few_experts [--tokens 1 2 4 8] [--router]
[--down]``.

Microseconds of a step from choices to sums, in captured chains of steps with other weights and other choices each: own
CUDA C++ beside Triton, and the time of the chosen experts' bytes. ``--router``: each step begins with the norm, the
router and the choice, which take a launch of their own. ``--down``: also Triton's with down in the tile of gate and up.
After ``--seconds`` no more lines begin.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.cuda_kernels import time_calls
from benchmarks.roofline import BANDWIDTH
from headrace.kernels.linear import Norm
from headrace.kernels.moe import RUN_EXPERTS, Stacked, experts
from headrace.kernels.moe.norm_route import norm_route
from headrace.kernels.precompile import precompile
from headrace.kernels.rowwise import Gate

MODELS = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768), "Qwen3-30B-A3B/2": (128, 8, 2048, 384),
    "Qwen3-30B-A3B/4": (128, 8, 2048, 192), "gpt-oss-20b": (32, 4, 2880, 2880), "gpt-oss-20b/2": (32, 4, 2880, 1440),
    "DeepSeek-V2-Lite": (64, 6, 2048, 1408), "DeepSeek-V2-Lite/4": (64, 6, 2048, 352), "OLMoE": (64, 8, 2048, 1024),
    "Qwen1.5-MoE": (60, 4, 2048, 1408), "Mixtral-8x7B": (8, 2, 4096, 14336), "Mixtral-8x7B/2": (8, 2, 4096, 7168),
}
"""Experts, choices, hidden size, expert intermediate size, which several GPUs divide."""
STEPS, POOL_BYTES = 12, 9 << 30
"""Of a chain; of numbers that the weights of all shapes are views of."""


def divide(
    pool: torch.Tensor, num_experts: int, width: int, inner: int, *, has_bias: bool
) -> Iterator[tuple[Stacked, ...]]:
    """Stacks of gate and up, and of down, of other layers again and again: three, or as many as there is room for."""
    sizes = [(num_experts, 2 * inner, width), (num_experts, width, inner)]
    counts = [rows[0] * rows[1] * rows[2] for rows in sizes]
    layers = min(3, len(pool) // sum(counts))
    bias = [pool[: a * b].view(a, b) if has_bias else None for a, b, _ in sizes]
    for layer in range(STEPS):
        parts = pool[layer % layers * sum(counts) :][: sum(counts)].split(counts)
        yield tuple((part.view(size), own) for part, size, own in zip(parts, sizes, bias, strict=True))


def make_chain(
    run: Callable[..., torch.Tensor], pool: torch.Tensor, shape: tuple[int, ...], num_tokens: int, *, has_router: bool
) -> tuple[list[Callable[[], Any]], float]:
    """Calls, and the mean share of the experts that are chosen."""
    num_experts, top_k, width, inner = shape
    is_oss = width == 2880
    gate = Gate("clamped", 7.0, 1.702, 1.0) if is_oss else Gate("silu")
    x, weights = torch.randn(num_tokens, width, device="cuda").bfloat16(), torch.rand(num_tokens, top_k, device="cuda")
    router = torch.randn(num_experts, width, device="cuda").bfloat16()
    norm = Norm(torch.ones(width, device="cuda").bfloat16(), 1e-6)
    calls: list[Callable[[], Any]] = []
    read = 0.0
    for stacks in divide(pool, num_experts, width, inner, has_bias=is_oss):
        residual = torch.randn_like(x)

        def route_and_run(residual: torch.Tensor = residual, stacks: tuple[Stacked, ...] = stacks) -> torch.Tensor:
            routed = norm_route(
                x, residual, norm, router, None, None, top_k=top_k, score="softmax", renormalise=True, scale=1.0,
                num_groups=1, top_groups=1, group_best=1,
            )
            assert routed is not None
            return run(routed[0], *routed[2:], *stacks, gate)

        ids = torch.rand(num_tokens, num_experts, device="cuda").topk(top_k).indices
        read += len(ids.unique()) / num_experts / STEPS
        calls.append(route_and_run if has_router else partial(run, x, ids, weights, *stacks, gate))
    return calls, read


def run_with_one_tile(*call: Any) -> torch.Tensor:
    with patch.object(experts, "choose_down_tile", lambda tile, inner: tile):
        return experts.run_experts_pdl(*call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--router", action="store_true")
    parser.add_argument("--down", action="store_true")
    parser.add_argument("--seconds", type=float, default=30)
    args = parser.parse_args()
    began = time.time()
    pool = torch.empty(POOL_BYTES // 2, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
    ways = {name: RUN_EXPERTS.load(name) for name in ("cuda", "triton_pdl")}
    if args.down:
        ways["one tile"] = run_with_one_tile

    def run_all() -> None:
        for name in args.models:
            for run in ways.values():
                for num_tokens in args.tokens:
                    make_chain(run, pool, MODELS[name], num_tokens, has_router=args.router)[0][0]()

    precompile(run_all, "experts of few tokens", torch.device("cuda", 0))
    print(f"ready after {time.time() - began:.1f} s", flush=True)
    for name in args.models:
        num_experts, _, width, inner = MODELS[name]
        for num_tokens in args.tokens:
            if time.time() - began > args.seconds:
                return
            found = {}
            for way, run in ways.items():
                torch.manual_seed(num_tokens)
                calls, read = make_chain(run, pool, MODELS[name], num_tokens, has_router=args.router)
                found[way] = time_calls(calls) * 1e6
            least = read * num_experts * 6 * width * inner / BANDWIDTH * 1e6
            times = "  ".join(f"{way} {us:6.1f}" for way, us in found.items())
            print(f"{name:18s} {num_tokens} tokens  bytes {least:6.1f}  {times}", flush=True)


if __name__ == "__main__":
    main()

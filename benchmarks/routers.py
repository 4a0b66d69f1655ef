"""Routers between norms, as decodes run them: ``python -m benchmarks.routers [--tokens 1 4 16 64 128 250]``.

A captured chain of layers with routers of their own: a norm, then the router's product and choice, launched
dependently. Microseconds a layer that the router adds to the norms alone: product (cuBLAS) and choice in two launches,
and in one (`linear_route`); then both with the sort of pairs by expert behind, as experts of more than 16 tokens begin.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Unpack

import torch
import torch.nn.functional as F

from benchmarks.cuda_kernels import randn, time_calls
from headrace.kernels.moe import RouteShape
from headrace.kernels.moe.linear_route import linear_route
from headrace.kernels.moe.triton import group_pairs, route_pdl
from headrace.kernels.precompile import precompile
from headrace.kernels.rowwise.triton import rms_norm_pdl

LAYERS = 48
ROUTERS = {
    "Qwen3-30B-A3B": (128, 2048, 8), "Qwen3-235B-A22B": (128, 4096, 8), "gpt-oss-20b": (32, 2880, 4),
    "OLMoE": (64, 2048, 8),
}
"""Experts, hidden size, choices."""
Route = Callable[..., tuple[torch.Tensor, torch.Tensor] | None]


def route_apart(
    x: torch.Tensor, weight: torch.Tensor, bias: None, choice_bias: None, **shape: Unpack[RouteShape]
) -> tuple[torch.Tensor, torch.Tensor]:
    return route_pdl(F.linear(x, weight), None, **shape)


def make_chain(name: str, num_tokens: int, route: Route | None, *, groups: bool) -> Callable[[], None]:
    num_experts, width, top_k = ROUTERS[name]
    shape = RouteShape(
        top_k=top_k, score="softmax", renormalise=True, scale=1.0, num_groups=1, top_groups=1, group_best=1
    )
    norm, routers = randn(width), [randn(num_experts, width) for _ in range(LAYERS)]
    xs = [randn(num_tokens, width) for _ in range(LAYERS)]

    def run() -> None:
        for x, weight in zip(xs, routers, strict=True):
            x = rms_norm_pdl(x, norm, 1e-6, 0.0)
            if route is not None:
                found = route(x, weight, None, None, **shape)
                assert found is not None, "the kernel does not take it"
                if groups:
                    group_pairs(found[0], num_experts, pdl=True)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 128, 250])
    parser.add_argument("--models", nargs="+", default=list(ROUTERS))
    args = parser.parse_args()
    ways: list[tuple[Route, bool]] = [
        (route, groups) for groups in (False, True) for route in (route_apart, linear_route)
    ]

    def run_all() -> None:
        for name in args.models:
            for num_tokens in args.tokens:
                for route, groups in ways:
                    make_chain(name, num_tokens, route, groups=groups)()

    precompile(run_all, f"{args}", torch.device("cuda", 0))
    print(f"{'':16s} tokens  two launches  one   with the sort: two  one")
    for name in args.models:
        for num_tokens in args.tokens:
            chains = [make_chain(name, num_tokens, None, groups=False)]
            chains += [make_chain(name, num_tokens, route, groups=groups) for route, groups in ways]
            alone, *times = (time_calls([chain]) / LAYERS * 1e6 for chain in chains)
            added = [f"{each - alone:5.1f}" for each in times]
            print(f"{name:16s} {num_tokens:6d}  {added[0]:>12s} {added[1]}  {added[2]:>18s} {added[3]}", flush=True)


if __name__ == "__main__":
    main()

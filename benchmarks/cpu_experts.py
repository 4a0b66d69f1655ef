"""A mixture of experts on a CPU, each way there is: ``python -m benchmarks.cpu_experts [--threads 1] [--dtype float32]
[--isa avx2]``.

One layer's experts (by default 32, of which a token takes 8, 1,024 and 768 wide), from choices to weighted sums.
Milliseconds, the least of rounds in which every way takes its turn. ``plain`` is a product of torch's for each expert
that was chosen.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.cpu_linear import quantise_mxfp4
from headrace.kernels import native
from headrace.kernels.packed_linear.forms import PanelWeight, keep_in_panels
from headrace.kernels.packed_linear.quantise import quantise_int4, quantise_int8, quantise_int8_groups
from headrace.layers.build import Build
from headrace.layers.moe.adapters import group_choices
from headrace.layers.moe.contract import ChosenTokens
from headrace.layers.moe.grouped import GroupedExperts
from headrace.layers.moe.stored import StoredExperts
from headrace.layers.moe.weights import ExpertWeights
from headrace.layers.quantization.storage import find_storable
from headrace.layers.spec import MlpSpec

TOKENS = (1, 4, 16, 64, 512)
ROUNDS = 7
FORMS: dict[str, Callable[[torch.Tensor], PanelWeight]] = {
    "exact": keep_in_panels,
    "w8a8": lambda weight: PanelWeight(quantise_int8(weight)),
    "int8": lambda weight: PanelWeight(quantise_int8_groups(weight)),
    "int4": lambda weight: PanelWeight(quantise_int4(weight)),
    "mxfp4": lambda weight: PanelWeight(quantise_mxfp4(weight)),
}

Run = Callable[[ChosenTokens], torch.Tensor]


def make_weights(options: argparse.Namespace, spec: MlpSpec, build: Build) -> ExpertWeights:
    """The same random matrices each time."""
    weights, draw = ExpertWeights(options.experts, spec, options.width, build), torch.Generator().manual_seed(0)
    for parameter in weights.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.03)
    return weights


def make_ways(options: argparse.Namespace, build: Build) -> dict[str, Run]:
    """Experts in every form, by name."""
    spec = MlpSpec(options.inner)
    grouped = GroupedExperts(make_weights(options, spec, build), spec, build)
    ways: dict[str, Run] = {"plain": lambda tokens: group_choices(tokens, grouped.run)}
    for name, store in FORMS.items():
        weights = make_weights(options, spec, build)
        ways[name] = StoredExperts(weights, spec, build).run
        for weight in find_storable(weights):
            weight.store(store(weight.weight.detach()))
    return ways


def draw_tokens(options: argparse.Namespace, count: int, dtype: torch.dtype) -> ChosenTokens:
    """Tokens that choose at random."""
    draw = torch.Generator().manual_seed(count)
    ids = torch.stack([torch.randperm(options.experts, generator=draw)[: options.top_k] for _ in range(count)])
    return ChosenTokens(
        torch.randn(count, options.width, generator=draw).to(dtype), ids, torch.rand(ids.shape, generator=draw),
        options.experts
    )


def measure(ways: dict[str, Run], tokens: ChosenTokens) -> dict[str, float]:
    """Least milliseconds of each."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, run in ways.items():
            start = time.perf_counter()
            run(tokens)
            times[name].append(time.perf_counter() - start)
    return {name: 1e3 * min(column) for name, column in times.items()}


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_experts", description=__doc__.splitlines()[0])
    for name, default in (("threads", 2), ("experts", 32), ("top-k", 8), ("width", 1024), ("inner", 768)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--isa", help="at most this instruction set")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    state = native.build()
    if state.status != "ready":
        parser.error(f"no native kernels: {state.detail}")
    print(
        f"{native.select_isa(options.isa) if options.isa else state.detail}, {options.threads} threads, "
        f"{options.dtype}, {vars(options)}"
    )
    dtype = getattr(torch, options.dtype)
    ways = make_ways(options, Build(torch.device("cpu"), dtype))
    print(f"{'tokens':>8}" + "".join(f"{name:>10}" for name in ways))
    for count in TOKENS:
        print(
            f"{count:>8}"
            + "".join(f"{ms:>10.2f}" for ms in measure(ways, draw_tokens(options, count, dtype)).values()),
            flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

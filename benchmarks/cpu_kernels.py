"""The native CPU kernels beside other ways to do the same: ``python -m benchmarks.cpu_kernels linear|attention|experts
[--threads 1] [--dtype float32] [--isa avx2]``.

``linear``: matrix products, for the shapes of SmolLM2-135M and one of an 8B model; microseconds, the median of rounds
in which all ways take turns (``--least``: the minimum, which says more on a busy machine). Unless ``--warm`` is given,
the weights of all rounds together exceed the caches, as they do when a model decodes. ``--check`` first compares every
native product with the reference.

``attention``: the queries of one layer after cached tokens; milliseconds, minimum and median; GFLOP/s of the minimum.

``experts``: one layer of experts (by default 32, top-k 8, 1,024 to 768), from routing to weighted sums; milliseconds,
the minimum of rounds in turns. ``plain`` is one torch product per chosen expert.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from headrace.execution.device import has_fast_bfloat16
from headrace.kernels import block_scaled, native
from headrace.kernels.attention.cpu import paged_attention
from headrace.kernels.attention.reference import write_codes
from headrace.kernels.packed_linear import PACKED_LINEAR
from headrace.kernels.packed_linear.blocks import WeightBlocks, pack_blocks
from headrace.kernels.packed_linear.forms import OnednnWeight, PanelWeight, TurnedWeight, keep_in_panels
from headrace.kernels.packed_linear.layout import PackedMatrix, pack_floats
from headrace.kernels.packed_linear.quantise import quantise_int4, quantise_int8, quantise_int8_groups
from headrace.layers.build import Build
from headrace.layers.moe.contract import ChosenTokens
from headrace.layers.moe.grouped import GroupedExperts, group_choices
from headrace.layers.moe.stored import StoredExperts
from headrace.layers.moe.weights import ExpertWeights
from headrace.layers.quantization.storage import find_storable
from headrace.layers.spec import MlpSpec

LINEAR_SHAPES = ((576, 1536), (1536, 576), (576, 960), (576, 3072), (576, 49152), (4096, 4096))
"""Inputs and outputs."""
LINEAR_ROWS = (1, 2, 4, 8, 16, 64, 256)
CACHE_BYTES = 96 << 20
MOST_COPIES = 24
ROUND_S = 0.25

Product = Callable[[torch.Tensor], torch.Tensor]


def packed(pack: Callable[[torch.Tensor], PackedMatrix], weight: torch.Tensor) -> Product:
    """A native product."""
    matrix, multiply = pack(weight), PACKED_LINEAR.load("native")
    return lambda x: multiply(x, matrix, None)


def onednn_int8(weight: torch.Tensor) -> Product:
    """torch's own W8A8, with the row scales that it wants from outside."""
    scales = weight.float().abs().amax(1) / 127
    codes = torch.ops.onednn.qlinear_prepack((weight.float() / scales[:, None]).round().to(torch.int8), None)
    zeros = torch.zeros(weight.shape[0], dtype=torch.int32)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        step = float(x.abs().max()) / 127
        rounded = (x.float() / step).round().add_(128).to(torch.uint8)
        return torch.ops.onednn.qlinear_pointwise(
            rounded, step, 128, codes, scales, zeros, None, 1.0, 0, x.dtype, "none", [], ""
        )

    return multiply


def quantise_mxfp4(weight: torch.Tensor) -> PackedMatrix:
    """As a checkpoint has them; inputs are a multiple of 32."""
    codes, scales = block_scaled.quantise_mxfp4(weight)
    raw = torch.cat((scales.unsqueeze(-1), codes.unflatten(-1, (-1, 16))), dim=-1).flatten(1)
    return pack_blocks([WeightBlocks("MXFP4_PAIRS", raw)])


WAYS: dict[str, Callable[[torch.Tensor], Product]] = {
    "F.linear": lambda w: lambda x: F.linear(x, w),
    "swapped": lambda w: (lambda kept: lambda x: kept.multiply(x, None))(TurnedWeight(w, 1 << 30)),
    "oneDNN": lambda w: (lambda kept: lambda x: kept.multiply(x, None))(OnednnWeight(w)),
    "oneDNN W8A8": onednn_int8,
    "f32": lambda w: packed(lambda v: pack_floats(v.float()), w),
    "bf16": lambda w: packed(lambda v: pack_floats(v.bfloat16()), w),
    "w8a8": lambda w: packed(quantise_int8, w),
    "int8": lambda w: packed(quantise_int8_groups, w),
    "int4": lambda w: packed(quantise_int4, w),
    "mxfp4": lambda w: packed(quantise_mxfp4, w),
}


def check_products(dtype: torch.dtype) -> None:
    """Every native product against the reference."""
    for name, pack in {
        "f32": lambda v: pack_floats(v.float()), "bf16": lambda v: pack_floats(v.bfloat16()), "w8a8": quantise_int8,
        "int8": quantise_int8_groups, "int4": quantise_int4, "mxfp4": quantise_mxfp4
    }.items():
        worst = 0.0
        for rows in (1, 5, 16, 33, 300):
            weight, x = torch.randn(200, 576) * 0.05, torch.randn(rows, 576).to(dtype)
            matrix = pack(weight)
            out, wanted = (PACKED_LINEAR.load(way)(x, matrix, None, torch.float32) for way in ("native", "reference"))
            worst = max(worst, float((out - wanted).abs().max() / wanted.abs().max()))
        print(f"check {name:5} largest error / largest value {worst:.1e}", flush=True)


def make_ways(names: list[str], weight: torch.Tensor, copies: int) -> dict[str, list[Product]]:
    """Products with ``copies`` weights of a kind; a way that torch lacks here is left out."""
    ways = {}
    for name in names:
        try:
            ways[name] = [WAYS[name](weight.clone()) for _ in range(copies)]
            ways[name][0](weight[:1].clone())
        except (RuntimeError, NotImplementedError, TypeError) as error:
            print(f"# {name}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
            ways.pop(name, None)
    return ways


def time_ways(
    ways: dict[str, list[Product]], x: torch.Tensor, budget_s: float, choose: Callable[[list[float]], float]
) -> dict[str, float]:
    """Microseconds of each way, taking turns: what ``choose`` makes of those of its turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    end, turn = time.perf_counter() + budget_s * len(ways), 0
    while turn < 3 or (time.perf_counter() < end and turn < 200):
        for name, products in ways.items():
            multiply = products[turn % len(products)]
            began = time.perf_counter()
            multiply(x)
            times[name].append(time.perf_counter() - began)
        turn += 1
    return {name: 1e6 * choose(values) for name, values in times.items()}


def run_shape(inputs: int, outputs: int, names: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    dtype = getattr(torch, args.dtype)
    weight = (torch.randn(outputs, inputs) * 0.05).to(dtype)
    copies = 1 if args.warm else max(1, min(MOST_COPIES, CACHE_BYTES // (inputs * outputs)))
    ways = make_ways(names, weight, copies)
    found = []
    for rows in args.rows:
        row = {
            "inputs": inputs, "outputs": outputs, "rows": rows,
            "us": time_ways(
                ways, torch.randn(rows, inputs).to(dtype), args.seconds, min if args.least else statistics.median
            )
        }
        found.append(row)
        best = min(row["us"].values())
        cells = "".join(
            f"{row['us'][name]:10.0f}{'*' if row['us'][name] <= 1.03 * best else ' '}" if name in row["us"]
            else f"{'-':>10} " for name in names
        )
        print(f"{inputs:5}x{outputs:<6}{rows:4} {cells}", flush=True)
    return found


def run_linear(args: argparse.Namespace) -> None:
    """The `linear` table."""
    names = args.ways.split(",")
    if args.check:
        check_products(getattr(torch, args.dtype))
    print(f"{'shape':12}{'rows':>4} " + "".join(f"{name:>10} " for name in names))
    rows = []
    for shape in args.shapes.split(","):
        inputs, outputs = (int(part) for part in shape.split("x"))
        rows += run_shape(inputs, outputs, names, args)
    if args.json:
        about = {"isa": native.state().detail, "dtype": args.dtype, "threads": args.threads, "torch": torch.__version__}
        with open(args.json, "w") as file:
            json.dump({**about, "rows": rows}, file, indent=1)


ATTENTION_SHAPES = (
    (4096, 0, 9, 3, 64), (1024, 3072, 9, 3, 64), (256, 768, 9, 3, 64), (32, 1024, 9, 3, 64), (512, 1536, 32, 8, 128),
    (256, 768, 8, 1, 256)
)
"""Queries, cached tokens before them, heads, kv heads, head dim."""
PAGE_SIZE = 16


def make_pages(
    tokens: int, num_kv_heads: int, dim: int, kv_dtype: str
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]:
    """Random keys and values [P, page, K, E], and the scales of codes."""
    num_pages = (tokens + PAGE_SIZE - 1) // PAGE_SIZE
    k, v = (torch.randn(num_pages, PAGE_SIZE, num_kv_heads, dim) for _ in "kv")
    if kv_dtype != "int8":
        return (k.to(getattr(torch, kv_dtype)), v.to(getattr(torch, kv_dtype))), None
    pages, scales = (
        tuple(torch.zeros_like(x, dtype=torch.int8) for x in (k, v)), torch.zeros(num_pages, 2, num_kv_heads, PAGE_SIZE)
    )
    write_codes(pages, scales, torch.arange(num_pages * PAGE_SIZE), k.flatten(0, 1), v.flatten(0, 1))
    return pages, scales


def run_attention(args: argparse.Namespace) -> None:
    """The `attention` table."""
    print(f"keys and values {args.kv_dtype or args.dtype}")
    print("queries  cached  heads  dim     least ms   median    GFLOP/s")
    for shape in args.shapes.split(","):
        count, cached, heads, num_kv_heads, dim = map(int, shape.split("x"))
        pages, scales = make_pages(count + cached, num_kv_heads, dim, args.kv_dtype or args.dtype)
        q = torch.randn(count, heads, dim).to(getattr(torch, args.dtype))
        step = tuple(
            torch.tensor(x, dtype=torch.int32) for x in ([0, count], [count + cached], [list(range(len(pages[0])))])
        )
        times = []
        for _ in range(args.rounds):
            start = time.perf_counter()
            paged_attention(q, pages, step, scale=dim**-0.5, scales=scales)
            times.append(time.perf_counter() - start)
        operations = 4 * heads * dim * (count * cached + count * (count + 1) // 2)
        least, median = 1e3 * min(times), 1e3 * statistics.median(times)
        rate = operations / min(times) / 1e9
        shape_cells = f"{count:7}{cached:8}{heads:5}/{num_kv_heads:<3}{dim:3}"
        print(f"{shape_cells}{least:12.2f}{median:9.2f}{rate:11.0f}", flush=True)


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
    weights, generator = ExpertWeights(options.experts, spec, options.width, build), torch.Generator().manual_seed(0)
    for parameter in weights.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.03)
    return weights


def make_experts(options: argparse.Namespace, build: Build) -> dict[str, Run]:
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


def random_tokens(options: argparse.Namespace, count: int, dtype: torch.dtype) -> ChosenTokens:
    """Tokens that choose at random."""
    generator = torch.Generator().manual_seed(count)
    ids = torch.stack([torch.randperm(options.experts, generator=generator)[: options.top_k] for _ in range(count)])
    return ChosenTokens(
        torch.randn(count, options.width, generator=generator).to(dtype), ids,
        torch.rand(ids.shape, generator=generator), options.experts
    )


def time_experts(ways: dict[str, Run], tokens: ChosenTokens) -> dict[str, float]:
    """Least milliseconds of each."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, run in ways.items():
            start = time.perf_counter()
            run(tokens)
            times[name].append(time.perf_counter() - start)
    return {name: 1e3 * min(column) for name, column in times.items()}


def run_experts(args: argparse.Namespace) -> None:
    """The `experts` table."""
    dtype = getattr(torch, args.dtype)
    ways = make_experts(args, Build(torch.device("cpu"), dtype))
    print(f"{'tokens':>8}" + "".join(f"{name:>10}" for name in ways))
    for count in TOKENS:
        times = time_experts(ways, random_tokens(args, count, dtype))
        print(f"{count:>8}" + "".join(f"{ms:>10.2f}" for ms in times.values()), flush=True)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    linear, attention, experts = (commands.add_parser(name) for name in ("linear", "attention", "experts"))
    fastest = "bfloat16" if has_fast_bfloat16() else "float32"
    for command, run, threads, dtype in (
        (linear, run_linear, 1, fastest), (attention, run_attention, 1, "bfloat16"),
        (experts, run_experts, 2, "float32"),
    ):
        command.set_defaults(run=run)
        command.add_argument("--threads", type=int, default=threads)
        command.add_argument("--dtype", default=dtype, choices=("float32", "bfloat16"))
        command.add_argument("--isa", default="", help="limit native kernels to this instruction set")
    linear.add_argument("--ways", default=",".join(WAYS))
    linear.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=LINEAR_ROWS)
    linear.add_argument("--shapes", default=",".join(f"{i}x{o}" for i, o in LINEAR_SHAPES))
    linear.add_argument("--seconds", type=float, default=ROUND_S, help="for each way, shape and number of rows")
    linear.add_argument("--warm", action="store_true", help="let weights stay in the caches")
    linear.add_argument("--least", action="store_true", help="the minimum instead of the median")
    linear.add_argument("--check", action="store_true")
    linear.add_argument("--json")
    attention.add_argument("--kv-dtype", choices=("float32", "bfloat16", "int8"), help="default: as the queries")
    attention.add_argument("--rounds", type=int, default=12)
    attention.add_argument(
        "--shapes", default=",".join("x".join(map(str, shape)) for shape in ATTENTION_SHAPES),
        help="queries x cached x heads x kv heads x head dim, comma-separated"
    )
    for name, default in (("experts", 32), ("top-k", 8), ("width", 1024), ("inner", 768)):
        experts.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    args = read_arguments()
    torch.set_num_threads(args.threads)
    state = native.build()
    if state.status != "ready":
        sys.exit(f"no native library: {state.detail}")
    print(
        f"{torch.cpu.get_capabilities().get('cpu_name')}, native {native.select_isa(args.isa)}, {args.dtype}, "
        f"{args.threads} threads, torch {torch.__version__}"
    )
    args.run(args)


if __name__ == "__main__":
    main()

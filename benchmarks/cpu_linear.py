"""Matrix products on a CPU, each way there is: ``python -m benchmarks.cpu_linear [--threads 1] [--dtype float32] [--isa
avx2] [--json FILE]``.

Shapes are those of SmolLM2-135M and one of a model with 8 billion weights. Times are microseconds, the median of rounds
in which every way takes its turn, or with ``--least`` their least, which says more on a busy machine; the weights of
all rounds together are larger than the caches unless ``--warm`` is given, as they are when a model decodes. ``--check``
compares every native product with the reference on values first.
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
from headrace.kernels import native
from headrace.kernels.block_scaled import QUANTISE_MXFP4
from headrace.kernels.packed_linear import PACKED_LINEAR
from headrace.kernels.packed_linear.blocks import WeightBlocks, pack_blocks
from headrace.kernels.packed_linear.forms import OnednnWeight, TurnedWeight
from headrace.kernels.packed_linear.layout import PackedMatrix, pack_floats
from headrace.kernels.packed_linear.quantise import quantise_int4, quantise_int8, quantise_int8_groups

SHAPES = ((576, 1536), (1536, 576), (576, 960), (576, 3072), (576, 49152), (4096, 4096))
"""Inputs and outputs."""
ROWS = (1, 2, 4, 8, 16, 64, 256)
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
    codes, scales = QUANTISE_MXFP4.load("reference")(weight)
    raw = torch.cat((scales.unsqueeze(-1), codes.unflatten(-1, (-1, 16))), dim=-1).flatten(1)
    return pack_blocks([WeightBlocks("MXFP4_PAIRS", raw)])


WAYS: dict[str, Callable[[torch.Tensor], Product]] = {
    "F.linear": lambda w: lambda x: F.linear(x, w),
    "turned": lambda w: (lambda kept: lambda x: kept.multiply(x, None))(TurnedWeight(w, 1 << 30)),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--dtype", default="bfloat16" if has_fast_bfloat16() else "float32", choices=("float32", "bfloat16")
    )
    parser.add_argument("--isa", default="", help="let native products use this instruction set at most")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=ROWS)
    parser.add_argument("--shapes", default=",".join(f"{i}x{o}" for i, o in SHAPES))
    parser.add_argument("--seconds", type=float, default=ROUND_S, help="for each way, shape and number of rows")
    parser.add_argument("--warm", action="store_true", help="let weights stay in the caches")
    parser.add_argument("--least", action="store_true", help="the least time of all turns instead of the median")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    state = native.build()
    if state.status != "ready":
        sys.exit(f"no native library: {state.detail}")
    isa = native.select_isa(args.isa)
    names = args.ways.split(",")
    print(
        f"{torch.cpu.get_capabilities().get('cpu_name')}, native {isa}, {args.dtype}, {args.threads} threads, torch "
        f"{torch.__version__}; microseconds, * best"
    )
    if args.check:
        check_products(getattr(torch, args.dtype))
    print(f"{'shape':12}{'rows':>4} " + "".join(f"{name:>10} " for name in names))
    rows = []
    for shape in args.shapes.split(","):
        inputs, outputs = (int(part) for part in shape.split("x"))
        rows += run_shape(inputs, outputs, names, args)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"isa": isa, "dtype": args.dtype, "threads": args.threads, "torch": torch.__version__, "rows": rows},
                file, indent=1
            )


if __name__ == "__main__":
    with torch.no_grad():
        main()

"""Products of few rows with e4m3 weights in blocks of 128 x 128 by how programs divide them, on one Hopper GPU:
``python -m benchmarks.fp8_rows [--only REGEX] [--rows 1 4]``. With ``--split [PLANS]``, products of 17 to 256 rows in
FP8 by so many plans of ``fp8_split.cu``, beside Gluon's.

Weights are a rank's of DeepSeek-V4-Flash, DeepSeek-V3 and Qwen3-30B-A3B. Microseconds of a product in captured chains
over copies of the weight that the L2 does not hold, each division checked against the plain product; beside them what
else serves such weights. More rows than 16 are multiplied by that and by tiles of Gluon's product, without the rounding
of x. Then the products of a V4 layer in turn, by the most programs that share a tile's inputs.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from benchmarks.coded_experts import draw
from benchmarks.cuda_kernels import time_calls
from benchmarks.quantized_gpu import FORMS
from benchmarks.roofline import BANDWIDTH, FP8_RATE
from headrace.kernels.coded_linear import CODED_LINEAR, FP8_LINEAR, FP8_SUMS, fp8_rows, fp8_split, hopper
from headrace.kernels.coded_linear.choice import describe_codes, find_solutions
from headrace.kernels.coded_linear.device_codes import DeviceCodes
from headrace.kernels.coded_linear.fp8_rows import LOWER, RING, Shape
from headrace.kernels.coded_linear.fp8_triton import quantise_rows
from headrace.kernels.coded_linear.hopper import Tile
from headrace.kernels.coded_linear.reference import dequantise
from headrace.kernels.launch import ceil_div
from headrace.kernels.linear import wave_product, waves
from headrace.kernels.rowwise import Gate

BF16, WEIGHT_BYTES, MOST_DIVIDED = torch.bfloat16, 300 << 20, 16
CLAMP = Gate("clamped", limit=10.0, alpha=1.0, up_offset=0.0)
CASES = {
    # outputs, inputs, whether a gate and its clamp follow
    "V4 gate_up, 2 ranks": (2048, 4096, True), "V4 gate_up, 4 ranks": (1024, 4096, True),
    "V4 gate_up": (4096, 4096, True), "V4 down, 2 ranks": (4096, 1024, False), "V4 down": (4096, 2048, False),
    "V4 queries and latent": (1536, 4096, False), "V4 queries up, 2 ranks": (16384, 1024, False),
    "V4 index queries": (8192, 1024, False),
    "V4 output, 2 ranks": (4096, 4096, False), "V4 output, 4 ranks": (4096, 2048, False),
    "V3 queries and latent": (2112, 7168, False), "Qwen3 out": (2048, 4096, False),
    "Qwen3 out, 2 ranks": (2048, 2048, False), "Qwen3 qkv, 2 ranks": (2560, 2048, False),
    "Qwen3 qkv": (5120, 2048, False), "Llama 8B qkv": (6144, 4096, False), "Llama 8B gate_up": (28672, 4096, True),
}
DIVISIONS = [
    *(replace(RING, splits=splits) for splits in (1, 2, 4, 8)), Shape(2, 8), Shape(2, 8, 2), Shape(4, 4, 2, 4),
    Shape(8, 2, 2, 4), *LOWER,
]
TILES = [
    Tile(64, 64, 8), Tile(64, 64, 4), Tile(64, 128, 6), Tile(64, 128, 6, num_warps=8), Tile(64, 128, 4, num_warps=8),
    Tile(32, 64, 8), Tile(32, 128, 8, num_warps=8), Tile(64, 64, 8, 2), Tile(64, 128, 6, 2, 8), Tile(64, 128, 6, 4, 8),
]
"""Of Gluon's product. What splits leave is not added up."""
LAYER = ("V4 queries and latent", "V4 queries up, 2 ranks", "V4 output, 2 ranks", "V4 gate_up, 2 ranks",
         "V4 down, 2 ranks")


SPLIT_CASES = {
    # form, outputs, inputs
    "Llama 8B qkv": ("fp8 channel", 6144, 4096), "Llama 8B o": ("fp8 channel", 4096, 4096),
    "Llama 8B down": ("fp8 channel", 4096, 14336),
    "V4 queries and latent": ("fp8 block 128", 1536, 4096), "V4 queries up": ("fp8 block 128", 32768, 1024),
    "V4 output groups": ("fp8 block 128", 8192, 4096), "V4 output": ("fp8 block 128", 4096, 8192),
    "V4 gate_up": ("fp8 block 128", 4096, 4096), "V4 down": ("fp8 block 128", 4096, 2048),
    "V4 index queries": ("fp8 block 128", 8192, 1024), "Llama 8B gate_up": ("fp8 block 128", 28672, 4096),
}
SPLIT_ROWS = (32, 64, 96, 128, 160, 192, 250)


def name_of(shape: Shape) -> str:
    """Programs of a tile; blocks of a stage, stages, warpgroups and rows of a tile where these are unusual."""
    usual = replace(shape, splits=1) == RING
    return f"{shape.splits}" if usual else f"{shape.splits} ({shape.unit}/{shape.stages}/{shape.groups}/{shape.height})"


def compare(out: torch.Tensor, expected: torch.Tensor) -> str:
    """A mark behind the name of what is wrong."""
    error = float((out.double() - expected).norm() / expected.norm())
    return "" if error < 5e-2 else f" WRONG {error:.0e}"


def run_case(name: str, rows: int) -> None:
    """Print one product's line."""
    outputs, inputs, is_gated = CASES[name]
    count = max(4, min(64, WEIGHT_BYTES // (outputs * inputs)))
    weights = [draw(FORMS["fp8 block 128"], outputs, inputs) for _ in range(count)]
    x, gate = torch.randn(rows, inputs, device="cuda").to(BF16), CLAMP if is_gated else None
    whole = x.double() @ dequantise(weights[0], torch.float32).double().T
    first, second = whole.chunk(2, dim=1)
    bounded = first.clamp(max=CLAMP.limit)
    expected = bounded * bounded.sigmoid() * second.clamp(-CLAMP.limit, CLAMP.limit) if is_gated else whole
    out = torch.empty(expected.shape, dtype=BF16, device="cuda")
    times: dict[str, float] = {}
    for shape in DIVISIONS if rows <= MOST_DIVIDED else ():
        chunks = ceil_div(ceil_div(inputs // 128, shape.unit), shape.splits)
        if chunks * (shape.splits - 1) * shape.unit >= inputs // 128:
            continue  # the last program would have nothing
        launch = partial(fp8_rows.launch, shape=shape, gate=gate)
        try:
            wrong = compare(launch(x, weights[0], None, out), expected)
            times[name_of(shape) + wrong] = time_calls([partial(launch, x, own, None, out) for own in weights])
        except Exception as error:  # a benchmark goes on
            times[f"{name_of(shape)}: {type(error).__name__}"] = 9.0
    query = describe_codes(weights[0], BF16, torch.cuda.get_device_capability())
    for other in find_solutions(query, rows):
        if other not in ("cuda_fp8", "triton_expand", "reference"):
            multiply = CODED_LINEAR.load(other)
            wrong = compare(multiply(x, weights[0], None), whole)
            times[other + wrong] = time_calls([partial(multiply, x, own, None) for own in weights])
    coded = quantise_rows(x, 128)
    for tile in TILES if rows > MOST_DIVIDED else ():
        def run(weight: DeviceCodes, tile: Tile = tile) -> torch.Tensor:
            return hopper.multiply(coded, weight, None, tile)  # type: ignore[return-value]

        out = run(weights[0])
        wrong = compare(out.sum(0) if tile.splits > 1 else out, whole)
        label = f"{tile.rows}x{tile.outputs}/{tile.stages}/{tile.splits}/{tile.num_warps}"
        times[label + wrong] = time_calls([partial(run, own) for own in weights])
    best = min(times.values())
    line = " | ".join(f"{key} {seconds * 1e6:.2f}" for key, seconds in times.items())
    chosen = "none"
    if rows <= MOST_DIVIDED:
        shape = fp8_rows.choose_shape(ceil_div(outputs, fp8_rows.TILE), inputs, rows)
        chosen = name_of(fp8_rows.divide_evenly(shape, outputs, inputs))
    floor = weights[0].num_bytes / BANDWIDTH * 1e6
    print(
        f"{name:<24}{outputs:>6} x {inputs:<5} {rows} rows, bytes {floor:.2f}, chosen {chosen}, best "
        f"{best * 1e6:.2f}: {line}", flush=True,
    )


def run_layer(rows: int) -> None:
    """Print the time of a layer's products in turn, each reading what the one before has written."""
    layers: list[list[DeviceCodes]] = [
        [draw(FORMS["fp8 block 128"], *CASES[name][:2]) for name in LAYER] for _ in range(6)
    ]
    x = torch.randn(rows, 4096, device="cuda").to(BF16)
    outs = [torch.empty(rows, CASES[name][0] // (2 if CASES[name][2] else 1), device="cuda", dtype=BF16)
            for name in LAYER]

    def run(weights: list[DeviceCodes], most: int) -> None:
        source = x
        for name, weight, out in zip(LAYER, weights, outs, strict=True):
            outputs, inputs, is_gated = CASES[name]
            tiles, splits = ceil_div(outputs, fp8_rows.TILE), 1
            while 2 * splits * tiles <= fp8_rows.NUM_SMS and splits < most:
                splits *= 2
            shape = replace(RING, splits=splits) if most else fp8_rows.choose_shape(tiles, inputs, rows)
            fp8_rows.launch(source[:, :inputs], weight, None, out, shape=shape, gate=CLAMP if is_gated else None)
            source = out

    times = {
        f"at most {most}" if most else "as chosen": time_calls([partial(run, own, most) for own in layers])
        for most in (8, 4, 2, 1, 0)
    }
    print(f"five products of a V4 layer, 2 ranks, {rows} rows: "
          + " | ".join(f"{key} {seconds * 1e6:.1f}" for key, seconds in times.items()), flush=True)


def run_split(name: str, weights: list[DeviceCodes], num_rows: int, most: int) -> None:
    """Print one product's line of rows in FP8: other kernels, then plans by their times, with estimates in brackets.
    ``sums`` leaves sums of splits to the norm."""
    form, outputs, inputs = SPLIT_CASES[name]
    x = quantise_rows(torch.randn(num_rows, inputs, device="cuda").to(BF16), 128 if "block" in form else 0)
    whole = x.decode(torch.float64) @ dequantise(weights[0], torch.float32).double().T
    found: dict[str, float] = {}

    def time(label: str, multiply: Callable[[DeviceCodes], torch.Tensor]) -> None:
        try:
            out = multiply(weights[0])
            wrong = compare(out.sum(0) if out.dim() == 3 else out, whole)
            found[label + wrong] = time_calls([partial(multiply, own) for own in weights])
        except Exception as error:  # a benchmark goes on
            found[f"{label}: {type(error).__name__}"] = 9.0

    for label, own in (("gluon", "gluon_fp8"), ("scaled_mm", "scaled_mm_blocks" if "block" in form else "scaled_mm")):
        time(label, lambda weight, own=own: FP8_LINEAR.load(own)(x, weight, None, BF16))  # type: ignore[misc]
    time("sums", lambda weight: FP8_SUMS.load("gluon_fp8")(x, weight, BF16))
    wave = waves.find_fastest(waves.Size(num_rows, outputs, inputs, False)) if "block" not in form else None
    if wave is not None:  # narrower weights than it is offered for too
        tile, scales = wave, weights[0].scales
        time("wave", lambda weight: wave_product.multiply(  # type: ignore[arg-type,return-value]
            x.codes, weight.codes, tile, "", wave_product.Scales(x.scales, scales)
        ))
    others, size = dict(found), fp8_split.measure_size(x, weights[0])
    found.clear()
    residents = fp8_split.prepare(size.has_tables, x.codes.device)
    estimates = {
        plan: fp8_split.estimate(size, plan, fp8_split.find_residents(plan, residents))
        for plan in fp8_split.list_plans(size, residents)
    }
    kinds: dict[tuple[int, int], fp8_split.Plan] = {}
    for plan in sorted(estimates, key=estimates.__getitem__):  # of each kind the rows of the shortest
        kinds.setdefault((plan.groups, plan.splits), plan)
    for plan in list(kinds.values())[:most]:
        resident = fp8_split.find_residents(plan, residents)
        label = f"{plan.rows}x{plan.width}/{plan.splits} ({estimates[plan] * 1e6:.1f})"
        time(label, partial(fp8_split.launch, x, bias=None, plan=plan, residents=resident))
    chosen, best = next(iter(found.values())), min(found.values())
    floor = max(weights[0].num_bytes / BANDWIDTH, 2 * num_rows * outputs * inputs / FP8_RATE) * 1e6
    texts = [
        " | ".join(f"{label} {seconds * 1e6:.2f}" for label, seconds in sorted(own.items(), key=lambda item: item[1]))
        for own in (others, found)
    ]
    print(
        f"{name:<24}{outputs:>6} x {inputs:<5} {num_rows} rows, floor {floor:.2f}, {texts[0]}, chosen "
        f"{chosen * 1e6:.2f}, best {best * 1e6:.2f}: {texts[1]}", flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=".")
    parser.add_argument("--rows", nargs="*", type=int)
    parser.add_argument("--split", nargs="?", type=int, const=12)
    options = parser.parse_args()
    if options.split:
        print(f"clusters of {fp8_split.CLUSTERS} at once: {fp8_split.prepare(False, torch.device('cuda', 0))}")
        for name, (form, outputs, inputs) in SPLIT_CASES.items():
            if re.search(options.only, name):
                first = draw(FORMS[form], outputs, inputs)
                count = max(4, min(64, WEIGHT_BYTES // (outputs * inputs)))
                weights = [first, *(first.copy() for _ in range(count - 1))]
                for rows in options.rows or SPLIT_ROWS:
                    run_split(name, weights, rows, options.split)
        return
    for rows in options.rows or [1]:
        for name in CASES:
            if re.search(options.only, name):
                run_case(name, rows)
        if rows <= MOST_DIVIDED:
            run_layer(rows)


if __name__ == "__main__":
    main()

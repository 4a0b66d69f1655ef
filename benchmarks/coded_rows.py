"""Own CUDA C++ products of few rows in codes, by block shape, on one GPU: ``python -m benchmarks.coded_rows [--forms
REGEX] [--rows 1 2 8]``; of integers in tiles, and with tens to hundreds of rows beside bfloat16 and dequantising:
``python -m benchmarks.coded_rows --tiles --forms 'int4 group 128' --rows 1 2 4 64 128 256``; of a GGUF file's K types:
``python -m benchmarks.coded_rows --tiles --forms q4_k_m --rows 1 2 8 96 128 192 256``.

Weights of Llama-3.1-8B, many copies in turn, so that none is read from the L2: microseconds of a product in a captured
chain and its share of the memory's rate, for each shape of block; a whole layer, with norms and activation fused or
not.
"""

from __future__ import annotations

import argparse
import re
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.coded_experts import draw
from benchmarks.cuda_kernels import MODELS, products, time_calls
from benchmarks.gguf_model import draw_blocks
from benchmarks.quantized_gpu import FORMS
from headrace.kernels.coded_linear import MOST_CUDA_ROWS, cuda, expand, tiled_many, tiles
from headrace.kernels.coded_linear.cuda import Addition, Shape
from headrace.kernels.coded_linear.device_codes import BLOCK, DeviceCodes
from headrace.kernels.coded_linear.super_blocks import pack_supers
from headrace.kernels.linear import Norm
from headrace.kernels.packed_linear.blocks import WeightBlocks
from headrace.kernels.rowwise import Gate
from headrace.kernels.rowwise.triton import GATES, silu_mul

BF16, DEVICE = torch.bfloat16, "cuda"
BYTES_PER_SECOND = 4.8e12
"""Of an H200, as stated."""
WEIGHT_BYTES = 400 << 20
"""Of distinct weights in a chain."""
BLOCKS = [
    Shape(*numbers) for numbers in ((8, 3, 2), (16, 1, 4), (8, 2, 4), (8, 2, 2), (16, 1, 2), (4, 6, 2), (4, 4, 4))
]
TILE_BLOCKS = [tiles.Shape(*numbers) for numbers in ((8, 32), (8, 24), (8, 16), (16, 32), (4, 32), (8, 64))]
SUPER_LAYERS: dict[str, dict[str, tuple[tuple[str, int], ...]]] = {
    "q4_k": {}, "q4_k_m": {"qkv": (("Q4_K", 5120), ("Q6_K", 1024)), "down": (("Q6_K", 4096),)}
}
"""Layers of a Q4_K_M file of Llama-3.1-8B: types and outputs of parts, where these are not Q4_K alone."""
PRODUCTS = ("gate_up", "down", "qkv", "out")
SILU = Gate("silu")


def name_shape(shape: Shape | tiles.Shape | None) -> str:
    """Its numbers, in order."""
    return "chosen" if shape is None else "/".join(str(number) for number in vars(shape).values())


def show(title: str, times: dict[str, float], num_bytes: float) -> None:
    """One line, the fastest first."""
    (best, seconds), *others = sorted(times.items(), key=lambda pair: pair[1])
    share = num_bytes / seconds / BYTES_PER_SECOND
    line = " ".join(f"{name} {own * 1e6:.1f}" for name, own in others)
    print(f"{title}: {best} {seconds * 1e6:.2f} us {share:.0%} | {line}", flush=True)


def make_copies(form: str, outputs: int, inputs: int) -> list[DeviceCodes]:
    """The same weight in many places."""
    first = draw(FORMS[form], outputs, inputs)
    count = max(4, min(40, WEIGHT_BYTES // first.num_bytes))
    return [first] + [draw(FORMS[form], outputs, inputs) for _ in range(count - 1)]


def draw_supers(parts: tuple[tuple[str, int], ...], inputs: int) -> DeviceCodes:
    """Random super-blocks of these types and outputs, in tiles."""
    chance = np.random.default_rng(1)
    blocks = [
        WeightBlocks(kind, torch.from_numpy(draw_blocks(chance, kind, outputs * inputs // 256)).view(outputs, -1))
        for kind, outputs in parts
    ]
    packed = pack_supers(blocks, torch.device(DEVICE))
    assert packed is not None
    return packed.tile()


def draw_super_layer(form: str, name: str, outputs: int, inputs: int) -> DeviceCodes:
    """A product's weight in a layer of a file."""
    return draw_supers(SUPER_LAYERS[form].get(name, (("Q4_K", outputs),)), inputs)


def run_supers(form: str, rows: int) -> None:
    """Single products of few rows, as SiLU and norms are fused in a step, and the layer of them."""
    shapes = products(next(model for model in MODELS if model.name == "llama8b"))
    for name in PRODUCTS:
        outputs, inputs = shapes[name]
        first = draw_super_layer(form, name, outputs, inputs)
        weights = [first, *(first.copy() for _ in range(max(3, WEIGHT_BYTES // first.num_bytes)))]
        x, gate = torch.randn(rows, inputs, device=DEVICE).to(BF16), GATES[SILU.kind] if name == "gate_up" else 0
        out = torch.empty(rows, outputs // (2 if gate else 1), device=DEVICE, dtype=BF16)
        times = {
            name_shape(shape): time_calls(
                [partial(tiles.launch, x, own, None, out, shape=shape, gate=gate) for own in weights]
            ) for shape in (None, *TILE_BLOCKS)
        }
        show(f"{name:8}{form:16}{rows} rows", times, first.num_bytes)
    run_layer(form, rows, is_tiled=True)


def run_products(form: str, rows: list[int]) -> None:
    """Single products."""
    shapes = products(next(model for model in MODELS if model.name == "llama8b"))
    for name in PRODUCTS:
        outputs, inputs = shapes[name]
        weights = make_copies(form, outputs, inputs)
        for count in rows:
            x = torch.randn(count, inputs, device=DEVICE).to(BF16)
            out = torch.empty(count, outputs, device=DEVICE, dtype=BF16)
            times = {
                name_shape(shape): time_calls([partial(cuda.launch, x, w, None, out, shape=shape) for w in weights])
                for shape in BLOCKS
            }
            show(f"{name:8}{form:16}{count} rows", times, weights[0].num_bytes)


def run_tiles(form: str, rows: list[int]) -> None:
    """Products with integers in tiles, by rows of a tile and splits; gate and up with SiLU, partial sums left. Also all
    four: in bfloat16, dequantised, and with the plans that are chosen."""
    totals: dict[tuple[int, str], float] = {}
    shapes = products(next(model for model in MODELS if model.name == "llama8b"))

    def multiply(x: torch.Tensor, weight: torch.Tensor, is_gated: bool) -> torch.Tensor:
        out = F.linear(x, weight)
        return silu_mul(out, pdl=True) if is_gated else out

    def dequantise(x: torch.Tensor, weight: DeviceCodes, is_gated: bool) -> torch.Tensor:
        return multiply(x, expand.expand(weight, BF16), is_gated)

    for name in PRODUCTS:
        (outputs, inputs), is_gated = shapes[name], name == "gate_up"
        if form in SUPER_LAYERS:
            first = draw_super_layer(form, name, outputs, inputs)
            weights = [first, *(first.copy() for _ in range(max(3, WEIGHT_BYTES // first.num_bytes)))]
        else:
            weights = [weight.tile() for weight in make_copies(form, outputs, inputs)]
        plains = [expand.expand(weight, BF16) for weight in weights[: max(2, WEIGHT_BYTES // (2 * outputs * inputs))]]
        splits = tiled_many.SPLITS[: 1 if is_gated else None]
        plans = [tiled_many.split_units(tile, inputs // BLOCK, own) for tile in tiled_many.TILES for own in splits]
        for count in rows:
            x = torch.randn(count, inputs, device=DEVICE).to(BF16)
            times = {
                "bfloat16": time_calls([partial(multiply, x, weight, is_gated) for weight in plains]),
                "dequantised": time_calls([partial(dequantise, x, weight, is_gated) for weight in weights]),
            }
            for plan in filter(None, plans):
                launch = partial(tiled_many.launch, plan=plan, gate=int(is_gated))
                calls = [partial(launch, x, weight, None) for weight in weights]
                times[f"{plan.tile.rows}/{plan.splits}"] = time_calls(calls)
            size = tiled_many.measure_size(count, weights[0], tiled_many.count_sms(x.device))
            chosen = tiled_many.choose_plan(size, can_split=not is_gated, adds=False)
            own = f"{chosen.tile.rows}/{chosen.splits}"
            show(f"{name:8}{form:16}{count} rows, chosen {own}", times, weights[0].num_bytes)
            for way, taken in (("bfloat16", "bfloat16"), ("dequantised", "dequantised"), ("chosen", own)):
                totals[count, way] = totals.get((count, way), 0.0) + times[taken]
    for count in rows:
        ways = ("bfloat16", "dequantised", "chosen")
        line = ", ".join(f"{way} {totals[count, way] * 1e6:.1f}" for way in ways)
        print(f"layer   {form:16}{count} rows: {line} us", flush=True)


def run_layer(form: str, rows: int, *, is_tiled: bool = False) -> None:
    """All products of a layer in turn, with the norms and without; of integers in tiles, with the norms."""
    shapes = products(next(model for model in MODELS if model.name == "llama8b"))
    if form in SUPER_LAYERS:
        layers = [
            {name: draw_super_layer(form, name, *shapes[name]) for name in PRODUCTS} for _ in range(8)
        ]
    else:
        layers = [{name: draw(FORMS[form], *shapes[name]) for name in shapes if name != "head"} for _ in range(8)]
    if is_tiled and form in FORMS:
        layers = [{name: weight.tile() for name, weight in layer.items()} for layer in layers]
    launch, gate = (tiles.launch, GATES[SILU.kind]) if is_tiled else (cuda.launch, SILU)
    width, qkv_width, inner = shapes["qkv"][1], shapes["qkv"][0], shapes["down"][1]
    x, stream = (torch.randn(rows, width, device=DEVICE).to(BF16) for _ in range(2))
    qkv, mid = (torch.empty(rows, size, device=DEVICE, dtype=BF16) for size in (qkv_width, inner))
    addition = Addition(stream, Norm(torch.rand(width, device=DEVICE).to(BF16), 1e-5), torch.empty_like(x))

    def run(weights: dict[str, DeviceCodes], shape: Any, before: Addition | None) -> None:
        launch(x, weights["qkv"], None, qkv, shape=shape, before=before)
        launch(qkv[:, :width], weights["out"], None, x, shape=shape)
        launch(x, weights["gate_up"], None, mid, shape=shape, before=before, gate=gate)
        launch(mid, weights["down"], None, x, shape=shape)

    ways = product((None, *TILE_BLOCKS), (addition,)) if is_tiled else product(BLOCKS, (None, addition))
    times = {
        name_shape(shape) + (" norms" if before else ""): time_calls(
            [partial(run, weights, shape, before) for weights in layers]
        ) for shape, before in ways  # a shape of None is chosen
    }
    show(f"layer   {form:16}{rows} rows", times, sum(weight.num_bytes for weight in layers[0].values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", default=".")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 2, 8])
    parser.add_argument("--tiles", action="store_true", help="integers in tiles")
    options = parser.parse_args()
    for form in (*FORMS, *SUPER_LAYERS):
        if not re.search(options.forms, form):
            continue
        few = [rows for rows in options.rows if rows <= MOST_CUDA_ROWS]
        many = [rows for rows in options.rows if rows not in few]
        if form in SUPER_LAYERS:
            for rows in few:
                run_supers(form, rows)
            if many:
                run_tiles(form, many)
        elif options.tiles and form.startswith("int"):
            for rows in few:
                run_layer(form, rows, is_tiled=True)
            if many and form.startswith("int4"):
                run_tiles(form, many)
        elif not options.tiles and form != "nvfp4":
            run_products(form, options.rows)
            run_layer(form, 1)


if __name__ == "__main__":
    main()

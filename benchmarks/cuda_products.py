"""A layer's products in a chain: ``python -m benchmarks.cuda_products [--rows 8 64 256] [--tiles REGEX] [--seconds
1]``.

What a kernel costs beside its neighbours, launch and all, shows only in a captured chain of whole layers with weights
of their own; attention is stood in for by a norm. Compared are torch's GEMM with separate kernels (`separate`) and the
operations that a layer chooses on Hopper (`fused`). With ``--seconds`` each runs so long, in turns, thrice: many rows
reach the power limit, where what counts is energy, which is printed too. ``--tiles`` instead times every tile for the
products whose names match, each between the kernels that stand before and after it, and checks its values.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import re
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.cuda_kernels import BF16, MODELS, Model, products, randn, time_calls
from headrace.kernels.linear import gated_product, hopper
from headrace.kernels.linear.hopper import Tile
from headrace.kernels.linear.triton import linear_pdl
from headrace.kernels.rowwise.triton import add_rms_norm_pdl, rms_norm_pdl, silu_mul_pdl

EPS = 1e-6
WEIGHT_BYTES = 2**30
"""Of distinct weights in a chain: many times the second-level cache."""
SHAPES = [
    *itertools.product((16, 32), (64,), (128,), (4, 5, 8)),
    *itertools.product((64,), (64, 128), (64, 128), (3, 4, 6, 8)),
    *itertools.product((128,), (64, 128), (64, 128), (3, 4, 6, 8)), (256, 64, 64, 4), (256, 64, 64, 5),
    (256, 128, 64, 4),
]
SHARED_BYTES = 227 * 1024


def draw_layers(model: Model) -> list[dict[str, torch.Tensor]]:
    shapes = {name: shape for name, shape in products(model).items() if name != "head"}
    bytes_each = sum(2 * outputs * inputs for outputs, inputs in shapes.values())
    return [
        {name: randn(*shape, scale=0.02) for name, shape in shapes.items()}
        for _ in range(min(model.layers, max(4, WEIGHT_BYTES // bytes_each)))
    ]


def run_separate(
    w: dict[str, torch.Tensor], name: str, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    out = linear_pdl(x, w[name], None)
    return silu_mul_pdl(out) if name == "gate_up" else out


def run_fused(
    w: dict[str, torch.Tensor], name: str, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | None:
    if name == "gate_up":
        gated = gated_product.gated_linear(x, w[name], None, "silu")
        return run_separate(w, name, x) if gated is None else gated
    return hopper.linear(x, w[name], None) if name == "qkv" else hopper.linear_sums(x, w[name], None, residual)


def make_chain(
    model: Model, layers: list[dict[str, torch.Tensor]], rows: int, multiply: Callable[..., torch.Tensor | None]
) -> Callable[[], None]:
    x, residual, norm, heads_norm = (
        randn(rows, model.width), randn(rows, model.width), randn(model.width), randn(model.heads * model.dim)
    )

    def add_norm(branch: torch.Tensor | None) -> torch.Tensor:
        return rms_norm_pdl(residual, norm, EPS) if branch is None else add_rms_norm_pdl(branch, residual, norm, EPS)[0]

    def run() -> None:
        branch: torch.Tensor | None = x
        for w in layers:
            mixed = rms_norm_pdl(multiply(w, "qkv", add_norm(branch))[:, : model.heads * model.dim], heads_norm, EPS)
            normed = add_norm(multiply(w, "out", mixed, residual))
            branch = multiply(w, "down", multiply(w, "gate_up", normed), residual)

    run()  # compiles
    return run


def read_joules() -> float:
    """What the first device has used since its driver was loaded."""
    nvml, device, used = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), ctypes.c_ulonglong()
    nvml.nvmlInit_v2()
    nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
    nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(used))
    return used.value / 1e3


def time_long(run: Callable[[], None], seconds: float) -> tuple[float, float]:
    """Seconds and joules of a call, once the clocks have settled."""
    began, count, joules = time.perf_counter(), 0, 0.0
    settled = began
    while time.perf_counter() < settled + seconds or joules == 0.0:
        run()
        count += 1
        if count % 4 == 0:
            torch.cuda.synchronize()
        if joules == 0.0 and time.perf_counter() > began + 0.3:
            torch.cuda.synchronize()
            settled, count, joules = time.perf_counter(), 0, read_joules()
    torch.cuda.synchronize()
    return (time.perf_counter() - settled) / count, (read_joules() - joules) / count


def find_tiles(rows: int, name: str) -> Iterator[Tile]:
    for shape in SHAPES:
        for splits in (1, 2, 3, 4) if name in ("out", "down") else (1,):
            tile = Tile(*shape, splits, num_warps=8 if shape[0] * shape[1] >= 128 * 128 else 4)
            width = tile.rows + tile.outputs * (2 if name == "gate_up" else 1)
            if tile.rows <= max(16, 2 * rows) and width * tile.inputs * tile.stages * 2 < SHARED_BYTES:
                yield tile


def time_tile(layers: list[dict[str, torch.Tensor]], name: str, x: torch.Tensor, tile: Tile | None) -> float:
    """Microseconds of a product, the norm before or after it, and its activation; None: torch's GEMM."""
    outputs, inputs = layers[0][name].shape
    norm_before, norm_after, residual = randn(inputs), randn(outputs), randn(len(x), outputs)
    is_last, activation = name in ("out", "down"), "silu" if name == "gate_up" else ""

    def multiply(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return run_separate(w, name, x) if tile is None else hopper.multiply(x, w[name], None, tile, activation)

    def run() -> None:
        for w in layers:
            if is_last:
                add_rms_norm_pdl(multiply(w, x), residual, norm_after, EPS)
            else:
                multiply(w, rms_norm_pdl(x, norm_before, EPS))

    out = multiply(layers[0], x)
    expected = x.float() @ layers[0][name].float().T
    if activation:
        expected = F.silu(expected[:, : outputs // 2]) * expected[:, outputs // 2 :]
    out = out.sum(0) if out.dim() == 3 else out.float()
    assert float((out - expected).norm() / expected.norm()) < 1e-2, tile
    run()
    return time_calls([run]) / len(layers) * 1e6


def sweep(model: Model, layers: list[dict[str, torch.Tensor]], rows: int, names: str) -> None:
    for name, (_, inputs) in products(model).items():
        if name == "head" or not re.search(names, name):
            continue
        x = randn(rows, inputs)
        times = {tile: time_tile(layers, name, x, tile) for tile in (None, *find_tiles(rows, name))}
        print(f"{model.name} {name} M{rows}: torch {times.pop(None):.2f}")
        for tile, microseconds in sorted(times.items(), key=lambda item: item[1])[:6]:
            print(f"    {microseconds:8.2f} {tile}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8, 16, 32, 64, 96, 128, 192, 256])
    parser.add_argument("--seconds", type=float, default=0.0, help="for each chain and turn, instead of a burst")
    parser.add_argument("--tiles", help="regular expression on the products' names: qkv, out, gate_up, down")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {BF16}: microseconds a layer")
    for model in MODELS:
        layers = draw_layers(model)
        for rows in args.rows:
            if args.tiles is not None:
                sweep(model, layers, rows, args.tiles)
                continue
            chains = {
                name: make_chain(model, layers, rows, multiply) for name,
                multiply in (("separate", run_separate), ("fused", run_fused))
            }
            if args.seconds:
                for name, run in [*chains.items()] * 3:
                    each = [value / len(layers) for value in time_long(run, args.seconds)]
                    print(
                        f"{model.name} M{rows:<5d} {name:7s} {1e6 * each[0]:8.1f} us  {1e3 * each[1]:7.1f} mJ",
                        flush=True
                    )
                continue
            separate, fused = (time_calls([run]) / len(layers) * 1e6 for run in chains.values())
            print(
                f"{model.name} M{rows:<4d} separate {separate:8.2f}  fused {fused:8.2f}  "
                f"{separate / fused:.3f}", flush=True
            )


if __name__ == "__main__":
    main()

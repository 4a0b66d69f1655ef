"""Gate and up of some hundred rows in one wave of tiles, beside torch's GEMM: ``python -m benchmarks.wave_products
[--rows 129 256] [--only REGEX] [--plain] [--tiles]``.

Microseconds of a product with its activation, FP8 with rounding the result to rows in FP8 as well, in a captured chain
of norms and products over weights that the L2 does not hold, less the same chain of norms alone. A line of torch's GEMM
with separate kernels (``g``: of the Gluon kernel, where that is faster), then one of `wave_product` (``x``, ``w``: the
operand that a cluster shares; ``-``: no tiles that all run at once; ``!``: its estimate does not choose it). Values are
compared. ``--plain``: without activations. ``--tiles``: the time and the estimate of every tile.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.cuda_kernels import BF16, randn, time_calls
from headrace.kernels.coded_linear import hopper as fp8_hopper
from headrace.kernels.coded_linear.codes import Code
from headrace.kernels.coded_linear.device_codes import DeviceCodes, Fp8Rows
from headrace.kernels.coded_linear.fp8_triton import gate_rows_pdl, norm_rows_pdl, quantise_rows_pdl
from headrace.kernels.coded_linear.scaled import multiply_rows
from headrace.kernels.linear import hopper, wave_product, waves
from headrace.kernels.linear.triton import linear_pdl
from headrace.kernels.linear.wave_product import Scales
from headrace.kernels.linear.waves import Tile
from headrace.kernels.rowwise import Gate
from headrace.kernels.rowwise.triton import rms_norm_pdl, silu_mul_pdl

EPS = 1e-6
CHAIN_BYTES = 2**30
MOST_WIDTH_OF_FOUR = 192
"""Of tiles of four warpgroups, whose threads have 128 registers."""
SHAPES = {
    "Llama-3.1-8B": (28672, 4096), "Llama-3.1-8B, half": (14336, 4096), "Qwen3-8B": (24576, 4096),
    "Qwen3-8B, half": (12288, 4096), "Qwen2.5-7B": (37888, 3584), "Qwen2.5-7B, half": (18944, 3584),
    "Llama-3.1-70B, eighth": (7168, 8192),
}
"""Rows of gate and up together, and inputs."""
Normed = torch.Tensor | Fp8Rows
Product = Callable[[Normed, torch.Tensor | DeviceCodes], object]


@dataclass(frozen=True)
class Kind:
    """What is measured: FP8 or bfloat16, with or without the activation."""

    is_fp8: bool
    activation: str

    def draw(self, width: int, inputs: int) -> torch.Tensor | DeviceCodes:
        if not self.is_fp8:
            return randn(width, inputs, scale=inputs**-0.5)
        codes = (torch.randn(width, inputs, device="cuda") * 60).to(torch.float8_e4m3fn)
        scales = torch.rand(width, 1, device="cuda") * 2e-2 * inputs**-0.5 + 1e-3 * inputs**-0.5
        return DeviceCodes(Code.E4M3, inputs, codes, scales, inputs)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> Normed:
        return norm_rows_pdl(None, x, weight, EPS)[0] if self.is_fp8 else rms_norm_pdl(x, weight, EPS)

    def run_library(self, x: Normed, weight: torch.Tensor | DeviceCodes) -> object:
        if isinstance(x, Fp8Rows):
            out = multiply_rows(x, weight, None, BF16)
            return gate_rows_pdl(out, Gate(self.activation)) if self.activation else out
        out = linear_pdl(x, weight, None)
        return silu_mul_pdl(out) if self.activation else out

    def run_gluon(self, x: Normed, weight: torch.Tensor | DeviceCodes) -> object:
        if not isinstance(x, Fp8Rows):
            own = hopper.gated_linear(x, weight, None, self.activation) if self.activation else None
            return self.run_library(x, weight) if own is None else own
        if not self.activation:
            return fp8_hopper.multiply_rows(x, weight, None, BF16)
        return quantise_rows_pdl(fp8_hopper.multiply_gated_rows(x, weight, None, BF16, self.activation), 0)

    def run_wave(self, x: Normed, weight: torch.Tensor | DeviceCodes, *, tile: Tile) -> object:
        if not isinstance(x, Fp8Rows):
            return wave_product.multiply(x, weight, tile, self.activation)
        scales = Scales(x.scales, weight.scales)
        out = wave_product.multiply(x.codes, weight.codes, tile, self.activation, scales)
        return quantise_rows_pdl(out, 0) if self.activation else out


def vary(tile: Tile) -> Iterator[Tile]:
    """A tile, and the same with other warpgroups."""
    yield tile
    if tile.high == 2 and (tile.warpgroups < 2 or tile.width <= MOST_WIDTH_OF_FOUR):
        yield replace(tile, warpgroups=2 * tile.warpgroups, high=1)
    if tile.high == 1 and tile.warpgroups % 2 == 0 and tile.width <= waves.MOST_WIDTH_OF_256:
        yield replace(tile, warpgroups=tile.warpgroups // 2, high=2)


def differ(out: object, expected: object) -> float:
    """The distance of results, relative to their size."""
    first, second = (own.decode(torch.float32) if isinstance(own, Fp8Rows) else own.float() for own in (out, expected))
    return float((first - second).norm() / second.norm())


def measure(kind: Kind, weights: list, rows: int, *, shows_tiles: bool) -> tuple[str, str]:
    """Cells of a table: as before, and in one wave."""
    inputs = weights[0].shape[1] if isinstance(weights[0], torch.Tensor) else weights[0].in_features
    x, norm = randn(rows, inputs), randn(inputs)
    norms = time_calls([partial(kind.norm, x, norm) for _ in weights])

    def time_product(product: Product) -> float:
        return (time_calls([lambda w=w: product(kind.norm(x, norm), w) for w in weights]) - norms) * 1e6

    normed = kind.norm(x, norm)
    expected = kind.run_library(normed, weights[0])
    before = {"": time_product(kind.run_library), "g": time_product(kind.run_gluon)}
    mark = min(before, key=before.__getitem__)
    shown, values = f"{before[mark]:.1f}{mark}", normed.codes if isinstance(normed, Fp8Rows) else normed
    codes = weights[0] if isinstance(weights[0], torch.Tensor) else weights[0].codes
    size = wave_product.measure_size(values, codes, is_gated=bool(kind.activation))
    times: dict[Tile, float] = {}
    for tile in [own for found in waves.find_tiles(size) for own in vary(found)]:
        product = partial(kind.run_wave, tile=tile)
        distance = differ(product(normed, weights[0]), expected)
        if not distance < (3e-2 if kind.is_fp8 else 5e-3):
            print(f"    {rows} rows {tile}: differs by {distance:.1e}", flush=True)
        times[tile] = time_product(product)
        if shows_tiles:
            shape = f"{tile.warpgroups} x {tile.high} x 64 rows by {tile.width}, shares {'x' if tile.shares_x else 'w'}"
            estimated = 1e6 * waves.estimate(size, tile)
            print(
                f"    {rows} rows: {shape}, {tile.stages} stages: {times[tile]:.1f}, estimated {estimated:.1f}",
                flush=True,
            )
    if not times:
        return shown, "-"
    best = min(times, key=times.__getitem__)
    is_chosen = waves.choose_tile(size) is not None
    return shown, f"{times[best]:.1f}{'x' if best.shares_x else 'w'}{'' if is_chosen else '!'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[65, 96, 128, 160, 192, 224, 250, 256])
    parser.add_argument("--only", default="", help="regular expression on models and types, such as '8B.*fp8'")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--tiles", action="store_true")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {' '.join(map(str, args.rows))} rows")
    for name, (width, inputs) in SHAPES.items():
        for is_fp8 in (False, True):
            title = f"{name} {'fp8' if is_fp8 else 'bf16'}"
            if not re.search(args.only, title):
                continue
            kind = Kind(is_fp8, "" if args.plain else "silu")
            count = max(4, CHAIN_BYTES // (width * inputs * (1 if is_fp8 else 2)))
            weights = [kind.draw(width, inputs) for _ in range(count)]
            cells = [measure(kind, weights, rows, shows_tiles=args.tiles) for rows in args.rows]
            for label, line in zip(("now", "wave"), zip(*cells, strict=True), strict=True):
                row = "".join(f"{cell:>8}" for cell in line)
                print(f"{title if label == 'now' else '':28}{label:5}{row}", flush=True)
            del weights


if __name__ == "__main__":
    main()

"""Times the low-rank additions of one decoder layer on a GPU, beside the products that they are added to.

Shapes are those of Llama-3.1-8B, rank 16 on all linears; everything runs in a captured graph, as decodes do. Usage:
python -m benchmarks.adapter_kernels [--solution triton_pdl]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from headrace.kernels.linear import LINEAR
from headrace.kernels.lora import EXPAND, SHRINK, LowRankBank, SlotRows, make_tiles
from headrace.kernels.operation import KernelQuery
from headrace.layers.lora.rows import RowsLayout

SHAPES = {
    "qkv": (4096, (4096, 1024, 1024)), "o": (4096, (4096,)), "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
RANK, LAYERS, REPEATS = 16, 8, 30
CUDA = torch.device("cuda")


def make_bank(inputs: int, widths: tuple[int, ...], slots: int) -> LowRankBank:
    ends = tuple(np.cumsum(widths).tolist())
    a = torch.randn(slots, len(widths), RANK, inputs, device=CUDA, dtype=torch.bfloat16)
    b = torch.randn(slots, RANK, ends[-1], device=CUDA, dtype=torch.bfloat16)
    ranks = torch.full((slots, len(widths)), RANK, device=CUDA)
    return LowRankBank(a, b, ranks, ends, make_tiles(ends, CUDA))


def time_graph(work: Callable[[], object]) -> float:
    """Microseconds of ``work``, which is captured."""
    for _ in range(2):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(REPEATS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPEATS * 1e3


@dataclass
class Product:
    """One product and what is added to it."""

    weight: torch.Tensor
    bank: LowRankBank
    linear: Callable[..., torch.Tensor]


def make_layer(slots: int) -> list[Product]:
    """The products of one layer."""
    layer = []
    for inputs, widths in SHAPES.values():
        shape = {"in_features": inputs, "out_features": sum(widths)}
        query = KernelQuery("cuda", "bfloat16", torch.cuda.get_device_capability(), shape)
        weight = torch.randn(sum(widths), inputs, device=CUDA, dtype=torch.bfloat16)
        layer.append(Product(weight, make_bank(inputs, widths, slots), LINEAR.choose(query)))
    return layer


def run(
    layers: list[list[Product]], xs: list[torch.Tensor], rows: SlotRows, solution: str
) -> None:
    """All products, with low-rank additions by a solution, if one is named."""
    for layer in layers:
        for x, product in zip(xs, layer, strict=True):
            reduced = SHRINK.load(solution)(x, product.bank, rows) if solution else None
            out = product.linear(x, product.weight, None)
            if solution:
                EXPAND.load(solution)(reduced, out, product.bank, rows)


def main() -> None:
    """Print a table: microseconds a layer, over several layers so that weights come from memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--solution", default="triton_pdl", choices=SHRINK.names())
    solution = parser.parse_args().solution
    print(f"{'rows':>6} {'adapters':>8} {'base us':>9} {'with us':>9} {'share':>7}")
    for slots in (1, 8, 64):
        layers = [make_layer(slots) for _ in range(LAYERS)]
        for count in (1, 16, 64, 256, 2048):
            layout = RowsLayout(count, slots)
            packed, segments = layout.pack(np.arange(count) % slots)
            rows = layout.view(torch.from_numpy(packed).cuda(), segments)
            xs = [torch.randn(count, inputs, device=CUDA, dtype=torch.bfloat16) for inputs, _ in SHAPES.values()]
            base, whole = (
                time_graph(partial(run, layers, xs, rows, own)) / LAYERS for own in ("", solution)
            )
            print(f"{count:>6} {slots:>8} {base:>9.1f} {whole:>9.1f} {base / whole:>7.3f}", flush=True)
        del layers
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.inference_mode():
        main()

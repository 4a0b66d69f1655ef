"""Times the products, norms, rotation and activations of decoder layers with low-rank additions on a GPU.

Layers are those of Llama-3.1-8B with rank 16 on all linears, without attention itself, in a captured graph as decodes
run; of several layers, so that weights come from memory. Usage: python -m benchmarks.adapter_kernels [--rows 16,256]
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from headrace.kernels.few_decodes import Rotation
from headrace.kernels.lora import SlotRows, precedes_attention
from headrace.kernels.rowwise import HeadShape
from headrace.layers.attention.contract import KvPages
from headrace.layers.build import Build
from headrace.layers.lora.parts import BankSizes
from headrace.layers.lora.rows import RowsLayout
from headrace.layers.residual import Residual
from headrace.models.llama.family import FAMILY

CONFIG = Path(__file__).parent / "models" / "llama-3.1-8b" / "config.json"
RANK, SLOTS, REPEATS, PAGE, DECODES = 16, 64, 20, 64, 512
CUDA = torch.device("cuda")
MEMORY_RATE = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes a second."""


def time_graph(work: Callable[[], object], repeats: int = REPEATS) -> tuple[float, torch.cuda.CUDAGraph]:
    """Microseconds of ``work``, which is captured: the least of three rounds."""
    for _ in range(2):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times = []
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / repeats * 1e3)
    return min(times), graph


@dataclass
class Rig:
    """Layers whose banks are full."""

    model: Any
    num_layers: int

    @classmethod
    def make(cls, num_layers: int) -> Rig:
        """With room for `SLOTS` adapters."""
        config = json.loads(CONFIG.read_text()) | {"num_hidden_layers": num_layers, "vocab_size": 1024}
        sizes = BankSizes(SLOTS, RANK)
        build = Build(CUDA, torch.bfloat16, 2048, adapters=sizes)
        model = FAMILY.build_model(FAMILY.read_config(config), build)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point():
                tensor.data.normal_(std=0.01)
            elif name.endswith(".ranks"):
                tensor.fill_(RANK)
        return cls(model, num_layers)

    @property
    def weight_bytes(self) -> int:
        """Of a layer's weights."""
        return sum(p.nbytes for p in self.model.layers.parameters()) // self.num_layers

    @property
    def adapter_bytes(self) -> int:
        """Of one adapter in a layer."""
        banks = [linear.lora for linear in self._linears(self.model.layers[0])]
        return sum(bank.slot_bytes for bank in banks)

    @staticmethod
    def _linears(block: Any) -> list[Any]:
        return [block.attention.qkv, block.attention.output, block.mlp.gate_up, block.mlp.down]

    def time(self, count: int, rows: SlotRows | None) -> tuple[float, torch.cuda.CUDAGraph]:
        """Microseconds of a layer for so many rows, and a graph of all."""
        attended = torch.randn(count, 4096, device=CUDA, dtype=torch.bfloat16)
        stream = torch.randn(count, 4096, device=CUDA, dtype=torch.bfloat16)
        self.model.step.batch = SimpleNamespace(adapters=rows, queries=None)
        attention = self.model.layers[0].attention
        numbers, cos_sin = torch.arange(count, device=CUDA), attention.rotary.cos_sin
        heads = HeadShape(
            num_heads=attention.spec.num_heads, num_kv_heads=attention.spec.num_kv_heads,
            head_dim=attention.spec.head_dim, rotary_dim=attention.spec.head_dim, interleaved=False, norm_eps=1e-5,
            norm_offset=0.0,
        )
        rotation = Rotation(numbers % len(cos_sin), cos_sin, numbers, None, heads)
        page = -(-count // PAGE), PAGE, heads["num_kv_heads"], heads["head_dim"]
        pages = KvPages(*(torch.zeros(page, device=CUDA, dtype=torch.bfloat16) for _ in range(2)))

        def run() -> None:
            residual = Residual(stream)
            for block in self.model.layers:
                qkv, addition = block.attention.qkv.read_all(
                    block.attention_norm, residual, adds_later=precedes_attention(count)
                )
                block.attention.rotate(qkv, rotation, pages, addition)
                block.attention.output.add_to(residual, attended)
                block.mlp.add(block.mlp_norm, residual)
            residual.add_pending()

        found, graph = time_graph(run)
        return found / self.num_layers, graph


def make_rows(count: int, adapters: int, num_dense: int) -> SlotRows:
    """As in a captured step: adapters in turns; ``num_dense``: see `SlotRows`, 0 for those in any slots."""
    layout = RowsLayout(count, num_dense or SLOTS)
    packed, _ = layout.pack(np.arange(count) % adapters)
    side = torch.cuda.Stream(CUDA, priority=-1)
    return layout.view(torch.from_numpy(packed).cuda(), [], side, num_dense=num_dense)


def print_kernels(graph: torch.cuda.CUDAGraph, num_layers: int) -> None:
    """Microseconds of each kernel in a layer, by its name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in profile.events():
        times[event.name[:44]] += event.device_time
    told = (f"{name} {time / num_layers:.1f}" for name, time in times.most_common(9))
    print("        " + "; ".join(told), flush=True)


def main() -> None:
    """Print a table: microseconds a layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="16,64,256,1024")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--kernels", action="store_true", help="and of each kernel")
    args = parser.parse_args()
    rig = Rig.make(args.layers)
    rate = next((rate for name, rate in MEMORY_RATE.items() if name in torch.cuda.get_device_name()), 0.0)
    print(f"{'rows':>6} {'adapters':>8} {'base us':>9} {'with us':>9} {'share':>7} {'memory us':>9}")
    for count in map(int, args.rows.split(",")):
        base, graph = rig.time(count, None)
        if args.kernels:
            print_kernels(graph, args.layers)
        for adapters in (1, 8, 64):
            num_dense = next((most for most in BankSizes(SLOTS, RANK).dense_counts if adapters <= most), 0)
            whole, graph = rig.time(count, make_rows(count, adapters, num_dense))
            num_bytes = rig.weight_bytes + min(adapters, count) * rig.adapter_bytes
            least = num_bytes / rate * 1e6 if rate else 0.0
            print(f"{count:>6} {adapters:>8} {base:>9.1f} {whole:>9.1f} {base / whole:>7.3f} {least:>9.1f}", flush=True)
            if args.kernels:
                print_kernels(graph, args.layers)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

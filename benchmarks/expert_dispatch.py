"""How long a mixture takes by the way its tokens travel: dispatchers among ranks, by tokens of a rank.

    python -m benchmarks.expert_dispatch [--ranks 2] [--device cuda] [--model qwen3-30b] [--json FILE]

Starts a process a rank: GPUs of this host, or with ``--device cpu`` processes over Gloo. Each rank is a replica with as
many tokens as the others (``even``), or rank 0 alone has them (``idle``). Times are medians of the slowest rank, in
microseconds, of one layer's experts: routing, dispatch, experts and combine; beside them the experts alone, with all of
them on one rank of the same size (``local``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.multiprocessing

from headrace.layers.batch import ForwardBatch
from headrace.layers.build import Build
from headrace.layers.moe.layer import MoeMlp
from headrace.layers.spec import MlpSpec, MoeSpec, RoutingSpec
from headrace.parallel.experts import ExpertRanks
from headrace.parallel.group import Rendezvous, find_store, join_group, serve_rendezvous
from headrace.parallel.push import open_push_group

MODELS = {  # hidden size, experts, choices, intermediate size
    "qwen3-30b": (2048, 128, 8, 768), "deepseek-v3": (7168, 256, 8, 2048), "tiny": (256, 16, 4, 128),
}
TOKENS = (1, 4, 16, 64, 128, 256, 1024, 4096)
DISPATCHERS = ("all-gather", "all-to-all")


def build_layer(name: str, build: Build) -> MoeMlp:
    """A layer with random weights."""
    width, experts, top_k, size = MODELS[name]
    layer = MoeMlp(MoeSpec(RoutingSpec(experts, top_k), MlpSpec(size), None), width, build)
    for parameter in layer.parameters():
        parameter.normal_(0, 0.02)
    return layer


def measure(call, device: torch.device, rounds: int) -> float:
    """Median microseconds."""
    took = []
    for turn in range(rounds + 3):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn >= 3:
            took.append((time.perf_counter() - began) * 1e6)
    return statistics.median(took)


@torch.inference_mode()
def run_rank(rank: int, meeting: Rendezvous, options: argparse.Namespace) -> None:
    """One process: all measurements in the same order as the others."""
    size, is_gpu = options.ranks, options.device == "cuda"
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if is_gpu else torch.float32
    if is_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    store = serve_rendezvous(meeting.address, size, meeting.port)[0] if rank == 0 else find_store(meeting, size)
    group = open_push_group(join_group(rank, size, device, store), device)
    table: dict[str, dict[str, float]] = {}
    for name in ("local", *DISPATCHERS):
        ranks = ExpertRanks() if name == "local" else ExpertRanks(group, size)
        build = Build(device, dtype, experts=ranks, all2all_backend="auto" if name == "local" else name)
        layer = build_layer(options.model, build)
        for count in options.tokens:
            x = torch.randn(count, MODELS[options.model][0], device=device).to(dtype)
            for load in ("even",) if name == "local" else ("even", "idle"):
                own = count if load == "even" or rank == 0 else 0
                nothing = torch.empty(0, dtype=torch.int64)
                counts = [count] * size if load == "even" else [count] + [0] * (size - 1)
                build.step.batch = ForwardBatch(nothing, nothing, [], replica_tokens=counts)
                took = measure(lambda n=own, x=x, m=layer: m.compute_share(x) if n else m.take_part(), device, 20)
                slowest = -group.agree([-round(took * 10)])[0] / 10
                table.setdefault(str(count), {})[name if load == "even" else f"{name} {load}"] = slowest
    if rank == 0:
        for count, line in table.items():
            print(f"{count:>6} " + "; ".join(f"{name} {took:.0f}" for name, took in line.items()), flush=True)
        about = {"device": options.device, "ranks": size, "model": options.model, "torch": torch.__version__}
        if options.json:
            Path(options.json).write_text(json.dumps({"about": about, "microseconds": table}, indent=1))
        print(json.dumps(about))
    group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=2, help="processes, on a GPU each")
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3-30b", help="whose shapes")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of a rank")
    parser.add_argument("--port", type=int, default=29614)
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    if options.device == "cuda" and not 2 <= options.ranks <= torch.cuda.device_count():
        sys.exit(f"needs two GPUs or more, and one for each rank: there are {torch.cuda.device_count()}")
    torch.multiprocessing.spawn(run_rank, (Rendezvous("127.0.0.1", options.port), options), nprocs=options.ranks)


if __name__ == "__main__":
    main()

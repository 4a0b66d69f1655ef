"""Hyper-connections of few tokens at DeepSeek-V4-Flash's width, alone and behind a product, on one GPU and with a sum
over ranks: ``python -m benchmarks.ranked_streams [--ranks 2] [--tokens 1 8 9 64]``.

Microseconds of one call in captured chains over weights that the L2 does not hold; of several ranks, a process each,
the slowest one's median. "product, streams" has a product of FP8 rows, 4,096 x 4,096, in front of each, which reads
what the streams give and makes what they add up; "less the product" is that without the same chain of products alone:
what hyper-connections add to a step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.multiprocessing

from benchmarks.coded_experts import draw
from benchmarks.collectives import ANY, measure
from benchmarks.quantized_gpu import FORMS
from headrace.kernels.coded_linear import fp8_rows
from headrace.kernels.collective.push import Room
from headrace.kernels.streams import Pending, StreamMix, StreamShape, cuda, groups
from headrace.parallel.group import Rendezvous, find_store, join_group, serve_rendezvous
from headrace.parallel.push import open_push_group

WIDTH, SHAPE, BF16 = 4096, StreamShape(20, 1e-6, 1e-6), torch.bfloat16
LAYERS, PRODUCTS = 64, 16
"""Weights of streams, 1.6 MB each, and of products, 16 MB each, in a chain."""
MOST_PRODUCT_ROWS = 8


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


class Chains:
    """What is timed for one number of tokens; ``push`` adds up over ranks."""

    def __init__(self, tokens: int, push: Any = None):
        self.push, self.x, self.out = push, randn(tokens, WIDTH), randn(tokens, WIDTH)
        self.streams, self.norm = randn(tokens, 4, WIDTH), randn(WIDTH)
        self.post = torch.rand(tokens, 4, device="cuda")
        self.mixing = torch.rand(tokens, 4, 4, device="cuda") / 4
        self.mixes = [
            StreamMix(randn(24, 4 * WIDTH, dtype=torch.float32) / 64, torch.rand(3).cuda(), torch.rand(24).cuda())
            for _ in range(LAYERS)
        ]
        self.weights = [draw(FORMS["fp8 block 128"], WIDTH, WIDTH) for _ in range(PRODUCTS)]

    def pass_streams(self, layer: int, out: torch.Tensor, *, is_summed: bool = False) -> torch.Tensor:
        """The next sublayer's input."""
        lent = self.push.lend_sum(out.nbytes, BF16) if is_summed else None
        pending = Pending(out, self.post, self.mixing)
        found = cuda.write_read_streams(self.streams, pending, self.mixes[layer], self.norm, SHAPE, ranks=lent)
        if found is None:
            raise RuntimeError(f"{len(self.x)} tokens are not added up in the kernel of streams")
        return found[1]

    def pass_groups(self, layer: int, out: torch.Tensor, *, is_summed: bool = False) -> torch.Tensor:
        """The same by the kernel of more tokens."""
        lent = self.push.lend_sum(out.nbytes, BF16) if is_summed else None
        pending = Pending(out, self.post, self.mixing)
        return groups.pass_streams(self.streams, pending, self.mixes[layer], self.norm, SHAPE, lent)[1]

    def multiply(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return fp8_rows.launch(x, self.weights[layer % PRODUCTS], None, torch.empty_like(self.out))

    def run_pairs(self, finish: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        """All layers, each a product and what ``finish`` does of it."""
        x = self.x
        for layer in range(LAYERS):
            x = finish(layer, self.multiply(layer, x))

    def sum_apart(self, layer: int, out: torch.Tensor) -> torch.Tensor:
        total = self.push.all_reduce(out)
        assert total is not None
        return self.pass_streams(layer, total)

    def list_calls(self) -> dict[str, Callable[[], None]]:
        summed = partial(self.pass_streams, is_summed=True)

        def alone(finish: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
            for layer in range(LAYERS):
                finish(layer, self.out)

        calls: dict[str, Callable[[], None]] = {"streams": partial(alone, self.pass_streams)}
        if self.push is not None:
            calls |= {"streams with sum": partial(alone, summed), "sum, streams": partial(alone, self.sum_apart)}
        if len(self.x) <= MOST_PRODUCT_ROWS:
            calls["in groups"] = partial(alone, partial(self.pass_groups, is_summed=self.push is not None))
            calls["product"] = partial(self.run_pairs, lambda _, out: out)
            calls["product, streams"] = partial(self.run_pairs, self.pass_streams)
            if self.push is not None:
                calls["product, streams with sum"] = partial(self.run_pairs, summed)
                calls["product, sum, streams"] = partial(self.run_pairs, self.sum_apart)
        return calls


def time_graph(call: Callable[[], None]) -> float:
    """Microseconds of a layer."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(3):
        graph.replay()
    return measure(graph.replay, 30) / LAYERS


def run(tokens: list[int], push: Any = None, agree: Callable[[float], float] = lambda took: took) -> None:
    """Measure and print a line for each number of tokens."""
    for count in tokens:
        times = {name: agree(time_graph(call)) for name, call in Chains(count, push).list_calls().items()}
        if push is not None and push.rank:
            continue
        line = "; ".join(
            f"{name} {took:.2f}" + (f" ({took - times['product']:.2f} less the product)" if "product," in name else "")
            for name, took in times.items()
        )
        print(f"{count} tokens: {line}", flush=True)


def run_rank(rank: int, size: int, meeting: Rendezvous, options: argparse.Namespace) -> None:
    """One process: all measurements in the same order as the others."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = serve_rendezvous(meeting.address, size, meeting.port)[0] if rank == 0 else find_store(meeting, size)
    nccl = join_group(rank, size, device, store)
    group = open_push_group(nccl, device, room=Room(16 << 20, 4 << 20))
    push: Any = group.collectives  # type: ignore[attr-defined]
    push.limits = ANY
    push.prepare(BF16)
    run(options.tokens, push, lambda took: -nccl.agree([-int(1000 * took)])[0] / 1000)
    if push.failure:
        sys.exit(push.failure)
    torch.cuda.synchronize()
    group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 9, 33, 64])
    parser.add_argument("--port", type=int, default=29617)
    options = parser.parse_args()
    if options.ranks == 1:
        run(options.tokens)
    else:
        arguments = (options.ranks, Rendezvous("127.0.0.1", options.port), options)
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=options.ranks)
    print(json.dumps({"device": torch.cuda.get_device_name(), "ranks": options.ranks, "torch": torch.__version__}))


if __name__ == "__main__":
    main()

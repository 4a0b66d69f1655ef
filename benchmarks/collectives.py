"""Collectives of tensors of all sizes among the GPUs of this host: own kernels beside NCCL, in CUDA graphs and eager.

    python -m benchmarks.collectives [--ranks 2] [--json FILE] [--one-gpu]

Starts a process a GPU. Times are medians, in microseconds, of the slowest rank; a graph holds `CALLS` calls. With
``--one-gpu`` the ranks are streams of one process that share a GPU: what the kernels cost without links.
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

from headrace.kernels.collective import Limits
from headrace.kernels.collective.mailbox import Mailbox
from headrace.kernels.collective.push import PushCollectives, Room
from headrace.parallel.group import Rendezvous, find_store, join_group, serve_rendezvous
from headrace.parallel.push import PushGroup, open_push_group

CALLS = 100
WIDTH = 4096
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Of a tensor [rows, `WIDTH`] bfloat16, 8 KB a row; before them 4 KB."""
SHARED_ROWS = 256
"""On one GPU: above it, kernels that are launched early could keep another rank's from running."""
ANY = Limits(1 << 40, 1 << 40, 1 << 40, 1 << 40)


def time_graph(call, rounds: int = 12) -> float:
    """Microseconds a call, from replays of a graph of `CALLS` calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    return measure(graph.replay, rounds) / CALLS


def measure(run, rounds: int) -> float:
    """Median microseconds of ``run``."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1000 for start, end in events)


def time_eager(call, calls: int = 100) -> float:
    """Microseconds a call, by the host's clock, of calls one after the other."""
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / calls * 1e6


def calls_of(push: PushCollectives, nccl, rows: int, width: int) -> dict:
    """What is compared for tensors of one size; a call that returns None is not served."""
    from headrace.kernels.rowwise.triton import add_rms_norm_pdl

    x = torch.randn(rows, width, device="cuda").to(torch.bfloat16)
    y, stream, weight = x.clone(), x.clone(), x[0].clone()

    def limited(limits: Limits, call):
        def run():
            push.limits = limits
            return call()
        return run

    two_steps = Limits(0, 1 << 40, 1 << 40, 1 << 40)
    fused = lambda: push.reduce_add_norm(x, stream, weight, eps=1e-5, offset=0.0)  # noqa: E731

    def separate():
        total = push.all_reduce(x)
        return None if total is None else add_rms_norm_pdl(total, stream, weight, 1e-5)

    library = lambda: add_rms_norm_pdl(nccl.all_reduce(y), stream, weight, 1e-5)  # noqa: E731
    pushed = lambda: push.all_reduce(x)  # noqa: E731
    each = rows * width // push.size  # elements that a rank has for each
    own, other = (a.flatten()[: each * push.size].view(push.size, each) for a in (x, y))
    return {
        "one step": limited(ANY, pushed), "two steps": limited(two_steps, pushed), "NCCL": lambda: nccl.all_reduce(y),
        "fused": limited(ANY, fused), "fused 2": limited(two_steps, fused), "separate": limited(ANY, separate),
        "NCCL + norm": library, "gather": limited(ANY, lambda: push.all_gather(x)),
        "NCCL gather": lambda: nccl.all_gather(x, [width] * push.size),
        "all-to-all": limited(ANY, lambda: push.exchange(own)),
        "NCCL all-to-all": lambda: nccl.exchange_rows(other, [1] * push.size, [1] * push.size),
    }


def run_rank(rank: int, size: int, meeting: Rendezvous, options: argparse.Namespace) -> None:
    """One process: all measurements in the same order as the others."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = serve_rendezvous(meeting.address, size, meeting.port)[0] if rank == 0 else find_store(meeting, size)
    nccl = join_group(rank, size, device, store)
    began = time.perf_counter()
    group = open_push_group(nccl, device, room=Room(64 << 20, 16 << 20))
    opened = time.perf_counter() - began
    if not isinstance(group, PushGroup):
        sys.exit("the ranks cannot write each other's memory; see the warning above")
    push, table = group.collectives, {}
    assert isinstance(push, PushCollectives)
    for rows, width in ((1, WIDTH // 2), *((rows, WIDTH) for rows in options.rows)):
        line = table[str(rows * width * 2)] = {}
        for name, call in calls_of(push, nccl, rows, width).items():
            if call() is None:
                continue
            rounds = 12 if rows <= 1024 else 5
            line[name] = -nccl.agree([-int(1000 * time_graph(call, rounds))])[0] / 1000
            if name in ("one step", "NCCL", "fused") and rows <= 64:
                line[f"{name} eager"] = -nccl.agree([-int(1000 * time_eager(call))])[0] / 1000
        group.waits.check()
        if rank == 0:
            told = "; ".join(f"{name} {took:.1f}" for name, took in line.items())
            print(f"{rows * width * 2:>10} {told}", flush=True)
    if rank == 0:
        about = {"device": torch.cuda.get_device_name(), "ranks": size, "torch": torch.__version__, "open_s": opened}
        if options.json:
            Path(options.json).write_text(json.dumps({"about": about, "microseconds": table}, indent=1))
        print(json.dumps(about))
    torch.cuda.synchronize()
    group.close()


def share_gpu(options: argparse.Namespace) -> None:
    """Ranks on streams of one GPU: times of graphs that run at once, and no other library to compare with."""
    device, room, table = torch.device("cuda", 0), Room(64 << 20, 16 << 20), {}
    mailboxes = [Mailbox(device, room.mailbox(options.ranks)) for _ in range(options.ranks)]
    addresses = [mailbox.address for mailbox in mailboxes]
    # of each rank a call that waits and the next one, already launched, must run beside those of the others
    blocks = torch.cuda.get_device_properties(device).multi_processor_count // (2 * options.ranks)
    ranks = [PushCollectives(addresses, rank, device, room=room, most_blocks=blocks) for rank in range(options.ranks)]
    streams = [torch.cuda.Stream() for _ in ranks]
    ranks[0].prepare(torch.bfloat16)
    for rows, width in ((1, WIDTH // 2), *((rows, WIDTH) for rows in options.rows if rows <= SHARED_ROWS)):
        line = table[str(rows * width * 2)] = {}
        by_rank = [calls_of(push, None, rows, width) for push in ranks]
        for name in ("one step", "two steps", "fused", "fused 2", "separate", "gather"):
            graphs = [torch.cuda.CUDAGraph() for _ in ranks]
            for graph, stream, calls in zip(graphs, streams, by_rank, strict=True):
                with torch.cuda.graph(graph, stream=stream):
                    for _ in range(CALLS):
                        calls[name]()
            took = []
            for _ in range(8):
                torch.cuda.synchronize()
                began = time.perf_counter()
                for graph, stream in zip(graphs, streams, strict=True):
                    with torch.cuda.stream(stream):
                        graph.replay()
                torch.cuda.synchronize()
                took.append((time.perf_counter() - began) / CALLS * 1e6)
            line[name] = statistics.median(took)
        assert not any(push.failure for push in ranks)
        print(f"{rows * width * 2:>10} " + "; ".join(f"{name} {took:.1f}" for name, took in line.items()), flush=True)
    if options.json:
        about = {"device": torch.cuda.get_device_name(), "ranks": options.ranks, "shared": True}
        Path(options.json).write_text(json.dumps({"about": about, "microseconds": table}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), help="GPUs (default: all)")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of 8 KB")
    parser.add_argument("--port", type=int, default=29613)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--one-gpu", action="store_true", help="ranks share one GPU")
    options = parser.parse_args()
    if options.one_gpu:
        options.ranks = max(2, options.ranks)
        return share_gpu(options)
    if options.ranks < 2 or options.ranks > torch.cuda.device_count():
        sys.exit(f"needs two GPUs or more, and one for each rank: there are {torch.cuda.device_count()}")
    arguments = (options.ranks, Rendezvous("127.0.0.1", options.port), options)
    torch.multiprocessing.spawn(run_rank, arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()

"""Measures the links between GPUs: ``python -m headrace.service.gpu_measuring`` starts a process of this module for
each GPU, and prints what they found as JSON. See `headrace.service.gpu_links`.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from headrace.parallel.group import Group, TorchGroup
from headrace.parallel.push import PushGroup, open_push_group
from headrace.service.gpu_links import MEASURER, Link, Links, all_pairs

LARGE_BYTES, SMALL_BYTES = 256 << 20, 4096
PUSH_LOG = "headrace.parallel.push"
LARGE_ROUNDS, SMALL_ROUNDS, WARM_UP = 10, 200, 5


class Pair(TorchGroup):
    """A group of two that is only left with the process, as other pairs follow."""

    def close(self) -> None:
        """See `Group`."""


class LastMessage(logging.Handler):
    """Keeps the last message of a log in ``text``."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self.text = record.getMessage()


def measure_call(call: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Seconds of a call on a device, on average of several in a row."""
    for _ in range(WARM_UP):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record(torch.cuda.current_stream(device))
    for _ in range(rounds):
        call()
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / rounds


def measure_copies(a: int, b: int) -> tuple[float, float]:
    """Bytes a second of a large copy from one GPU to another, and seconds of a small one."""
    device = torch.device("cuda", a)
    source = torch.ones(LARGE_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros(LARGE_BYTES, dtype=torch.uint8, device=f"cuda:{b}")
    few = source[:SMALL_BYTES], target[:SMALL_BYTES]
    small_s = measure_call(lambda: few[1].copy_(few[0], non_blocking=True), SMALL_ROUNDS, device)
    large_s = measure_call(lambda: target.copy_(source, non_blocking=True), LARGE_ROUNDS, device)
    if not bool((target == 1).all()):
        raise RuntimeError(f"a copy from GPU {a} to GPU {b} arrived changed")
    return LARGE_BYTES / large_s, small_s


def measure_sums(group: Group, device: torch.device) -> tuple[float, float]:
    """Bytes a second of a large all-reduce, and seconds of a small one."""
    large = torch.zeros(LARGE_BYTES // 2, dtype=torch.bfloat16, device=device)
    small = torch.zeros(1, SMALL_BYTES // 2, dtype=torch.bfloat16, device=device)
    large_s = measure_call(lambda: group.all_reduce(large), LARGE_ROUNDS, device)
    return LARGE_BYTES / large_s, measure_call(lambda: group.all_reduce(small), SMALL_ROUNDS, device)


def measure_pair(a: int, b: int, rank: int, device: torch.device, process_group: dist.ProcessGroup) -> Link:
    """Measure the link between GPUs ``a`` and ``b``; both processes of the pair call it."""
    base = Pair(0 if rank == a else 1, 2, device, process_group)
    reduce_rate, reduce_s = measure_sums(base, device)
    log = LastMessage()
    logging.getLogger(PUSH_LOG).addHandler(log)
    pushed, push_us, problem = open_push_group(base, device), None, ""
    logging.getLogger(PUSH_LOG).removeHandler(log)
    if isinstance(pushed, PushGroup):
        small = torch.zeros(1, SMALL_BYTES // 2, dtype=torch.bfloat16, device=device)
        push_us = 1e6 * measure_call(lambda: pushed.all_reduce(small), SMALL_ROUNDS, device)
    else:
        problem = log.text
    dist.barrier(process_group, device_ids=[device.index])
    copy_rate, copy_s = measure_copies(a, b) if rank == a else (0.0, 0.0)
    dist.barrier(process_group, device_ids=[device.index])
    pushed.close()
    return Link(
        a, b, torch.cuda.can_device_access_peer(a, b), copy_rate / 1e9, 1e6 * copy_s, reduce_rate / 1e9, 1e6 * reduce_s,
        push_us, problem,
    )


def measure_rank(rank: int, size: int, folder: Path) -> None:
    """The process of one GPU: takes part in its pairs, writes the links that it leads."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    links = []
    for a, b in all_pairs(size):
        process_group = dist.new_group([a, b])  # by all processes
        if rank in (a, b):
            link = measure_pair(a, b, rank, device, process_group)
            if rank == a:
                links.append(link)
    (folder / f"links-{rank}").write_bytes(msgspec.json.encode(links))


def start_ranks(count: int, folder: Path) -> None:
    """A process for each GPU; raises `RuntimeError` when one fails, and ends the others."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", MEASURER, "--rank", str(rank), str(count), str(folder)], stdout=sys.stderr
        )
        for rank in range(count)
    ]
    try:
        while any(process.poll() is None for process in processes):
            for rank, process in enumerate(processes):
                if process.poll():
                    raise RuntimeError(f"the process of GPU {rank} ended with code {process.returncode}")
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()


def main() -> None:
    """Print the links, or with ``--rank`` be the process of one GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", nargs=3, metavar=("RANK", "SIZE", "FOLDER"))
    arguments = parser.parse_args()
    if arguments.rank:
        rank, size, folder = arguments.rank
        measure_rank(int(rank), int(size), Path(folder))
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(gpu) for gpu in range(count)]
    links: list[Link] = []
    if count > 1:
        with tempfile.TemporaryDirectory() as folder:
            start_ranks(count, Path(folder))
            for gpu in range(count):
                links += msgspec.json.decode((Path(folder) / f"links-{gpu}").read_bytes(), type=list[Link])
    sys.stdout.buffer.write(msgspec.json.encode(Links(names, links)))
    sys.stdout.flush()


if __name__ == "__main__":
    main()

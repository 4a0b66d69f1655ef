"""Start-stop cycles of small groups of ranks, and what they leave behind.

``python tests/service/cycles.py --cycles 1000``

Every fifth group fails at its start, every seventh loses a worker while it works, and every third is on two hosts (of
this machine). ``--model FOLDER`` takes engines with two real ranks, from `LLM`, instead of groups of fakes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import queue
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from headrace.base.config import EngineConfig, engine_config
from headrace.base.errors import HeadraceError

PATIENCE_S = 60.0
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Holdings:
    """What this process holds. ``memfds``: descriptors and mappings of our shared memory. ``segments``: files in
    /dev/shm of the whole machine that are ours."""

    processes: int
    threads: int
    descriptors: int
    memfds: int
    segments: int
    ports: int

    @classmethod
    def count(cls) -> Holdings:
        """As of now."""
        me, own = psutil.Process(), f"/proc/{os.getpid()}/fd"
        names = []
        for entry in os.listdir(own):
            with contextlib.suppress(OSError):  # that of the listing itself
                names.append(os.readlink(f"{own}/{entry}"))
        maps = [entry.path for entry in me.memory_maps(grouped=False)]
        return cls(
            len(me.children(recursive=True)), threading.active_count(), me.num_fds(),
            sum("headrace-" in name for name in [*names, *maps]),
            sum("headrace" in name for name in os.listdir("/dev/shm")),
            sum(c.status == psutil.CONN_LISTEN for c in me.net_connections("tcp")),
        )


@dataclass(frozen=True)
class Report:
    """``growth_bytes``: of this process's memory, per cycle of the second half."""

    before: Holdings
    after: Holdings
    cycles: int
    seconds: float
    growth_bytes: float

    @property
    def is_clean(self) -> bool:
        """Whether nothing is left."""
        return self.before == self.after


def run_cycles(cycles: int, cycle: Callable[[int], None], note: Callable[[int], None] = lambda _: None) -> Report:
    """``cycle`` gets its number; the first ones settle what is made once, and are not counted."""
    warm_up = min(8, cycles)
    for number in range(warm_up):
        cycle(number)
    before, memory, began = settle(), [], time.monotonic()
    for number in range(cycles):
        cycle(number)
        memory.append(psutil.Process().memory_info().rss)
        note(number)
    half = memory[len(memory) // 2 :]
    return Report(before, settle(before), cycles, time.monotonic() - began, (half[-1] - half[0]) / max(1, len(half)))


def settle(expected: Holdings | None = None) -> Holdings:
    """What is held once threads that are just ending have ended."""
    deadline = time.monotonic() + 5.0
    while True:
        gc.collect()
        found = Holdings.count()
        if found == expected or time.monotonic() > deadline or expected is None:
            return found
        time.sleep(0.05)


class FakeGroups:
    """Cycles of groups of fakes, in a folder of their own."""

    def __init__(self, folder: Path):
        self._folder = folder
        (folder / "config.json").write_text(json.dumps({"architectures": ["Fake"]}))
        (folder / "token").write_text("0123456789abcdef")

    def cycle(self, number: int) -> None:
        """One group: start, a command, end."""
        revision = "raises" if number % 5 == 4 else None
        config = engine_config(
            model=str(self._folder), skip_tokenizer=True, load_format="dummy", tensor_parallel_size=2, revision=revision
        )
        try:
            if number % 3 == 2:
                self._run_on_hosts(config)
            else:
                self._run(config, dies=number % 7 == 6)
        except HeadraceError as error:
            assert revision and "tensor" in error.message, error
        for path in self._folder.glob("rank-*"):
            path.unlink()

    def _run(self, config: EngineConfig, *, dies: bool) -> None:
        from fakes import start_ranks

        failures: queue.SimpleQueue[HeadraceError] = queue.SimpleQueue()
        _, executor = start_ranks(config, on_failure=failures.put)
        executor.reset()
        if dies:
            next(c for c in psutil.Process().children() if "headrace.service.ranks.worker" in c.cmdline()).kill()
            failures.get(timeout=PATIENCE_S)
        executor.close()

    def _run_on_hosts(self, config: EngineConfig) -> None:
        from fakes import RecordingExecutor

        from headrace.service.ranks.agent import NodeAgent
        from headrace.service.ranks.executor import RankedExecutor
        from headrace.service.ranks.nodes import NodeLauncher
        from headrace.service.ranks.workers import Workers

        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = probe.getsockname()[1]
        nodes = replace(
            config.nodes, nnodes=2, master_addr=HOST, master_port=port, node_token_file=str(self._folder / "token")
        )
        config = replace(config, nodes=nodes)
        agent = NodeAgent(replace(config, nodes=replace(nodes, node_rank=1)), join_s=PATIENCE_S)

        def serve() -> None:
            with contextlib.suppress(HeadraceError):  # of a start that fails, which rank 0 tells
                agent.run()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            launcher = NodeLauncher(config, 2, lambda *_: None, "fakes:build_fake_rank")
            workers = Workers(config, 2, launcher, on_failure=lambda _: None)
            try:
                workers.assign(1)
                workers.await_ready()
                executor = RankedExecutor(RecordingExecutor(config, 0), workers, ExitStack())
                executor.reset()
            finally:
                workers.close()
        finally:
            thread.join(PATIENCE_S)


def cycle_engines(folder: str) -> Callable[[int], None]:
    """Cycles of `LLM` with two ranks of a model."""
    from headrace import LLM, SamplingParams

    def cycle(_: int) -> None:
        options = {"load_format": "dummy", "skip_tokenizer": True, "device": "cpu", "dtype": "float32", "kv_pages": 64}
        with LLM(folder, tensor_parallel_size=2, **options) as llm:
            llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=4, ignore_eos=True))

    return cycle


def main() -> int:
    """Print a line for every hundred cycles and the report; 1 if something is left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--model", help="folder with a config.json, for real ranks")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))

    def note(number: int) -> None:
        if number % 100 == 99:
            print(f"{number + 1} cycles: {asdict(Holdings.count())}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        cycle = cycle_engines(arguments.model) if arguments.model else FakeGroups(Path(folder)).cycle
        report = run_cycles(arguments.cycles, cycle, note)
    print(json.dumps({**asdict(report), "is_clean": report.is_clean}, indent=2))
    return 0 if report.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())

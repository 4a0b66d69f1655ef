"""Where the time of a decode step goes: an engine in this process, its parts wrapped in a stopwatch; then the same
model over HTTP, of whose time per token the step's is taken away.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.cpu_servers import headrace, run_server
from headrace.base import env
from headrace.serving.bench.options import serve_bench_options
from headrace.serving.bench.serve import run_serve_bench

NUM_STEPS = 24
CONTEXT = 256
ROWS = (1, 16)


class Stopwatch:
    """Time spent in wrapped functions, each without what it calls that is wrapped too."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._inner = [0.0]

    def reset(self) -> None:
        """Forget what was measured."""
        self.seconds.clear()
        self.calls.clear()

    def wrap(self, owner: object, name: str, label: str) -> None:
        """Measure ``owner.name`` under ``label``; nothing when there is no such function."""
        function = getattr(owner, name, None)
        if callable(function):
            setattr(owner, name, self.timed(function, label))

    def timed(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        """``function``, measured."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                whole = time.perf_counter() - began
                self.seconds[label] += whole - self._inner.pop()
                self.calls[label] += 1
                self._inner[-1] += whole

        return run


def wrap_engine(watch: Stopwatch, engine: Any) -> None:
    """Measure the parts of a step."""
    from headrace.execution import runner as runner_module

    runner, scheduler = engine.executor._runner, engine._scheduler
    watch.wrap(scheduler, "plan", "scheduler: plan")
    watch.wrap(scheduler, "commit", "scheduler: commit")
    watch.wrap(engine.executor, "execute", "runner: the rest")
    for name in ("pack", "build"):
        watch.wrap(runner._inputs, name, f"inputs: {name}")
    for backend in runner._backends:
        watch.wrap(backend, "prepare", "attention: prepare")
        watch.wrap(backend, "attend", "attention: attend")
    watch.wrap(runner._sampler, "pack", "sampling: pack")
    watch.wrap(runner._sampler, "sample", "sampling: sample")
    watch.wrap(runner_module.PendingSample, "result", "result: read")
    wrap_model(watch, runner._model)


def wrap_model(watch: Stopwatch, model: Any) -> None:
    """Measure a decoder's layers; what other models have is in "model: the rest"."""
    watch.wrap(model, "forward", "model: the rest")
    watch.wrap(model, "compute_logits", "head")
    watch.wrap(getattr(model, "embedding", None), "forward", "embedding")
    watch.wrap(getattr(model, "norm", None), "add", "last norm")
    watch.wrap(getattr(model, "_table", None), "run", "fused layers")
    watch.wrap(getattr(model, "_decodes", None), "run", "fused step")
    for layer in getattr(model, "layers", ()):
        attention, mlp = getattr(layer, "attention", None), getattr(layer, "mlp", None)
        for norm in (getattr(layer, "attention_norm", None), getattr(layer, "mlp_norm", None)):
            watch.wrap(norm, "add", "norms")
        watch.wrap(attention, "_rope_write", "rope and write")
        for branch, names in ((attention, ("qkv", "output")), (mlp, ("gate_up", "down"))):
            for name in names:
                for method in ("forward", "add_to"):
                    watch.wrap(getattr(branch, name, None), method, f"linear: {name}")
        watch.wrap(mlp, "_activate", "activation")


def engine_config(model: str, flags: list[str]) -> Any:
    """The configuration that the flags of ``headrace serve`` make."""
    from headrace.serving.cli.commands import COMMANDS
    from headrace.serving.cli.flags import parse_command
    from headrace.serving.cli.serve import serve_config

    return serve_config(parse_command(COMMANDS["serve"], ["--model", model, "--device", "cpu", *flags])).engine


def profile_steps(config: Any, rows: int, *, fused: bool) -> tuple[Stopwatch, list[float]]:
    """Decode steps of ``rows`` requests with `CONTEXT` tokens each; the stopwatch, and seconds of each step without it.
    ``fused``: layers may run in one native call."""
    from headrace.base.messages import EngineRequest
    from headrace.base.sampling import SamplingSpec, StopSpec
    from headrace.service.build import build_engine

    engine, watch, steps = build_engine(config), Stopwatch(), []
    if not fused:
        decoder = engine.executor._runner._model
        decoder._table, decoder._decodes, decoder._is_table_due = None, None, False
    try:
        for i in range(rows):
            prompt = [(1000 + 37 * i + 11 * j) % 20000 for j in range(CONTEXT)]
            engine.submit(EngineRequest(str(i), prompt, SamplingSpec(), StopSpec(max_tokens=3 * NUM_STEPS)))
        while engine.stats().generation_tokens_total < 4 * rows:
            engine.step()
        for _ in range(NUM_STEPS):
            began = time.perf_counter()
            engine.step()
            steps.append(time.perf_counter() - began)
        wrap_engine(watch, engine)
        step = watch.timed(engine.step, "engine: the rest")
        for _ in range(NUM_STEPS):
            step()
        return watch, steps
    finally:
        engine.close()


def profile_http(model: str, dtype: str, flags: list[str], rows: int) -> tuple[float, list[float]]:
    """Seconds per output token of ``rows`` streams over HTTP, and seconds of processor time per step of each
    process."""
    output_len = 64
    with run_server(headrace(model, ["--dtype", dtype, *flags])) as running:
        load = {
            "num_requests": rows, "concurrency": rows, "input_len": str(CONTEXT), "output_len": str(output_len),
            "ignore_eos": True
        }
        run_serve_bench(serve_bench_options(base_url=running.base_url, **(load | {"output_len": "2"})))
        before = running.cpu_s()
        report = run_serve_bench(serve_bench_options(base_url=running.base_url, warmup=0, **load))
        spent = [(b - a) / output_len for a, b in zip(before, running.cpu_s(), strict=True)]
    return report.latencies["tpot_ms"].mean / 1e3, spent


def print_profile(model: str, dtype: str, flags: list[str]) -> None:
    """A table for each number of requests."""
    env.set_passive_waiting()
    from headrace.kernels import native

    print("own kernels:", native.build().detail)  # else the first engine would do without them
    config = engine_config(model, ["--dtype", dtype, *flags])
    for rows in ROWS:
        separate = statistics.median(profile_steps(config, rows, fused=False)[1])
        watch, steps = profile_steps(config, rows, fused=True)
        measured = sum(watch.seconds.values()) / NUM_STEPS
        print(
            f"\n{rows} requests of {CONTEXT} tokens: {statistics.median(steps) * 1e3:.2f} ms a step (median), "
            f"{measured * 1e3:.2f} ms under the stopwatch; separate operators: {separate * 1e3:.2f} ms"
        )
        for label, seconds in sorted(watch.seconds.items(), key=lambda item: -item[1]):
            print(
                f"  {label:22} {seconds / NUM_STEPS * 1e3:8.3f} ms {100 * seconds / NUM_STEPS / measured:5.1f} %  "
                f"{watch.calls[label] / NUM_STEPS:5.1f} calls"
            )
        per_token, spent = profile_http(model, dtype, flags, rows)
        print(
            f"  over HTTP: {per_token * 1e3:.2f} ms a token; processor time per step: "
            + ", ".join(f"{s * 1e3:.2f} ms" for s in spent) + " (HTTP process, engine)"
        )

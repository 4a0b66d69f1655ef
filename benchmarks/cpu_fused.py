"""Decode steps on a CPU with all layers fused in one call and as separate operators, in turns: ``python -m
benchmarks.cpu_fused MODEL [--rows 1,4,16] [flags of serve]``.

``benchmarks/models/mixture-small --load-format dummy --quantization int4`` is a mixture of experts with random weights.
Milliseconds a step, the least and the median; the first two steps of each turn do not count.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time

import torch

from benchmarks.cpu_profile import engine_config
from headrace.base import env
from headrace.base.messages import EngineRequest
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.kernels import native
from headrace.service.build import build_engine

CONTEXT, TURNS, STEPS = 256, 24, 8


def measure(model: str, flags: list[str], rows: int) -> dict[str, list[float]]:
    """Seconds of steps of ``rows`` requests, by how layers were called."""
    engine, rng = build_engine(engine_config(model, ["--max-model-len", "2048", *flags])), random.Random(0)
    decoder = engine.executor._runner._model
    found: dict[str, list[float]] = {"separate": [], "fused": []}
    try:
        for i in range(rows):
            prompt = [rng.randrange(3, 20_000) for _ in range(CONTEXT)]
            engine.submit(
                EngineRequest(
                    str(i), prompt, SamplingSpec(temperature=1.0, seed=i), StopSpec(max_tokens=2 * TURNS * STEPS)
                )
            )
        while engine.stats().generation_tokens_total < 4 * rows:
            engine.step()
        table, decodes = decoder._table, decoder._decodes
        if table is None:
            raise SystemExit(f"the layers of {model} are not fused")
        for turn in range(TURNS):
            way = list(found)[turn % 2]
            decoder._table, decoder._decodes = (table, decodes) if way == "fused" else (None, None)
            for i in range(STEPS):
                began = time.perf_counter()
                engine.step()
                found[way] += [time.perf_counter() - began] if i > 1 else []
    finally:
        engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_fused", description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,4,16")
    options, flags = parser.parse_known_args()
    env.set_passive_waiting()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    native.build()
    print(
        f"{native.select_isa()}, {torch.get_num_threads()} threads, torch {torch.__version__}, load "
        f"{os.getloadavg()[0]:.1f}"
    )
    for rows in map(int, options.rows.split(",")):
        for way, seconds in measure(options.model, flags, rows).items():
            print(
                f"{rows:3} rows {way:12} {1e3 * min(seconds):8.2f} ms ({1e3 * statistics.median(seconds):.2f})",
                flush=True
            )


if __name__ == "__main__":
    main()

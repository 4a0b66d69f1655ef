"""Other models' shapes on one GPU: ``python -m benchmarks.cuda_shapes [MODEL[:FORM] ...] [--cells ...]``.

`benchmarks.forms` has the names of models; weights are random. Each runs in a process of its own. A cell's row has
seconds of its first run and of a second, and the percent of these that bytes and operations alone would take
(`benchmarks/roofline.py`); cells that do not fit into a model's context are left out. Start-up is seconds to the first
token; "late" are kernels compiled after it. Rows of a model of which kernels could not be compiled or loaded are
marked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from random import Random
from typing import Any

BEGAN = time.time()
MARGIN = 1000


CELLS = {
    "latency1": (1, 512, 256), "decode8": (8, 512, 128), "decode64": (64, 512, 128), "decode256": (256, 128, 128),
    "prefill4x8k": (4, 8192, 1), "long1x30k": (1, 30720, 64),
}
"""Requests, tokens of each prompt, tokens of each output."""
DEFAULT = ("latency1", "decode64", "decode256", "prefill4x8k", "long1x30k")


def watch_compiler() -> list[str]:
    """Names of kernels, as Triton compiles them from now on."""
    from triton import knobs

    names: list[str] = []
    knobs.compilation.listener = lambda metadata, cache_hit, **_: None if cache_hit else names.append(metadata["name"])
    return names


def measure(model: str, cells: list[str], options: dict[str, Any]) -> None:
    """Print a row a cell."""
    from benchmarks.cuda import run_workload
    from benchmarks.fallbacks import MARK, has_fallen_back
    from benchmarks.forms import build, find_form, read_config
    from benchmarks.roofline import Shape, floor_of

    config, form = read_config(model), find_form(model)
    shape, vocab = Shape.of(config), config["vocab_size"]
    with build(model, options) as llm:
        run_workload(llm, [[1, 2, 3]], [1])
        startup, late = time.time() - BEGAN, watch_compiler()
        print(f"{model:24s} {'start-up':12s} {startup:8.2f}", flush=True)
        for cell in cells:
            requests, prompt_len, output_len = CELLS[cell]
            rng, output_lens = Random(requests), [output_len] * requests
            prompts = [[rng.randrange(MARGIN, vocab - MARGIN) for _ in range(prompt_len)] for _ in range(requests)]
            if prompt_len + output_len > llm.facts.max_model_len:
                continue
            first, seconds = (run_workload(llm, prompts, output_lens) for _ in range(2))
            floor = floor_of(shape, prompts, output_lens, form.costs).seconds
            print(
                f"{model:24s} {cell:12s} {first:8.3f} {seconds:8.3f} {floor:8.3f} {100 * floor / seconds:4.0f} %",
                MARK if has_fallen_back(llm) else "", flush=True
            )
        print(f"{model:24s} {'late':12s} {len(late):4d} {' '.join(sorted(set(late)))[:300]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="*",
        default=["llama-3.2-1b", "qwen2.5-7b", "gemma-3-1b", "phi-3-mini", "qwen3-30b-a3b", "gpt-oss-20b"],
        metavar="MODEL[:FORM]"
    )
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=DEFAULT)
    parser.add_argument("--options", type=json.loads, default={}, help="JSON object of engine options")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        return measure(args.models[0], args.cells, args.options)
    for model in args.models:
        command = [
            sys.executable, "-m", "benchmarks.cuda_shapes", model, "--here", "--options", json.dumps(args.options),
            "--cells", *args.cells
        ]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"{model}: exit {done.returncode}\n{done.stderr[-2500:]}", flush=True)


if __name__ == "__main__":
    main()

"""All workloads on one GPU against the stored peers' figures: ``python -m benchmarks.cuda [--models MODEL[:FORM] ...]
[--json FILE]``. `benchmarks.forms` has the names.

Prints a row a cell: seconds of the first run and of later ones (which differ where something was not made ready at the
start), ratio to the better peer, the roofline floor and how much of it is reached. Start-up is measured from process
start to the first token, in a process of its own. The prefix cache is emptied before each run. Rows of a model of which
kernels could not be compiled or loaded are marked, and not compared with anything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.fallbacks import MARK, has_fallen_back
from benchmarks.forms import build, find_form, read_config
from benchmarks.roofline import Shape, floor_of
from headrace.serving.bench import offline as workloads

HERE = Path(__file__).parent
PEERS = json.loads((HERE / "peers_h200.json").read_text())
STARTED = "first token at"


def measure_startup(name: str, options: dict[str, Any]) -> float:
    """Seconds from starting a Python process to its first generated token."""
    began = time.time()
    command = [sys.executable, "-m", "benchmarks.cuda", "--startup-child", name, "--options", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    for line in done.stdout.splitlines():
        if line.startswith(STARTED):
            return float(line.split()[-1]) - began
    raise RuntimeError(f"start-up child failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def run_startup_child(name: str, options: dict[str, Any]) -> None:
    from headrace import SamplingParams

    with build(name, options) as llm:
        llm.generate(
            prompt_token_ids=[[1, 2, 3]], sampling_params=SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        )
        print(STARTED, time.time(), flush=True)


def run_workload(llm: Any, prompts: list[list[int]], output_lens: list[int]) -> float:
    """Seconds for one pass with an empty prefix cache."""
    from headrace import SamplingParams

    llm.reset_prefix_cache()
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in output_lens]
    began = time.perf_counter()
    outs = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    seconds = time.perf_counter() - began
    assert [len(o.outputs[0].token_ids) for o in outs] == output_lens
    return seconds


def make_workload(name: str, vocab_size: int, copies: int) -> workloads.Workload:
    """So many times the requests of a workload, each time with other tokens."""
    make = workloads.ALL[name]
    parts = [make(vocab_size), *(make(vocab_size, seed=100 + copy) for copy in range(1, copies))]
    return [prompt for prompts, _ in parts for prompt in prompts], [length for _, lens in parts for length in lens]


def measure_model(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    config, form = read_config(name, args.options), find_form(name)
    shape, rows = Shape.of(config), []
    peers = PEERS["seconds"].get(name, {}) if args.copies == 1 else {}
    if args.startup:
        seconds = measure_startup(name, args.options)
        rows.append(
            row(
                name, "start-up", seconds,
                min((p[name] for p in PEERS["startup_s"].values() if name in p), default=None), None
            )
        )
        print(rows[-1], flush=True)
    with build(name, args.options) as llm:
        print(
            "\n".join(f"{line.name:24s} {line.num_bytes / 2**30:8.2f} GiB  {line.note}" for line in llm.memory_plan()),
            flush=True
        )
        for workload in args.workloads:
            prompts, output_lens = make_workload(workload, config["vocab_size"], args.copies)
            run_workload(llm, prompts[:8], [min(4, n) for n in output_lens[:8]])
            first, *later = (run_workload(llm, prompts, output_lens) for _ in range(args.repeats))
            floor = floor_of(shape, prompts, output_lens, form.costs)
            peer = min(peers.get(workload, {}).values(), default=None)
            rows.append(
                row(name, workload, statistics.mean(later or [first]), peer, floor.seconds) | {"first": round(first, 4)}
            )
            print(mark(rows[-1]) if has_fallen_back(llm) else rows[-1], flush=True)
        if has_fallen_back(llm):
            rows = [mark(own) for own in rows]
    return rows


def row(model: str, cell: str, seconds: float, peer: float | None, floor: float | None) -> dict[str, Any]:
    return {
        "model": model, "cell": cell, "seconds": round(seconds, 4), "better_peer": peer,
        "times_faster": round(peer / seconds, 2) if peer else None,
        "floor": round(floor, 4) if floor else None,
        "percent_of_floor": round(100 * floor / seconds) if floor else None,
    }


def mark(own: dict[str, Any]) -> dict[str, Any]:
    """A row of seconds that are of other kernels than they should be."""
    return own | {"model": f"{own['model']} {MARK}", "times_faster": None, "percent_of_floor": None}


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = {
        "first": 9, "seconds": 9, "better_peer": 11, "times_faster": 12, "floor": 8, "percent_of_floor": 16
    }
    print(f"\n{'model':24s} {'cell':14s}" + "".join(f" {name:>{width}}" for name, width in columns.items()))
    for r in rows:
        cells = "".join(f" {'-' if r.get(k) is None else r[k]:>{width}}" for k, width in columns.items())
        print(f"{r['model']:24s} {r['cell']:14s}{cells}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--models", nargs="+", default=["qwen3-0.6b", "llama-3.1-8b"], metavar="MODEL[:FORM]"
    )
    parser.add_argument("--workloads", nargs="+", default=list(workloads.ALL), choices=list(workloads.ALL))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--copies", type=int, default=1, help="times the requests of each workload: one a replica")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON object of engine options")
    parser.add_argument("--no-startup", dest="startup", action="store_false")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--startup-child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.startup_child:
        return run_startup_child(args.startup_child, args.options)
    rows = [r for name in args.models for r in measure_model(name, args)]
    print_table(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

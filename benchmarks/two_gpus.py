"""Models on two GPUs beside vLLM's figures, what of it is communication, and two replicas: ``python -m
benchmarks.two_gpus [--seconds 400]``.

Each cell is a process of its own with random weights (`benchmarks.cuda`, `benchmarks.cuda_trace`). Cells come in order
of importance, and those that no time is left for are skipped and named. The table comes last.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cuda import run_workload
from benchmarks.forms import build, read_config
from headrace.serving.bench import offline as workloads

PEER = "vLLM, two GPUs"
PEER_SECONDS = {
    "llama-3.1-8b": {"latency1": 0.901, "offline256": 8.99, "prefill16x8k": 2.01, "sharedprefix": 1.166},
    "llama-3.3-70b": {"latency1": 5.499, "offline256": 52.2},
    "qwen3-30b-a3b": {"latency1": 1.07, "offline256": 15.9, "prefill16x8k": 1.55},
}
"""vLLM 0.24.0 on two H200, linked by NVLink, bfloat16, random weights, mean of two runs after warm-up."""
COMMUNICATION = re.compile(r"^sum_|^sent_|^gather|nccl", re.IGNORECASE)
LEAST_SECONDS = 40
"""A cell is not begun with less time left."""


@dataclass
class Run:
    """One process. ``kind``: cuda (a row a workload), trace (the share of communication), replicas."""

    kind: str
    model: str
    workloads: list[str]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def way(self) -> str:
        """As the table names it."""
        names = {"tensor_parallel_size": "TP", "data_parallel_size": "DP"}
        sizes = "".join(f"{name} {self.options[key]}" for key, name in names.items() if key in self.options)
        return f"{sizes} EP" if self.options.get("enable_expert_parallel") else sizes or "one GPU"


TP = {"tensor_parallel_size": 2}
RUNS = [
    Run("cuda", "llama-3.1-8b", ["latency1", "prefill16x8k", "sharedprefix", "offline256"], TP),
    Run("cuda", "qwen3-30b-a3b", ["latency1", "prefill16x8k", "offline256"], TP),
    Run("cuda", "qwen3-30b-a3b", ["latency1", "prefill16x8k", "offline256"], {**TP, "enable_expert_parallel": True}),
    Run("trace", "llama-3.1-8b", ["latency1"], TP),
    Run("trace", "qwen3-30b-a3b", ["latency1"], TP),
    Run("replicas", "llama-3.1-8b", ["offline256"]),
    Run("replicas", "llama-3.1-8b", ["offline256"], {"data_parallel_size": 2}),
    Run("trace", "llama-3.1-8b", ["offline256"], TP),
    Run("cuda", "llama-3.3-70b", ["latency1", "offline256"], TP),
]


def measure(run: Run, limit: float) -> Iterator[dict[str, Any]]:
    """The rows of a run; raises `subprocess.SubprocessError`."""
    with tempfile.TemporaryDirectory() as folder:
        path, options = Path(folder) / "rows.json", json.dumps(run.options)
        command = {
            "cuda": ["benchmarks.cuda", "--models", run.model, "--workloads", *run.workloads, "--repeats", "1"],
            "trace": ["benchmarks.cuda_trace", run.model, *run.workloads, "--most-tokens", "32"],
            "replicas": ["benchmarks.two_gpus", "--replicas", run.model],
        }[run.kind]
        if run.kind == "cuda" and run.model != "llama-3.1-8b":
            command.append("--no-startup")
        command = [sys.executable, "-m", *command, "--options", options, "--json", str(path)]
        subprocess.run(command, check=True, timeout=limit, stdout=sys.stderr)
        made = json.loads(path.read_text())
    about = {"model": run.model, "way": run.way}
    if run.kind == "cuda":
        for row in made:
            peer = PEER_SECONDS[run.model].get(row["cell"])
            yield {**about, "cell": row["cell"], "value": f"{row['seconds']:.3f} s", "peer": peer and f"{peer:.3f} s"}
    elif run.kind == "trace":
        share = sum(own for name, *_, own in made["kernels"] if COMMUNICATION.search(name))
        busy = sum(own for *_, own in made["kernels"])
        cell = f"{made['workload']}: communication"
        yield {**about, "cell": cell, "value": f"{100 * share / busy:.1f} % of kernels' time", "peer": None}
    else:
        yield {**about, "cell": "offline256 a replica", "value": f"{made['seconds']:.3f} s", "peer": None}


def run_replicas(model: str, options: dict[str, Any], path: Path) -> None:
    """As many times the workload as there are replicas, which together should take as long as one does alone."""
    vocab = read_config(model)["vocab_size"]
    count = options.get("data_parallel_size", 1)
    parts = [workloads.ALL["offline256"](vocab, seed=seed) for seed in range(count)]
    prompts = [prompt for prompts, _ in parts for prompt in prompts]
    output_lens = [length for _, lengths in parts for length in lengths]
    with build(model, options) as llm:
        run_workload(llm, prompts[:8], [4] * 8)
        path.write_text(json.dumps({"seconds": run_workload(llm, prompts, output_lens)}))


def list_collectives(path: Path) -> Iterator[dict[str, Any]]:
    """Sums beside NCCL, of some sizes."""
    table = json.loads(path.read_text())["microseconds"]
    for size in ("8192", "65536", "524288", "4194304"):
        if line := table.get(size):
            own = min((line[name] for name in ("one step", "two steps") if name in line), default=None)
            told = "not served" if own is None else f"{own:.1f} us"
            yield {
                "model": "-", "way": "2 GPUs", "cell": f"all-reduce of {int(size) >> 10} KB", "value": told,
                "peer": f"{line['NCCL']:.1f} us (NCCL)",
            }


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"{'model':14} {'way':8} {'cell':26} {'here':>24} {PEER:>20}")
    for row in rows:
        print(f"{row['model']:14} {row['way']:8} {row['cell']:26} {row['value']:>24} {row['peer'] or '-':>20}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=400, help="for all cells together")
    parser.add_argument("--collectives", type=Path, help="what benchmarks.collectives wrote, for the table")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--replicas", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, default={}, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.replicas:
        return run_replicas(args.replicas, args.options, args.json)
    end, rows = time.monotonic() + args.seconds, []
    if args.collectives and args.collectives.exists():
        rows += list_collectives(args.collectives)
    for run in RUNS:
        about = {"model": run.model, "way": run.way, "cell": f"{run.kind}: {' '.join(run.workloads)}", "peer": None}
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            rows.append({**about, "value": "no time left"})
            continue
        try:
            rows += measure(run, left)
        except (subprocess.SubprocessError, OSError, KeyError) as error:
            rows.append({**about, "value": type(error).__name__})
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
    print_table(rows)


if __name__ == "__main__":
    main()

"""All workloads on one GPU against the stored peers' figures: ``python -m benchmarks.cuda [--models ...] [--json
FILE]``.

Prints a row a cell: seconds, ratio to the better peer, the roofline floor and how much of it is reached. Start-up is
measured from process start to the first token, in a process of its own. The prefix cache is emptied before each run.
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

from benchmarks.roofline import Shape, floor_of
from headrace.serving.bench import offline as workloads

HERE = Path(__file__).parent
PEERS = json.loads((HERE / "peers_h200.json").read_text())
STARTED = "first token at"


def model_folder(name: str) -> Path:
    return HERE / "models" / name


def build(name: str, options: dict[str, Any]) -> Any:
    from headrace import LLM

    return LLM(str(model_folder(name)), load_format="dummy", dtype="bfloat16", **options)


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


def measure_model(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    config = json.loads((model_folder(name) / "config.json").read_text())
    shape, rows = Shape.of(config), []
    peers = PEERS["seconds"].get(name, {})
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
            prompts, output_lens = workloads.ALL[workload](config["vocab_size"])
            run_workload(llm, prompts[:8], [min(4, n) for n in output_lens[:8]])
            seconds = statistics.mean(run_workload(llm, prompts, output_lens) for _ in range(args.repeats))
            floor = floor_of(shape, prompts, output_lens)
            rows.append(
                row(name, workload, seconds, min(peers.get(workload, {}).values(), default=None), floor.seconds)
            )
            print(rows[-1], flush=True)
    return rows


def row(model: str, cell: str, seconds: float, peer: float | None, floor: float | None) -> dict[str, Any]:
    return {
        "model": model, "cell": cell, "seconds": round(seconds, 4), "better_peer": peer,
        "times_faster": round(peer / seconds, 2) if peer else None,
        "floor": round(floor, 4) if floor else None,
        "percent_of_floor": round(100 * floor / seconds) if floor else None,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'model':14s} {'cell':14s} {'seconds':>9s} {'peer':>8s} {'faster':>7s} {'floor':>8s} {'% of floor':>10s}")
    for r in rows:
        cells = [
            ("-" if r[k] is None else r[k])
            for k in ("seconds", "better_peer", "times_faster", "floor", "percent_of_floor")
        ]
        print(
            f"{r['model']:14s} {r['cell']:14s} {cells[0]:>9} {cells[1]:>8} {cells[2]:>7} {cells[3]:>8} {cells[4]:>10}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--models", nargs="+", default=["qwen3-0.6b", "llama-3.1-8b"], help="folders under benchmarks/models"
    )
    parser.add_argument("--workloads", nargs="+", default=list(workloads.ALL), choices=list(workloads.ALL))
    parser.add_argument("--repeats", type=int, default=2)
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

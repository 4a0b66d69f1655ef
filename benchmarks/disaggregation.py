"""A prefill and a decode server beside one server that does both: ``python -m benchmarks.disaggregation``, on two GPUs.

Both with random weights, and a router before them. Clients stream outputs; in every other window of time long prompts
are sent beside them. Prints

- the first token of a long prompt when nothing else runs: what the pair takes longer is the way of its pages
- gaps between the tokens of the streams, in windows without long prompts and beside them: they alternate, as gaps grow
  with the streams' contexts
- kernels that were compiled while a step waited

With ``--output 2`` a long prompt has one decode behind its first token: what is left are its pages, without its context
among the decodes. ``--device cpu --transfer shared-memory --model tiny`` is a small model on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import shutil
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models

from benchmarks.cpu_servers import Server, headrace, run_server
from benchmarks.forms import model_folder
from headrace.serving.bench.connection import split_events
from headrace.serving.http_client import HttpClient, HttpResponse, loop_factory

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096,
    "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "bos_token_id": 1,
    "eos_token_id": 2, "torch_dtype": "bfloat16",
}
FIRST_ID = 1000
SHORT_TOKENS = 64
"""Of a stream's prompt."""
WARM_UP_S = 2.0
OUTCOMES = {"prefill": ("sent", "lost"), "decode": ("received", "lost")}


def write_model(name: str, folder: Path) -> int:
    """The configuration, and a tokenizer with a word for each token, so that each is an event of a stream; returns the
    vocabulary's size."""
    if name == "tiny":
        (folder / "config.json").write_text(json.dumps(TINY))
    else:
        shutil.copy(model_folder(name) / "config.json", folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer(models.BPE(vocab={f"w{i} ": i for i in range(size)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return size


@dataclass
class Prompts:
    """Random ones, of which no two begin alike."""

    vocab_size: int
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def body(self, num_tokens: int, max_tokens: int) -> bytes:
        """A request that streams."""
        prompt = [self._random.randrange(FIRST_ID, self.vocab_size) for _ in range(num_tokens)]
        return json.dumps({
            "model": "default", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True,
            "temperature": 1.0,
        }).encode()


class Client:
    """Sends requests to one address, and keeps when tokens come."""

    def __init__(self, base_url: str, prompts: Prompts):
        self._http, self._prompts = HttpClient(base_url, timeout_s=300), prompts
        self._streams: list[HttpResponse] = []

    async def send(self, body: bytes) -> float:
        """Seconds until the first token of a request, all of which are awaited."""
        began, response = time.perf_counter(), HttpResponse()
        await self._http.send("POST", "/v1/completions", body, response=response)
        arrivals = list(read_arrivals(response))
        assert response.status == 200 and arrivals, response.body[:600]
        return arrivals[0] - began

    async def stream(self, num_tokens: int) -> None:
        """One stream after the other, until this is cancelled."""
        while True:
            response = HttpResponse()
            self._streams.append(response)
            body = self._prompts.body(SHORT_TOKENS, num_tokens)
            await self._http.send("POST", "/v1/completions", body, response=response)
            assert response.status == 200, response.body[:600]

    def find_gaps(self, windows: Sequence[tuple[float, float]]) -> np.ndarray:
        """Milliseconds between the tokens of a stream, of those that came in these windows."""
        gaps = []
        for response in self._streams:
            arrivals = np.array(list(read_arrivals(response)))
            later = arrivals[1:, None]
            is_inside = np.logical_or.reduce([(later >= begin) & (later < end) for begin, end in windows])[:, 0]
            gaps.append(np.diff(arrivals)[is_inside])
        return np.concatenate(gaps) * 1e3

    def close(self) -> None:
        """Close its connections."""
        self._http.close()


def read_arrivals(response: HttpResponse) -> Iterator[float]:
    """When tokens came, by the events that have text."""
    for arrived, data in split_events(response.pieces):
        if data != b"[DONE]" and any(choice.get("text") for choice in json.loads(data).get("choices", ())):
            yield arrived


@dataclass
class Result:
    """Seconds until first tokens of long prompts, when nothing else runs and beside streams, and gaps of streams."""

    alone_s: list[float]
    beside_s: list[float]
    gaps_alone: np.ndarray
    gaps_beside: np.ndarray

    def figures(self) -> dict[str, float | None]:
        """Milliseconds: medians of first tokens (None: no prompt was sent), and percentiles of gaps."""
        firsts = {"alone": self.alone_s, "beside": self.beside_s}
        gaps = {"alone": self.gaps_alone, "beside": self.gaps_beside}
        return {
            **{f"first_{when}_ms": statistics.median(s) * 1e3 if s else None for when, s in firsts.items()},
            **{f"gap_{when}_p{p}_ms": float(np.percentile(ms, p)) for when, ms in gaps.items() for p in (50, 99)},
        }


async def measure(base_url: str, prompts: Prompts, args: argparse.Namespace) -> Result:
    """First tokens alone, then streams, by turns alone and beside long prompts. A window ends with the last of its
    prompts."""
    client = Client(base_url, prompts)
    each = max(1, round(args.seconds / args.windows / args.every))
    long_bodies = [prompts.body(args.prompt, args.output) for _ in range(args.alone + args.windows * each)]
    for tokens in (args.prompt, args.prompt, SHORT_TOKENS):
        await client.send(prompts.body(tokens, args.output))
    alone_s = [await client.send(long_bodies.pop()) for _ in range(args.alone)]
    streams = [asyncio.create_task(client.stream(args.tokens)) for _ in range(args.streams)]
    await asyncio.sleep(WARM_UP_S)
    times, beside_s = [time.perf_counter()], []
    for _ in range(args.windows):
        await asyncio.sleep(args.seconds / args.windows)
        times.append(time.perf_counter())
        sent = []
        for _ in range(each):
            sent.append(asyncio.create_task(client.send(long_bodies.pop())))
            await asyncio.sleep(args.every)
        beside_s += await asyncio.gather(*sent)
        times.append(time.perf_counter())
    failed = [task.exception() for task in streams if task.done()]
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    client.close()
    if failed:
        raise RuntimeError(f"a stream failed: {failed[0]}")
    windows = list(itertools.pairwise(times))
    return Result(alone_s, beside_s, client.find_gaps(windows[::2]), client.find_gaps(windows[1::2]))


def read_json(url: str) -> Any:
    """What an address answers."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read())


def count_events(base_url: str) -> dict[str, float]:
    """Of the servers behind a router, by their metrics: requests by role and outcome, and kernels compiled late."""
    found: dict[str, float] = {}
    for worker in read_json(f"{base_url}/workers")["workers"]:
        with urllib.request.urlopen(f"{worker['url']}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        role = worker["role"]
        outcomes = OUTCOMES.get(role, ())
        wanted = {f"headrace_transfer_{outcome}_requests_total": f"{role} {outcome}" for outcome in outcomes}
        wanted["headrace_late_kernels_total"] = "kernels compiled late"
        wanted["headrace_kernel_fallbacks_total"] = "kernels fallen back"
        for line in lines:
            name, _, value = line.partition(" ")
            key = wanted.get(name.partition("{")[0])
            if key is not None:
                found[key] = found.get(key, 0.0) + float(value)
    return found


def make_router(worker_url: str) -> Server:
    """A router before one server, so that both ways have the same hops."""
    command = ["-m", "headrace", "router", worker_url, "--log-level", "warning", "--port"]
    return Server("router", lambda port: [*headrace("", []).command(port)[:1], *command, str(port)], "/ready")


@contextlib.contextmanager
def run_pair(folder: str, flags: Sequence[str], args: argparse.Namespace) -> Iterator[str]:
    """The address of a pair."""
    backend = ["--disaggregate", args.pair, "--disaggregation-transfer-backend", args.transfer]
    with run_server(headrace(folder, [*flags, *backend]), patience_s=args.patience) as server:
        print(f"pair ready after {server.start_s:.1f} s", flush=True)
        yield server.base_url


@contextlib.contextmanager
def run_one(folder: str, flags: Sequence[str], args: argparse.Namespace) -> Iterator[str]:
    """The address of one server, on one GPU."""
    with run_server(headrace(folder, list(flags)), patience_s=args.patience) as server:
        print(f"one server ready after {server.start_s:.1f} s", flush=True)
        with run_server(make_router(server.base_url)) as router:
            yield router.base_url


def run(name: str, base_url: str, prompts: Prompts, args: argparse.Namespace) -> Result:
    """Measure one way and print it."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        result = runner.run(measure(base_url, prompts, args))
    counts = count_events(base_url)
    for cell, gaps in (("streams alone", result.gaps_alone), ("beside prompts", result.gaps_beside)):
        p50, p99 = np.percentile(gaps, (50, 99))
        print(f"{name:10} {cell:15} gaps: p50 {p50:7.2f} ms, p99 {p99:7.2f}, longest {gaps.max():7.1f}, of {len(gaps)}")
    told = ", ".join(
        f"{cell} {statistics.median(times) * 1e3:.1f} ms (least {min(times) * 1e3:.1f}, most {max(times) * 1e3:.1f})"
        for cell, times in (("alone", result.alone_s), ("beside streams", result.beside_s)) if times
    )
    ratio = np.percentile(result.gaps_beside, 99) / np.percentile(result.gaps_alone, 99)
    print(f"{name:10} p99 beside prompts / alone {ratio:.2f}; first token of {args.prompt}: {told}")
    print(f"{name:10} " + ", ".join(f"{key} {count:.0f}" for key, count in counts.items()), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="as in benchmarks.forms, or tiny")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--transfer", default="cuda-ipc", help="the transfer backend")
    parser.add_argument("--pair", default="1:1", help="prefill and decode servers")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4000, help="of a stream; another one follows")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of a long prompt")
    parser.add_argument("--output", type=int, default=8, help="tokens of the output behind a long prompt")
    parser.add_argument("--alone", type=int, default=7, help="long prompts when nothing else runs")
    parser.add_argument("--every", type=float, default=0.4, help="seconds between long prompts beside streams")
    parser.add_argument("--seconds", type=float, default=8.0, help="of streams alone, and of both, in all windows")
    parser.add_argument("--windows", type=int, default=4, help="of each kind")
    parser.add_argument("--patience", type=float, default=240.0, help="seconds for a start")
    parser.add_argument("--ways", nargs="+", default=["pair", "one"], choices=["pair", "one"])
    parser.add_argument("--json", type=Path, help="write the figures here")
    args, flags = parser.parse_known_args()
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as folder:
        prompts = Prompts(write_model(args.model, Path(folder)))
        flags = ["--load-format", "dummy", "--device", args.device, *flags]
        for way in args.ways:
            with (run_pair if way == "pair" else run_one)(folder, flags, args) as base_url:
                results[way] = run(way, base_url, prompts, args)
    if args.json:
        args.json.write_text(json.dumps({way: result.figures() for way, result in results.items()}, indent=1))
    if len(results) == 2:
        pair, one = (statistics.median(results[way].alone_s) * 1e3 for way in ("pair", "one"))
        print(f"first token of {args.prompt} tokens by the pair, beyond one server's: {pair - one:+.1f} ms")


if __name__ == "__main__":
    main()

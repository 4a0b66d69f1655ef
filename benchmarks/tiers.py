"""What pages in host memory cost and win: ``python -m benchmarks.tiers PART [--model NAME] [--options JSON]``.

``prefix``: a prompt back from the host against computing it, and the rate of copies against that of pinned memory.
``offload``: a workload of many prompts with and without (random weights; the cost of writing through). ``turns``:
conversations of many users whose prefixes are ``--pressure`` times the device's cache: tokens a second, and p50 and
p99 of the time to the first token, with and without; some at a time, or at the same rate of requests for both
(``--rate``), since what serves faster is asked more by users who wait for answers. Weights are random unless the
options say otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.serving.bench import offline as workloads

MODELS = Path(__file__).parent / "models"


def folder_of(model: str) -> str:
    return str(MODELS / model) if (MODELS / model).exists() else model


def draw_prompt(rng: Random, vocab: int, length: int) -> list[int]:
    return [rng.randrange(10, vocab - 10) for _ in range(length)]


def params(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)


def await_written(llm: LLM) -> None:
    """Until nothing is on its way to the host."""
    for _ in range(3):
        llm.generate([[1, 2, 3]], params(1))


def run_prefix(arguments: argparse.Namespace, options: dict[str, Any]) -> None:
    """Times of one request alone: computed, and back from the host."""
    length, rng = arguments.prompt_len, Random(1)
    page = options.setdefault("page_size", 64)
    options["kv_pages"] = 3 * -(-length // page) + 8
    with LLM(folder_of(arguments.model), skip_tokenizer=True, **options) as llm:
        vocab = llm.facts.vocab_size
        prompts = [draw_prompt(rng, vocab, length) for _ in range(8)]

        def time_one(prompt: list[int]) -> tuple[float, int]:
            began = time.perf_counter()
            output = llm.generate([prompt], params(1))[0]
            return time.perf_counter() - began, output.num_cached_tokens

        computed = [time_one(prompt)[0] for prompt in prompts]
        await_written(llm)
        back = [time_one(prompt) for prompt in prompts[:-3]]
        on_device = [time_one(prompts[-4])[0] for _ in range(4)]
        stats = llm.stats().tiers.host
        kv_bytes = next(line.num_bytes for line in llm.memory_plan() if line.name.startswith("KV"))
        page_bytes = kv_bytes / options["kv_pages"]
    compute_s, back_s = statistics.median(computed[1:]), statistics.median(seconds for seconds, _ in back)
    cached = min(count for _, count in back)
    gib = cached // page * page_bytes / 2**30
    print(
        f"prefix of {length}: computed {compute_s * 1e3:.1f} ms, back from the host {back_s * 1e3:.1f} ms "
        f"({compute_s / back_s:.1f} times as fast), on the device {min(on_device) * 1e3:.1f} ms; "
        f"{cached} tokens, {gib:.2f} GiB at {gib / back_s:.1f} GiB/s in all; "
        f"{stats}", flush=True
    )


def run_copies(arguments: argparse.Namespace, options: dict[str, Any]) -> None:
    """Rates of pinned copies and of the lanes, on a GPU."""
    import torch

    from headrace.base.cache import CacheGroup, CacheSpec
    from headrace.base.step import PageMove
    from headrace.memory.host import GpuHostLane, HostPages
    from headrace.memory.paging import PageCopier
    from headrace.memory.pools import build_pool

    device, page, count, layers = torch.device("cuda", 0), 64, 128, 32
    group = CacheGroup(CacheSpec("full", 8, 128, 128, "bfloat16"), list(range(layers)), count + 1, 0, count, 32)
    copier = PageCopier([build_pool(group, page, device)], device)
    width = copier.page_bytes(0)
    host = HostPages([group], [width], device)
    lane = GpuHostLane(host, [group], [width], device)
    lane.attach(copier)
    began = time.perf_counter()
    while not host.is_usable(0, [count - 1]):
        time.sleep(0.001)
    print(f"copies: registered {count * width / 2**30:.2f} GiB in {time.perf_counter() - began:.2f} s", flush=True)
    pinned, on_device = (
        torch.empty((count, width), dtype=torch.uint8, pin_memory=True),
        torch.empty((count, width), dtype=torch.uint8, device=device)
    )

    def rate(call: Callable[[], Any], num_bytes: int) -> float:
        times = []
        for _ in range(6):
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return num_bytes / min(times) / 1e9

    def read() -> None:
        lane.start(PageMove(1, 0, "host", "device", list(range(count)), list(range(1, count + 1))))

    def write() -> None:
        for begin in range(0, count, 32):
            numbers = list(range(begin, begin + 32))
            lane.start(PageMove(1, 0, "device", "host", [1 + n for n in numbers], numbers))
            torch.cuda.synchronize()
            lane.poll()

    total = count * width
    gather_rows = on_device[: count]
    rows = {
        "pinned to device": rate(lambda: on_device.copy_(pinned, non_blocking=True), total),
        "device to pinned": rate(lambda: pinned.copy_(on_device, non_blocking=True), total),
        "lane, host to device": rate(read, total), "lane, device to host": rate(write, total),
        "gather": rate(lambda: copier.gather(0, list(range(1, count + 1)), gather_rows, list(range(count))), total),
        "scatter": rate(lambda: copier.scatter(0, list(range(1, count + 1)), gather_rows, list(range(count))), total),
    }
    print(f"copies of {total / 2**30:.2f} GiB, GB/s: " + ", ".join(f"{k} {v:.1f}" for k, v in rows.items()), flush=True)


def run_offload(arguments: argparse.Namespace, options: dict[str, Any]) -> None:
    """One side: with ``host_cache_gb`` in the options, or without."""
    with LLM(folder_of(arguments.model), skip_tokenizer=True, **options) as llm:
        prompts, lengths = workloads.ALL[arguments.workload](llm.facts.vocab_size)
        prompts, lengths = prompts[: arguments.most], [min(n, arguments.output_len) for n in lengths][: arguments.most]
        times = []
        for _ in range(arguments.repeats):
            llm.reset_prefix_cache()
            began = time.perf_counter()
            llm.generate(prompt_token_ids=prompts, sampling_params=[params(n) for n in lengths])
            times.append(time.perf_counter() - began)
        print(
            f"{arguments.workload}, host_cache_gb {options.get('host_cache_gb', 0)}: "
            f"{', '.join(f'{t:.2f}' for t in times)} s; {llm.stats().tiers.host}", flush=True
        )


class Turns:
    """Who may begin a turn: so many at a time, or one whenever a request arrives, at random times of a mean rate, the
    same for the same seed. Users that wait are served in order."""

    def __init__(self, concurrency: int, rate: float, count: int):
        self._rate, self._count = rate, count
        self._arrived: asyncio.Queue[float | None] = asyncio.Queue()
        for _ in range(0 if rate else concurrency):
            self._arrived.put_nowait(None)

    async def arrive(self) -> None:
        """Let the requests arrive; returns at once without a rate."""
        rng, due = Random(0), time.perf_counter()
        for _ in range(self._count if self._rate else 0):
            due += rng.expovariate(self._rate)
            await asyncio.sleep(due - time.perf_counter())
            self._arrived.put_nowait(due)

    async def begin(self) -> float:
        """When the turn that begins now was asked for."""
        return await self._arrived.get() or time.perf_counter()

    def end(self) -> None:
        """A turn has ended."""
        if not self._rate:
            self._arrived.put_nowait(None)


async def converse(
    llm: AsyncLLM, rng: Random, vocab: int, arguments: argparse.Namespace, turns: Turns, firsts: list[list[float]]
) -> None:
    """One user: each turn sends all that was said before. ``firsts``: times to the first token of each turn."""
    known = draw_prompt(rng, vocab, arguments.prompt_len)
    for turn in range(arguments.turns):
        began, count = await turns.begin(), 0
        async for output in llm.generate({"prompt_token_ids": known}, params(arguments.output_len)):
            ids = output.outputs[0].token_ids
            if not count and ids:
                firsts[turn].append(time.perf_counter() - began)
            count = len(ids)
        turns.end()
        known = known + list(ids) + draw_prompt(rng, vocab, arguments.turn_len)


def describe_times(seconds: list[float]) -> str:
    """Their p50 and p99."""
    ordered = sorted(seconds)
    p50, p99 = (ordered[int(share * len(ordered))] * 1e3 for share in (0.5, 0.99))
    return f"p50 {p50:.0f} ms, p99 {p99:.0f} ms"


async def run_turns(arguments: argparse.Namespace, options: dict[str, Any]) -> None:
    """One side, as `run_offload`."""
    page = options.setdefault("page_size", 64)
    longest = arguments.prompt_len + arguments.turns * (arguments.output_len + arguments.turn_len)
    options["max_model_len"] = longest + page
    total = arguments.users * longest
    options["kv_pages"] = max(int(total / arguments.pressure / page), -(-2 * longest // page)) + 2
    async with AsyncLLM(folder_of(arguments.model), skip_tokenizer=True, **options) as llm:
        assert llm.facts is not None
        vocab, firsts = llm.facts.vocab_size, [list[float]() for _ in range(arguments.turns)]
        turns = Turns(arguments.concurrency, arguments.rate, arguments.users * arguments.turns)
        await asyncio.sleep(arguments.settle)
        began = time.perf_counter()
        await asyncio.gather(turns.arrive(), *(
            converse(llm, Random(user), vocab, arguments, turns, firsts) for user in range(arguments.users)
        ))
        seconds, stats = time.perf_counter() - began, await llm.stats()
    requests = arguments.users * arguments.turns
    load = f"{arguments.rate:g} requests/s" if arguments.rate else f"{arguments.concurrency} at a time"
    print(
        f"{arguments.users} users, {arguments.turns} turns, prefixes {total / ((options['kv_pages'] - 1) * page):.1f} "
        f"times the cache, host_cache_gb {options.get('host_cache_gb', 0)}, {load}: "
        f"{requests / seconds:.2f} requests/s, {stats.prompt_tokens_total / seconds:.0f} prompt tokens/s, first token "
        f"{describe_times([t for turn in firsts for t in turn])}, by turns "
        f"{'; '.join(describe_times(turn) for turn in firsts)}; from the third turn on, beside which no first runs, "
        f"{describe_times([t for turn in firsts[2:] for t in turn] or firsts[-1])}; cached "
        f"{stats.cached_tokens_total / stats.prompt_tokens_total:.0%}; {stats.tiers.host}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("prefix", "copies", "offload", "turns"))
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--options", default="{}", help="engine options as JSON")
    parser.add_argument("--host-gb", type=float, default=0.0)
    parser.add_argument("--workload", default="offline256")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--most", type=int, default=10**6, help="prompts of the workload")
    for name, default in (
        ("prompt_len", 8192), ("turn_len", 64), ("output_len", 32), ("turns", 3), ("users", 64), ("concurrency", 16)
    ):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--pressure", type=float, default=4.0)
    parser.add_argument("--rate", type=float, default=0.0, help="turns a second, at random times; 0: --concurrency")
    parser.add_argument("--settle", type=float, default=0.0, help="seconds in which memory is pinned, before turns")
    arguments = parser.parse_args()
    options = {"load_format": "dummy", "dtype": "bfloat16", **json.loads(arguments.options)}
    if arguments.host_gb:
        options["host_cache_gb"] = arguments.host_gb
    if arguments.part == "turns":
        asyncio.run(run_turns(arguments, options))
    else:
        {"prefix": run_prefix, "copies": run_copies, "offload": run_offload}[arguments.part](arguments, options)


if __name__ == "__main__":
    main()

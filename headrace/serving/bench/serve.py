"""``headrace bench serve``: load tests any server over HTTP and reports throughput and latency."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from headrace.base.errors import ConfigError
from headrace.serving.bench.connection import ServerConnection, Timing, read_stream
from headrace.serving.bench.options import LoadOptions, ServeBenchOptions
from headrace.serving.bench.report import Report, print_report, summarise, write_json
from headrace.serving.bench.traffic import TrafficRequest, make_traffic
from headrace.serving.http_client import loop_factory

DEFAULT_CONCURRENCY = 16
READ_AFTER_S = 0.01
"""Delay before a finished stream is parsed, so that the next request is sent first."""


def run_serve_bench(options: ServeBenchOptions, console: Console | None = None) -> Report:
    """Load test the server, print the report to ``console`` (None: print nothing) and write the output file if
    configured. Raises `ConfigError` for invalid options, a server that does not respond, or one that refuses every
    warm-up request."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        report, timings = runner.run(_measure(options, console))
    if options.load.output_file:
        details = {"requests": [describe(timing) for timing in timings]} if options.load.details else {}
        write_json(options.load.output_file, {**report.to_dict(), **details})
    if console:
        print_report(report, console)
    return report


def describe(timing: Timing) -> dict[str, Any]:
    """One request's measurements, in milliseconds."""
    described = {"latency_ms": timing.latency * 1e3, "ttft_ms": timing.ttft * 1e3 if timing.arrivals else None}
    counts = {name: getattr(timing, name) for name in ("prompt_tokens", "output_tokens", "cached_tokens", "error")}
    return {**described, **counts}


async def _measure(options: ServeBenchOptions, console: Console | None) -> tuple[Report, list[Timing]]:
    load, traffic = options.load, options.traffic
    as_text = options.target.endpoint == "chat"
    requests = make_traffic(traffic, load.num_requests, load.seed, as_text=as_text)
    if as_text and any(isinstance(request.prompt, list) and isinstance(request.prompt[0], int) for request in requests):
        raise ConfigError("the chat route takes text or messages; the trace has token ids", param="endpoint")
    async with ServerConnection(options.target, traffic) as server:
        await _warm_up(server, options, requests)
        if options.target.flush_cache:
            await server.flush_cache()
        before = await server.count_drafts()
        with _progress(console) as progress:
            task = progress.add_task("requests", total=len(requests))
            timings = await send_all(server.send, requests, load, lambda: progress.advance(task), read_stream)
        after = await server.count_drafts()
        described = {
            section: dataclasses.asdict(getattr(options, section)) for section in ("target", "load", "traffic")
        }
        described["target"].pop("api_key")  # the report may be shared
        report = summarise(timings, model=server.model, options=described)
        return dataclasses.replace(report, tokens_per_step=_tokens_per_step(before, after)), timings


def _tokens_per_step(before: tuple[float, float] | None, after: tuple[float, float] | None) -> float | None:
    """Output tokens per step of a request with drafts; None if the server verified none meanwhile."""
    if before is None or after is None or after[0] <= before[0]:
        return None
    return 1.0 + (after[1] - before[1]) / (after[0] - before[0])


def _progress(console: Console | None) -> Progress:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )
    return Progress(*columns, console=console, disable=console is None, transient=True)


async def _warm_up(server: ServerConnection, options: ServeBenchOptions, requests: list[TrafficRequest]) -> None:
    """Send requests like the measured ones but with other prompts, so that no measured prefix is cached. A trace is
    warmed up with its first requests, limited to one output token."""
    count = options.load.warmup
    if options.traffic.workload == "trace":
        warm = [TrafficRequest(request.prompt, 1) for request in requests[:count]]
    else:
        warm = make_traffic(
            options.traffic, count, options.load.seed + 0x5EED, as_text=options.target.endpoint == "chat"
        )
    timings = [read_stream(timing) for timing in await asyncio.gather(*map(server.send, warm))]
    failed = [timing for timing in timings if timing.error]
    if failed and len(failed) == len(timings):
        is_refused = failed[0].error in ("http 400", "http 422")
        hint = "; for a server that accepts no token ids, use --random-words" if is_refused else ""
        raise ConfigError(
            f"every warm-up request failed: {failed[0].error}: {failed[0].detail}{hint}", param="base_url"
        )


async def send_all(
    send: Callable[[TrafficRequest], Any], requests: list[TrafficRequest], load: LoadOptions,
    advance: Callable[[], None], read: Callable[[Any], Any] = lambda sent: sent,
) -> list[Any]:
    """Send every request when it is due and a slot of the concurrency limit is free. ``read`` runs on each result of
    ``send`` after the next request had time to start. Returns the results of ``read`` in the order in which requests
    were started."""
    # A rate overrides the trace's times; a concurrency limit without a rate ignores them.
    is_timed = load.rate is not None or (load.concurrency is None and requests[0].at_s is not None)
    room = asyncio.Semaphore(load.concurrency or (len(requests) if is_timed else DEFAULT_CONCURRENCY))

    async def run(request: TrafficRequest) -> Any:
        try:
            sent = await send(request)
        finally:
            room.release()
            advance()
        await asyncio.sleep(READ_AFTER_S)
        return read(sent)

    tasks = []
    async with asyncio.TaskGroup() as group:
        async for request in pace(requests, load.rate, load.seed) if is_timed else _at_once(requests):
            # Before the task starts: with a limit, a late response delays the requests after it.
            await room.acquire()
            tasks.append(group.create_task(run(request)))
    return [task.result() for task in tasks]


async def _at_once(requests: list[TrafficRequest]) -> AsyncIterator[TrafficRequest]:
    for request in requests:
        yield request


async def pace(requests: list[TrafficRequest], rate: float | None, seed: int) -> AsyncIterator[TrafficRequest]:
    """Yield each request when it is due: by a Poisson process with ``rate`` arrivals per second, or at ``at_s`` if
    ``rate`` is None."""
    began = time.perf_counter()
    times = arrival_times(requests, rate, seed)
    for request, due in sorted(zip(requests, times, strict=True), key=lambda pair: pair[1]):
        # Against the start, so that delays do not add up.
        await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
        yield request


def arrival_times(requests: list[TrafficRequest], rate: float | None, seed: int) -> list[float]:
    """Seconds after the start at which each request is due."""
    if rate is None:
        return [request.at_s or 0.0 for request in requests]
    random, due, times = Random(seed), 0.0, []
    for _ in requests:
        times.append(due)
        # exponential gaps make a Poisson process
        due += random.expovariate(rate)
    return times

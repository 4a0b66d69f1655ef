"""``headrace bench serve``: loads a server over HTTP and reports how it did. Knows nothing of which server it is."""

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
from headrace.serving.bench.traffic import Ask, make_traffic
from headrace.serving.http_client import loop_factory

DEFAULT_CONCURRENCY = 16
READ_AFTER_S = 0.01
"""A stream that has ended is read this much later, when the request that takes its place is on its way."""


def run_serve_bench(options: ServeBenchOptions, console: Console | None = None) -> Report:
    """Load the server, print the report to ``console`` (None: say nothing) and write the file if one is wanted.

    Raises `ConfigError` when the options are wrong, no server answers, or it refuses every warm-up request.
    """
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        report, timings = runner.run(_measure(options, console))
    if options.load.output_file:
        details = {"requests": [describe(timing, report) for timing in timings]} if options.load.details else {}
        write_json(options.load.output_file, {**report.to_dict(), **details})
    if console:
        print_report(report, console)
    return report


def describe(timing: Timing, report: Report) -> dict[str, Any]:
    """One request's own figures, in milliseconds."""
    described = {"latency_ms": timing.latency * 1e3, "ttft_ms": timing.ttft * 1e3 if timing.arrivals else None}
    counts = {name: getattr(timing, name) for name in ("prompt_tokens", "output_tokens", "cached_tokens", "error")}
    return {**described, **counts}


async def _measure(options: ServeBenchOptions, console: Console | None) -> tuple[Report, list[Timing]]:
    load, traffic = options.load, options.traffic
    as_text = options.target.endpoint == "chat"
    asks = make_traffic(traffic, load.num_requests, load.seed, as_text=as_text)
    if as_text and any(isinstance(ask.prompt, list) and isinstance(ask.prompt[0], int) for ask in asks):
        raise ConfigError("the chat route takes text or messages; the trace has token ids", param="endpoint")
    async with ServerConnection(options.target, traffic) as server:
        await _warm_up(server, options, asks)
        if options.target.flush_cache:
            await server.flush_cache()
        with _progress(console) as progress:
            task = progress.add_task("requests", total=len(asks))
            timings = await send_all(server.send, asks, load, lambda: progress.advance(task), read_stream)
        described = {
            section: dataclasses.asdict(getattr(options, section)) for section in ("target", "load", "traffic")
        }
        described["target"].pop("api_key")
        return summarise(timings, model=server.model, options=described), timings


def _progress(console: Console | None) -> Progress:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )
    return Progress(*columns, console=console, disable=console is None, transient=True)


async def _warm_up(server: ServerConnection, options: ServeBenchOptions, asks: list[Ask]) -> None:
    """Requests like those measured but with prompts of their own, so that no prefix of a measured one is cached. A
    trace is warmed up with its first requests cut to one token of output."""
    count = options.load.warmup
    if options.traffic.workload == "trace":
        warm = [Ask(ask.prompt, 1) for ask in asks[:count]]
    else:
        warm = make_traffic(
            options.traffic, count, options.load.seed + 0x5EED, as_text=options.target.endpoint == "chat"
        )
    timings = [read_stream(timing) for timing in await asyncio.gather(*map(server.send, warm))]
    failed = [timing for timing in timings if timing.error]
    if failed and len(failed) == len(timings):
        hint = (
            "; a server that takes no token ids needs --random-words" if failed[0].error in ("http 400", "http 422")
            else ""
        )
        raise ConfigError(
            f"every warm-up request failed: {failed[0].error}: {failed[0].detail}{hint}", param="base_url"
        )


async def send_all(
    send: Callable[[Ask], Any], asks: list[Ask], load: LoadOptions, advance: Callable[[], None],
    read: Callable[[Any], Any] = lambda sent: sent,
) -> list[Any]:
    """Send every request at its time, with no more under way than wanted; what ``read`` makes of the results, in the
    requests' order."""
    is_timed = load.rate is not None or (load.concurrency is None and asks[0].at_s is not None)
    room = asyncio.Semaphore(load.concurrency or (len(asks) if is_timed else DEFAULT_CONCURRENCY))

    async def run(ask: Ask) -> Any:
        try:
            sent = await send(ask)
        finally:
            room.release()
            advance()
        await asyncio.sleep(READ_AFTER_S)
        return read(sent)

    tasks = []
    async with asyncio.TaskGroup() as group:
        async for ask in pace(asks, load.rate, load.seed) if is_timed else _at_once(asks):
            await room.acquire()
            tasks.append(group.create_task(run(ask)))
    return [task.result() for task in tasks]


async def _at_once(asks: list[Ask]) -> AsyncIterator[Ask]:
    for ask in asks:
        yield ask


async def pace(asks: list[Ask], rate: float | None, seed: int) -> AsyncIterator[Ask]:
    """Each request at its time: of a Poisson process with ``rate`` arrivals a second, or else its own ``at_s``."""
    began = time.perf_counter()
    for ask, due in sorted(zip(asks, arrival_times(asks, rate, seed), strict=True), key=lambda pair: pair[1]):
        await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
        yield ask


def arrival_times(asks: list[Ask], rate: float | None, seed: int) -> list[float]:
    """Seconds after the start at which each request is due."""
    if rate is None:
        return [ask.at_s or 0.0 for ask in asks]
    random, due, times = Random(seed), 0.0, []
    for _ in asks:
        times.append(due)
        due += random.expovariate(rate)
    return times

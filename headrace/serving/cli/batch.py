"""``headrace batch``: runs a file of requests in OpenAI's batch format, here or on a Ray cluster, and continues an
interrupted run."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

from headrace.base.config import EngineConfig
from headrace.base.errors import ConfigError
from headrace.base.server_config import ServerConfig
from headrace.service.client.client import EngineClient
from headrace.serving.batch import InsideClient, Tally, count_lines, open_output, read_items, run_batch
from headrace.serving.cli.commands import ENGINE
from headrace.serving.cli.flags import Invocation

CONCURRENCY = 256
"""Lines in progress at a time: enough for full batches."""

ON_RAY_ALONE = frozenset({"num_replicas", "shard_size", "output_format", "ray_address"})


def run(invocation: Invocation) -> int:
    """Run the batch; 1 if any line failed."""
    source, target = _paths(invocation.words)
    if invocation.section("nodes").executor == "ray":
        return _run_on_ray(invocation, source, target)
    for name in ON_RAY_ALONE & {name for name, origin in invocation.sources.items() if origin == "flag"}:
        raise ConfigError(f"{name} is for a run on Ray; add --executor ray", param=name)
    num_lines = count_lines(source)
    output, answered = open_output(target)
    config = EngineConfig(**{name: invocation.section(name) for name in ENGINE})
    with output, source.open("rb") as lines:
        num_done = len(answered.custom_ids) + len(answered.numbers)
        with _progress_bar(num_lines, num_done) as advance:
            work = partial(
                run_batch, items=read_items(lines, answered), output=output, concurrency=CONCURRENCY,
                advance=partial(advance, 1)
            )
            tally = asyncio.run(_run(config, invocation.section("batch").served_model_name, work))
    print(
        f"{tally.completed} lines completed, {tally.failed} of them with an error; {num_done} were completed before",
        file=sys.stderr
    )
    return 1 if tally.failed else 0


def _run_on_ray(invocation: Invocation, source: Path, target: Path) -> int:
    from headrace.serving.ray.batch import RayBatch, run_batch_on_ray

    options = invocation.section("batch")
    config = EngineConfig(**{name: invocation.section(name) for name in ENGINE})
    tally = run_batch_on_ray(source, target, config, RayBatch(
        options.num_replicas, options.shard_size, options.output_format, options.ray_address,
        options.served_model_name, invocation.given.get("log_level", "warning"),
    ), _progress_bar)
    print(
        f"{tally.total.completed} lines completed, {tally.total.failed} of them with an error; {tally.num_before} were "
        "completed before", file=sys.stderr
    )
    if tally.num_given_up:
        print(f"{tally.num_given_up} lines have no result; run the batch again to try them again", file=sys.stderr)
    return 1 if tally.total.failed or tally.num_given_up else 0


async def _run(config: EngineConfig, name: str | None, work: Callable[..., Awaitable[Tally]]) -> Tally:
    from headrace.serving.http.app import create_app  # half a second, which a wrong file should not cost

    client = EngineClient(config)
    await client.start()
    try:
        await client.wait_ready()
        app = create_app(client, ServerConfig(served_model_name=name))
        return await work(InsideClient(app), is_alive=lambda: client.state != "stopped")
    finally:
        await client.close()


def _paths(words: list[str]) -> tuple[Path, Path]:
    if len(words) != 2:
        raise ConfigError("give the input and the output: headrace batch input.jsonl output.jsonl", param="input")
    source, target = map(Path, words)
    if target.exists() and source.exists() and target.samefile(source):
        raise ConfigError("input and output are the same file", param="output")
    return source, target


REPORT_S = 30.0
"""Between lines of progress where standard error is no terminal."""


@contextlib.contextmanager
def _progress_bar(total: int, done: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, else a line from time to time. The callable takes how many lines more are completed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    is_terminal = sys.stderr.isatty()
    reported_at = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), disable=not is_terminal) as bar:
        task = bar.add_task("requests", total=total, completed=done)

        def advance(count: int) -> None:
            nonlocal reported_at
            bar.advance(task, count)
            if not is_terminal and time.monotonic() - reported_at >= REPORT_S:
                reported_at = time.monotonic()
                print(f"{bar.tasks[0].completed:.0f} of {total} lines", file=sys.stderr, flush=True)

        yield advance

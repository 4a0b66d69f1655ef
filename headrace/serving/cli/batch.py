"""``headrace batch``: runs a file of requests in OpenAI's batch format, and continues an interrupted run."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

from headrace.base.config import EngineConfig, ServerConfig
from headrace.base.errors import ConfigError
from headrace.service.client.client import EngineClient
from headrace.serving.batch import InsideClient, Tally, count_lines, open_output, read_items, run_batch
from headrace.serving.cli.commands import ENGINE
from headrace.serving.cli.flags import Invocation

CONCURRENCY = 256
"""Lines in progress at a time: enough for full batches."""


def run(invocation: Invocation) -> int:
    """Run the batch; 1 if any line failed."""
    source, target = _paths(invocation.words)
    num_lines = count_lines(source)
    output, answered = open_output(target)
    config = EngineConfig(**{name: invocation.section(name) for name in ENGINE})
    with output, source.open("rb") as lines:
        num_done = len(answered.custom_ids) + len(answered.numbers)
        with _progress_bar(num_lines, num_done) as advance:
            work = partial(
                run_batch, items=read_items(lines, answered), output=output, concurrency=CONCURRENCY, advance=advance
            )
            tally = asyncio.run(_run(config, invocation.section("batch").served_model_name, work))
    print(
        f"{tally.completed} lines completed, {tally.failed} of them with an error; {num_done} were completed before",
        file=sys.stderr
    )
    return 1 if tally.failed else 0


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


@contextlib.contextmanager
def _progress_bar(total: int, done: int) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("requests", total=total, completed=done)
        yield lambda: bar.advance(task)

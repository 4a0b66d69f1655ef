"""``headrace replay``: sends recorded requests to a server and compares the responses with the recorded ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.base.errors import ConfigError
from headrace.serving.cli.flags import Invocation

if TYPE_CHECKING:
    from rich.console import Console

    from headrace.serving.replay import Comparison, Record, ReplayOptions

MAX_NAMED = 10


def run(invocation: Invocation) -> int:
    """Replay; 1 if a status differs, or a response that was not sampled at random."""
    if len(invocation.words) != 1:
        raise ConfigError("give one folder or file of recorded requests: headrace replay FOLDER")
    from rich.console import Console

    from headrace.serving.replay import compare, read_records

    records = read_records(invocation.words[0])
    whole = [record for record in records if record.has_body]
    if not whole:
        raise ConfigError("all recorded requests were too large to record, or not JSON; there is nothing to send")
    options: ReplayOptions = invocation.section("replay")
    console = Console()
    answers = _send(whole, options, console)
    if options.output_file:
        _write(options.output_file, whole, answers)
    comparison = compare(list(zip(whole, answers, strict=True)))
    report(console, comparison, whole, answers, num_left_out=len(records) - len(whole))
    return 1 if comparison.statuses or comparison.num_unreachable or comparison.different_answer else 0


def _send(records: Sequence[Record], options: ReplayOptions, console: Console) -> list[Record]:
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from headrace.serving.replay import replay

    # On a terminal only: otherwise progress lines would mix with the report.
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("requests", total=len(records))
        return asyncio.run(replay(records, options, lambda: progress.advance(task)))


def _write(path: str, records: Sequence[Record], answers: Sequence[Record]) -> None:
    import msgspec

    lines = (
        msgspec.json.encode(msgspec.structs.replace(answer, body=record.body))
        for record, answer in zip(records, answers, strict=True)
    )
    try:
        Path(path).write_bytes(b"".join(line + b"\n" for line in lines))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", param="output_file") from error


def report(
    console: Console, comparison: Comparison, records: Sequence[Record], answers: Sequence[Record], *,
    num_left_out: int = 0
) -> None:
    """Print the comparison, without texts of the requests."""
    from rich.table import Table

    from headrace.serving.replay import count_tokens

    lines = [f"{comparison.num_sent} requests sent, {comparison.same_status} with the recorded status"]
    lines += [f"{count} went from status {change}" for change, count in comparison.statuses.most_common()]
    if comparison.num_unreachable:
        lines.append(f"{comparison.num_unreachable} got no response")
    if num_left_out:
        lines.append(f"{num_left_out} were not sent: too large to record, or not JSON")
    random = (
        f", {comparison.different_random} more sampled at random without a seed" if comparison.different_random else ""
    )
    lines.append(
        f"responses: {comparison.same_answer} the same, {comparison.different_answer} different{random}, "
        f"{comparison.not_comparable} not comparable"
    )
    if comparison.differing:
        more = f" and {len(comparison.differing) - MAX_NAMED} more" if len(comparison.differing) > MAX_NAMED else ""
        lines.append(f"different: {', '.join(comparison.differing[:MAX_NAMED])}{more}")
    console.print("\n".join(lines), highlight=False, markup=False)
    table = Table(box=None, pad_edge=False)
    for column in ("", "recorded", "now"):
        table.add_column(column, justify="left" if not column else "right")
    # successful ones only: a refusal is fast and would improve the latencies
    runs = [[r for r in run if r.status == 200] for run in (records, answers)]
    for title, name in (("seconds to the end", "seconds"), ("seconds to the first byte", "first_byte_s")):
        for share in (0.5, 0.99):
            table.add_row(
                f"{title}, p{share * 100:g}", *(_quantile([getattr(r, name) for r in run], share) for run in runs)
            )
    table.add_row("output tokens", *(str(sum(count_tokens(r.answer) for r in run)) for run in runs))
    console.print(table)


def _quantile(values: list[float], share: float) -> str:
    return f"{sorted(values)[min(len(values) - 1, int(share * len(values)))]:.3f}" if values else "-"

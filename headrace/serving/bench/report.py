"""Benchmark reports: throughput, latency percentiles, errors; as tables and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from headrace.base.errors import ConfigError
from headrace.serving.bench.connection import Timing

LATENCIES = {
    "ttft_ms": "time to first token", "tpot_ms": "time per output token", "itl_ms": "between pieces",
    "latency_ms": "whole request"
}


@dataclass(frozen=True)
class Distribution:
    """Mean and percentiles (linearly interpolated) in milliseconds; zero without samples."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, seconds: Sequence[float] | np.ndarray) -> Distribution:
        if not len(seconds):
            return cls()
        values = np.asarray(seconds) * 1e3
        return cls(float(values.mean()), *(float(p) for p in np.percentile(values, (50, 90, 99))))


@dataclass(frozen=True)
class Report:
    """One benchmark of a server. ``duration_s``: from the first request's start to the last one's end; throughputs are
    per second of it and count successful requests. ``errors``: failures by kind; ``examples``: one of each.
    ``tokens_per_step``: output tokens of a request in a step that verified drafts for it (speculation), by the server's
    metrics; None without."""

    model: str
    num_requests: int
    num_completed: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    errors: dict[str, int]
    examples: dict[str, str]
    latencies: dict[str, Distribution]
    options: dict[str, Any] = field(default_factory=dict)
    tokens_per_step: float | None = None

    @property
    def request_throughput(self) -> float:
        return self.num_completed / self.duration_s if self.duration_s else 0.0

    @property
    def output_throughput(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def total_throughput(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.duration_s if self.duration_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The report as a dict, with throughputs."""
        throughputs = {
            name: getattr(self, name) for name in ("request_throughput", "output_throughput", "total_throughput")
        }
        return {**dataclasses.asdict(self), **throughputs}


def summarise(timings: Sequence[Timing], *, model: str = "", options: dict[str, Any] | None = None) -> Report:
    """The report of finished requests."""
    good = [timing for timing in timings if timing.error is None]
    bad = [timing for timing in timings if timing.error is not None]
    started, ended = min((t.started for t in timings), default=0.0), max((t.ended for t in timings), default=0.0)
    # One gap per pair of consecutive pieces, whatever number of tokens a piece has.
    gaps = np.concatenate([np.diff(t.arrivals) for t in good]) if good else np.empty(0)
    return Report(
        model=model, num_requests=len(timings), num_completed=len(good), duration_s=ended - started,
        prompt_tokens=sum(t.prompt_tokens for t in good), output_tokens=sum(t.output_tokens for t in good),
        cached_tokens=sum(t.cached_tokens for t in good),
        errors=dict(Counter(str(t.error) for t in bad).most_common()),
        examples={str(t.error): t.detail for t in reversed(bad)},  # the first of each kind wins
        latencies={
            "ttft_ms": Distribution.of([t.ttft for t in good]),
            "tpot_ms": Distribution.of([t.tpot for t in good if t.tpot is not None]),
            "itl_ms": Distribution.of(gaps),
            "latency_ms": Distribution.of([t.latency for t in good]),
        },
        options=options or {},
    )


def print_report(report: Report, console: Console) -> None:
    """The report as tables."""
    counts = Table(
        title=f"{report.model}: {report.num_completed} of {report.num_requests} requests in {report.duration_s:.2f} s",
        title_justify="left"
    )
    counts.add_column("throughput", no_wrap=True)
    counts.add_column("per second", justify="right")
    counts.add_column("total", justify="right")
    counts.add_row("requests", f"{report.request_throughput:,.2f}", f"{report.num_completed:,}")
    counts.add_row("output tokens", f"{report.output_throughput:,.1f}", f"{report.output_tokens:,}")
    counts.add_row(
        "prompt and output tokens", f"{report.total_throughput:,.1f}",
        f"{report.prompt_tokens + report.output_tokens:,}"
    )
    if report.cached_tokens:
        counts.add_row("prompt tokens from cache", "", f"{report.cached_tokens:,}")
    if report.tokens_per_step is not None:
        counts.add_row("tokens per step with drafts", "", f"{report.tokens_per_step:.2f}")
    console.print(counts)
    latencies = Table("milliseconds")
    for name in ("mean", "p50", "p90", "p99"):
        latencies.add_column(name, justify="right")
    for key, label in LATENCIES.items():
        row = report.latencies[key]
        latencies.add_row(
            f"{label} ({key.removesuffix('_ms').upper()})" if key != "latency_ms" else label,
            *(f"{v:,.2f}" for v in dataclasses.astuple(row))
        )
    console.print(latencies)
    for kind, count in report.errors.items():
        console.print(f"[red]{count} failed: {kind}[/red]  ", end="")
        console.print(report.examples.get(kind, ""), markup=False)


def write_json(path: str, content: Any) -> None:
    """Write ``content`` to a file; raises `ConfigError` if it cannot be written."""
    try:
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}", param="output_file") from error

"""``headrace bench serve``, ``bench offline`` and ``bench quality``: flags to the benchmarks' options."""

from __future__ import annotations

from headrace.serving.cli.commands import ENGINE
from headrace.serving.cli.flags import Invocation


def run_serve(invocation: Invocation) -> int:
    """Load test a server; 1 if any request failed."""
    from rich.console import Console

    from headrace.serving.bench.options import ServeBenchOptions
    from headrace.serving.bench.serve import run_serve_bench

    options = ServeBenchOptions(**{name: invocation.section(name) for name in ("target", "load", "traffic")})
    report = run_serve_bench(options, Console())
    return 1 if report.errors else 0


def run_offline(invocation: Invocation) -> int:
    """Run the workloads in this process."""
    from rich.console import Console

    from headrace.serving.bench.offline import run_offline_bench

    engine = invocation.given_in(ENGINE)
    engine.pop("skip_tokenizer", None)  # these workloads are token ids
    engine.setdefault("model", invocation.section("model").model)
    run_offline_bench(invocation.section("workloads"), Console(), **engine)
    return 0


def run_quality(invocation: Invocation) -> int:
    """Compare weight formats, one after another in this process."""
    from rich.console import Console

    from headrace.serving.bench.quality import run_quality_bench

    engine = invocation.given_in(ENGINE)
    engine.setdefault("model", invocation.section("model").model)
    run_quality_bench(invocation.section("quality"), Console(), **engine)
    return 0

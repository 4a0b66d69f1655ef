"""``headrace check``: what works on this machine, including optional libraries, and why the rest does not."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from headrace.service.inventory import BROKEN, OK, UNAVAILABLE, Finding
from headrace.serving.cli.flags import Invocation

KIND = "library"


@dataclass(frozen=True)
class Library:
    """A package of an extra, required from version ``lowest`` on."""

    package: str
    extra: str
    lowest: str
    gives: str


LIBRARIES = (
    Library("llguidance", "structured", "1.9", "structured outputs and forced tool calls"),
    Library("nvidia-cudnn-frontend", "cuda", "1.14", "paged attention by cuDNN on NVIDIA GPUs"),
    Library(
        "flashinfer-python", "flashinfer", "0.6.15",
        "prefill by flashinfer on NVIDIA GPUs (--attention-backend flashinfer)"
    ),
    Library("opentelemetry-sdk", "otel", "1.28", "traces of requests (--otlp-endpoint)"),
    Library("opentelemetry-exporter-otlp-proto-http", "otel", "1.28", "exports traces to a collector"),
)


def find_libraries() -> Iterator[Finding]:
    """One finding per library, without importing it; a version that is too old is broken."""
    for library in LIBRARIES:
        install = f"pip install 'headrace[{library.extra}]'"
        try:
            # From the package's metadata: an import may take seconds.
            found = version(library.package)
        except PackageNotFoundError:
            yield Finding(KIND, library.package, UNAVAILABLE, (), f"not installed: {install} for {library.gives}")
            continue
        if _numbers(found) < _numbers(library.lowest):
            yield Finding(KIND, library.package, BROKEN, (), f"{found} is older than {library.lowest}: {install}")
        else:
            yield Finding(KIND, library.package, OK, (), f"{found}: {library.gives}")


def _numbers(text: str) -> tuple[int, ...]:
    """The release part of a version, for comparison."""
    release = re.match(r"[0-9]+(?:\.[0-9]+)*", text)
    return tuple(map(int, release[0].split("."))) if release else ()


STYLES = {"ok": "green", "unavailable": "yellow", "broken": "bold red"}


def run(invocation: Invocation) -> int:
    """Print the report; 1 with ``--strict`` if anything is broken."""
    from headrace.service.inventory import BROKEN, find_machine, take_inventory

    options = invocation.section("check")
    machine = find_machine()
    findings = [*take_inventory(machine), *find_libraries()]
    num_broken = sum(finding.status == BROKEN for finding in findings)
    if options.json:
        print(
            json.dumps({"machine": machine.description, "plugins": [dataclasses.asdict(f) for f in findings]}, indent=2)
        )
        return 1 if num_broken and options.strict else 0
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for name, what in machine.description.items():
        console.print(f"{name}: {what}", highlight=False, markup=False)
    table = Table(box=None, pad_edge=False)
    for column in ("kind", "name", "status", "on", "description or reason"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        status = Text(finding.status, style=STYLES[finding.status])
        table.add_row(Text(finding.kind), Text(finding.name), status, ", ".join(finding.devices), Text(finding.detail))
    console.print(table)
    counts = {status: sum(f.status == status for f in findings) for status in STYLES}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()), highlight=False)
    return 1 if num_broken and options.strict else 0

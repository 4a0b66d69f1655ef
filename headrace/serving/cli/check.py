"""``headrace check``: what works on this machine, and why the rest does not."""

from __future__ import annotations

import dataclasses
import json

from headrace.serving.cli.flags import Invocation

STYLES = {"ok": "green", "unavailable": "yellow", "broken": "bold red"}


def run(invocation: Invocation) -> int:
    """Report; 1 with ``--strict`` when anything is broken."""
    from headrace.service.inventory import BROKEN, find_machine, take_inventory
    from headrace.serving.cli.libraries import find_libraries

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
    for column in ("kind", "name", "status", "on", "why, or what it is"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        status = Text(finding.status, style=STYLES[finding.status])
        table.add_row(Text(finding.kind), Text(finding.name), status, ", ".join(finding.devices), Text(finding.detail))
    console.print(table)
    counts = {status: sum(f.status == status for f in findings) for status in STYLES}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()), highlight=False)
    return 1 if num_broken and options.strict else 0

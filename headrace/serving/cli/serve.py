"""``headrace serve``, and ``headrace show-config``, which prints the options of ``serve``."""

from __future__ import annotations

import json
from typing import Any

from headrace.base.config import EngineConfig, ServeConfig, all_options, flatten
from headrace.service.spawn import spawn_engine
from headrace.serving.cli.commands import ENGINE, SERVING
from headrace.serving.cli.flags import Invocation


def serve_config(invocation: Invocation) -> ServeConfig:
    """The server's configuration, with the source of each value."""
    sections = {name: invocation.section(name) for name in (*ENGINE, *SERVING)}
    serving = {name: sections.pop(name) for name in SERVING}
    names = invocation.given_in((*ENGINE, *SERVING))
    return ServeConfig(
        engine=EngineConfig(**sections), **serving, sources={n: s for n, s in invocation.sources.items() if n in names}
    )


def run(invocation: Invocation) -> int:
    """Serve until a signal stops the server."""
    config = serve_config(invocation)
    engine = spawn_engine()  # started first: it has the most to import
    try:
        # imported while the engine process loads
        from headrace.serving.http.server import serve

        serve(config, engine=engine)
    finally:
        engine.end()  # if the server did not stop it
    return 0


SECRET = {"api_key", "admin_api_key"}


def effective_options(invocation: Invocation) -> list[dict[str, Any]]:
    """``section``, ``name``, ``value``, ``source`` and ``doc`` of each option; secrets are masked. None: decided at
    start, as the option's documentation says."""
    values = flatten(serve_config(invocation))
    rows = []
    for info in all_options():
        value = "***" if info.name in SECRET and values[info.name] else values[info.name]
        rows.append(
            {
                "section": info.section, "name": info.name, "value": value,
                "source": invocation.sources.get(info.name, "default"), "doc": info.doc
            }
        )
    return rows


def run_show_config(invocation: Invocation) -> int:
    """Print the options as a table or as JSON."""
    show = invocation.section("show")
    rows = [row for row in effective_options(invocation) if not show.changed or row["source"] != "default"]
    if show.json:
        print(json.dumps([{key: row[key] for key in ("section", "name", "value", "source")} for row in rows], indent=2))
        return 0
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in ("section", "option", "value", "from", "what it is"):
        table.add_column(column, overflow="fold", style="dim" if column == "what it is" else None)
    for row in rows:
        cells = [
            Text(cell) for cell in (row["section"], row["name"], show_value(row["value"]), row["source"], row["doc"])
        ]
        table.add_row(*cells, style="bold" if row["source"] != "default" else None)
    Console().print(table)
    return 0


def show_value(value: Any) -> str:
    """An option's value as text for the table."""
    if value is None:
        return "(decided at start)"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) if value != "" else "(empty)"

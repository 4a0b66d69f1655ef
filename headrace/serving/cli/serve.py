"""``headrace serve``; ``headrace show-config``, which prints its options; ``headrace router``."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

from headrace.base.config import EngineConfig, ServeConfig, all_options, flatten
from headrace.base.errors import HeadraceError
from headrace.service.spawn import spawn_engine
from headrace.serving.cli.commands import ENGINE, ROLE, SERVING
from headrace.serving.cli.flags import Invocation
from headrace.serving.cli.layout import Block, print_blocks, terminal_width, wrap


def serve_config(invocation: Invocation) -> ServeConfig:
    """The server's configuration, with the source of each value."""
    sections = {name: invocation.section(name) for name in (*ENGINE, *ROLE, *SERVING)}
    serving = {name: sections.pop(name) for name in SERVING}
    names = invocation.given_in((*ENGINE, *ROLE, *SERVING))
    return ServeConfig(
        engine=EngineConfig(**sections, transfer_host=serving["server"].host), **serving,
        sources={n: s for n, s in invocation.sources.items() if n in names}
    )


def run(invocation: Invocation) -> int:
    """Serve until a signal stops the server; on a host other than 0, until host 0 has ended."""
    config = serve_config(invocation)
    if config.engine.disaggregation.disaggregate is not None:
        from headrace.serving.router.pairs_on_host import serve_pairs

        serve_pairs(config)
        return 0
    if config.engine.nodes.node_rank:
        from headrace.service.ranks.agent import run_agents

        run_agents(config.engine)
        return 0
    with contextlib.ExitStack() as undo:
        # started first: they have the most to import. Replicas that divide experts get what they share from the client.
        parallel = config.engine.parallel
        count = 0 if parallel.shares_experts else parallel.data_parallel_size
        engines = [spawn_engine(replace(config.engine, replica=i)) for i in range(count)]
        for engine in engines:
            undo.callback(engine.end)  # if the server did not stop it
        # imported while the engine process loads
        from headrace.serving.http.server import serve

        serve(config, engines=engines)
    return 0


def run_router(invocation: Invocation) -> int:
    """Route until a signal stops the router."""
    from headrace.serving.router.server import serve_router

    serve_router(invocation.words, invocation.section("router"), invocation.section("workers"))
    return 0


SECRET = {"api_key", "admin_api_key"}


def effective_options(invocation: Invocation) -> list[dict[str, Any]]:
    """``section``, ``name``, ``value``, ``source`` and ``doc`` of each option; secrets are masked."""
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


def sampling_rows(invocation: Invocation) -> list[dict[str, Any]]:
    """The same fields for each default of sampling that the model or the user states; one row with the reason as its
    ``doc`` if the model cannot be read."""
    from headrace.service.inventory import find_sampling_defaults

    model = serve_config(invocation).engine.model
    try:
        found = find_sampling_defaults(model)
    except HeadraceError as error:
        return [{"section": SAMPLING, "name": "", "value": None, "source": "unknown", "doc": str(error)}]
    return [
        {"section": SAMPLING, "name": name, "value": default.value, "source": default.source, "doc": ""}
        for name, default in found.items()
    ]


def run_show_config(invocation: Invocation) -> int:
    """Print the options as a table or as JSON."""
    show = invocation.section("show")
    rows = [row for row in effective_options(invocation) if not show.changed or row["source"] != "default"]
    sampling = sampling_rows(invocation)
    if show.json:
        rows += [row for row in sampling if row["name"]]
        print(json.dumps([{key: row[key] for key in ("section", "name", "value", "source")} for row in rows], indent=2))
        return 0
    width = terminal_width()
    blocks = [Block("Changed", [line for row in rows if row["source"] != "default" for line in _explain(row, width)])]
    blocks.append(Block("Sampling defaults of the model", _list_sampling(sampling, width)))
    for section in dict.fromkeys(row["section"] for row in rows):
        at_default = [row for row in rows if row["section"] == section and row["source"] == "default"]
        lines = (
            [line for row in at_default for line in _explain(row, width)] if show.verbose else _list(at_default, width)
        )
        blocks.append(Block(f"Defaults: {section}", lines))
    print_blocks(blocks)
    if not show.verbose:
        print("\n-v explains each option")
    return 0


def _explain(row: dict[str, Any], width: int) -> list[str]:
    source = f" ({row['source']})" if row["source"] != "default" else ""
    return [
        *wrap(f"{row['name']} = {show_value(row['value'])}{source}", width, first="  ", indent=6),
        *wrap(row["doc"], width, first=" " * 6, indent=6)
    ]


def _list_sampling(rows: list[dict[str, Any]], width: int) -> list[str]:
    if not rows:
        return wrap("none stated: temperature 1, all tokens", width, first="  ", indent=2)
    texts = [f"{row['name']} = {show_value(row['value'])} ({row['source']})" if row["name"] else row["doc"]
             for row in rows]
    return [line for text in texts for line in wrap(text, width, first="  ", indent=6)]


def _list(rows: list[dict[str, Any]], width: int) -> list[str]:
    """Names and values alone, those that are not set last."""
    texts = [
        ", ".join(f"{row['name']}={show_value(row['value'])}" for row in rows if row["value"] is not None),
        ", ".join(row["name"] for row in rows if row["value"] is None)
    ]
    texts[1] = texts[1] and f"{NOT_SET}: {texts[1]}"
    return [line for text in texts if text for line in wrap(text, width, first="  ", indent=2)]


NOT_SET = "not set"
SAMPLING = "sampling defaults"


def show_value(value: Any) -> str:
    """An option's value as text."""
    if value is None:
        return NOT_SET
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) if value != "" else '""'

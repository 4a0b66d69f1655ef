"""``headrace serve``: from flags to the server's configuration."""

from __future__ import annotations

from headrace.base.config import EngineConfig, ServeConfig
from headrace.service.spawn import spawn_engine
from headrace.serving.cli.commands import ENGINE, SERVING
from headrace.serving.cli.flags import Invocation


def serve_config(invocation: Invocation) -> ServeConfig:
    """Everything the server takes, and where each value came from."""
    sections = {name: invocation.section(name) for name in (*ENGINE, *SERVING)}
    serving = {name: sections.pop(name) for name in SERVING}
    names = invocation.given_in((*ENGINE, *SERVING))
    return ServeConfig(
        engine=EngineConfig(**sections), **serving, sources={n: s for n, s in invocation.sources.items() if n in names}
    )


def run(invocation: Invocation) -> int:
    """Serve until told to stop."""
    config = serve_config(invocation)
    engine = spawn_engine()  # it has the most to import, so it begins first
    try:
        from headrace.serving.http.server import serve

        serve(config, engine=engine)
    finally:
        engine.end()  # when the server did not come to end it
    return 0

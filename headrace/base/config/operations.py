"""`OperationsConfig`: watching a running server and looking after it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.config.option import check_section, option

LOG_LEVELS = ("none", "line", "fields", "prompts")


@dataclass(frozen=True, kw_only=True)
class OperationsConfig:
    """Watching the server and looking after it."""

    log_requests: str = option(
        "none", "what is logged of each request: a line, also its fields without texts, also its texts; keys never are",
        choices=LOG_LEVELS
    )
    dump_requests: str | None = option(
        None, "write generation requests, texts included, and their answers here; headrace replay sends them again",
        metavar="FOLDER"
    )
    dump_limit_mib: int = option(1024, "size of that folder in MiB; the oldest go first", low=1)
    otlp_endpoint: str | None = option(
        None, "address of an OpenTelemetry collector that gets a trace of each request, say http://127.0.0.1:4318",
        metavar="URL"
    )
    trace_sampling: float = option(
        1.0, "share of requests that are traced, unless their traceparent header decides", low=0.0, high=1.0
    )
    profile_folder: str | None = option(
        None, "where /start_profile puts its traces; without one it is refused", metavar="FOLDER"
    )
    weights_root: str | None = option(
        None, "folder that /update_weights_from_disk may read models from; without one only the served model's own",
        metavar="FOLDER"
    )

    def __post_init__(self) -> None:
        check_section(self)

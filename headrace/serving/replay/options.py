"""What ``headrace replay`` takes."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.config import option
from headrace.base.config.option import check_section


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Where the requests go, and when."""

    base_url: str = option("http://127.0.0.1:8000", "address of the server, with or without /v1", metavar="URL")
    api_key: str | None = option(None, "sent as Authorization: Bearer KEY", metavar="KEY")
    model: str | None = option(None, "model name sent instead of the recorded one", metavar="NAME")
    speed: float = option(
        1.0, "1 keeps the recorded times between requests, 2 halves them; 0 sends as fast as the server takes them",
        low=0.0
    )
    concurrency: int | None = option(
        None, "requests under way at most; default 16 at speed 0, else unlimited", low=1, high=65536
    )
    timeout_s: float = option(600.0, "seconds after which a request counts as unanswered", low=0.1)
    output_file: str | None = option(None, "write the new answers here, in the form of a recording", metavar="FILE")

    def __post_init__(self) -> None:
        check_section(self)

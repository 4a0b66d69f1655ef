"""Options of prefill-decode disaggregation."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.base.errors import ConfigError
from headrace.base.option import Section, option

MOST_ENGINES = 16
BOOTSTRAP_PORT = 8998
"""Default port of a prefill server's transfer agent, as in SGLang."""


@dataclass(frozen=True, kw_only=True)
class DisaggregationConfig(Section):
    """Prompts computed by some servers, outputs by others, so that long prompts do not delay running outputs."""

    disaggregate: str | None = option(
        None,
        "start so many prefill and decode servers on this host, such as 1:1 or 2:1, with a router before them at host "
        "and port; on GPUs each server has its own, on a CPU its share of the cores",
        metavar="P:D"
    )
    disaggregation_mode: str | None = option(
        None,
        "this server's part beside others: prefill (computes prompts, and sends their KV pages) or decode (fetches "
        "them from the prefill server that the request names, and computes a prompt itself where that fails); a router "
        "sends requests to both (headrace router --prefill URL --decode URL); default: none",
        choices=("prefill", "decode")
    )
    disaggregation_transfer_backend: str = option(
        "shared-memory",
        "what carries KV pages, the same on both sides: shared-memory (one host), cuda-ipc (GPUs of one host), nixl or "
        "mooncake (RDMA or TCP; headrace[nixl], headrace[mooncake]); options follow as NAME?OPTION=VALUE, "
        "docs/disaggregation.md lists them",
        metavar="NAME"
    )
    disaggregation_bootstrap_port: int = option(
        BOOTSTRAP_PORT, "port on which a prefill server's transfer agent listens for decode servers", low=1, high=65535
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.disaggregate is not None:
            self.count_servers()
            if self.disaggregation_mode is not None:
                raise ConfigError(
                    "disaggregate starts servers of both modes; leave out disaggregation_mode", param="disaggregate"
                )

    def count_servers(self) -> tuple[int, int]:
        """Prefill and decode servers of ``disaggregate``; (0, 0) without it."""
        if self.disaggregate is None:
            return 0, 0
        found = re.fullmatch(r"(\d{1,2}):(\d{1,2})", self.disaggregate)
        counts = (int(found[1]), int(found[2])) if found else (0, 0)
        if min(counts) < 1 or sum(counts) > MOST_ENGINES:
            raise ConfigError(
                f"disaggregate is PREFILL:DECODE, at least 1:1 and {MOST_ENGINES} servers in all; got "
                f"{self.disaggregate!r}", param="disaggregate"
            )
        return counts

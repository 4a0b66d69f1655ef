"""Options of ``headrace router``, from which its flags are made."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.option import Section, option
from headrace.base.server_config import AccessConfig


@dataclass(frozen=True, kw_only=True)
class RouterOptions(AccessConfig):
    """The HTTP process of the router."""

    policy: str = option(
        "cache-aware",
        "which worker gets a request: cache-aware (the longest known prefix, unless that worker is much busier), "
        "consistent-hash (by X-Session-Id, prompt_cache_key, or how the prompt begins), least-loaded, round-robin, "
        "or that of an installed package",
        metavar="NAME"
    )
    max_body_bytes: int = option(32 * 2**20, "maximum size of a request body, in bytes", low=1024)
    rate_limit: float = option(
        0.0, "requests a second that a client (its key, else its address) may send; 0: no limit", low=0.0
    )
    rate_burst: int = option(0, "requests that a client may send at once; 0: those of a second", low=0)
    max_concurrent_per_client: int = option(0, "requests of a client that may run at once; 0: no limit", low=0)
    drain_s: float = option(30.0, "seconds that running requests have to finish after SIGTERM", low=0.0)
    log_requests: bool = option(False, "a log line for each request")


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(Section):
    """The servers behind the router."""

    prefill: list[str] | None = option(  # noqa: RUF009
        None, "a server with --disaggregation-mode prefill; may be repeated, with at least one --decode", metavar="URL"
    )
    decode: list[str] | None = option(  # noqa: RUF009
        None, "a server with --disaggregation-mode decode; may be repeated", metavar="URL"
    )
    workers_file: str | None = option(
        None, "file with a worker's URL per line, read again when it changes", metavar="FILE"
    )
    workers_dns: str | None = option(
        None, "name whose addresses are the workers, such as that of a headless Kubernetes service; asked every 5 s",
        metavar="NAME:PORT"
    )
    worker_api_key: str | None = option(
        None, "sent to workers instead of the client's key; default: the client's own", metavar="KEY"
    )
    health_interval_s: float = option(5.0, "seconds between two health checks of a worker", low=0.05)
    health_timeout_s: float = option(5.0, "seconds that a worker has for the answer to a health check", low=0.05)
    health_failures: int = option(
        3, "failed health checks in a row after which what runs on a worker is given up", low=1
    )
    max_tries: int = option(
        3, "workers that a request is given to, one after the other, while nothing was sent to the client", low=1
    )
    breaker_failures: int = option(
        5, "failures in a row (connections, statuses 500, 502 to 504) after which a worker is left alone for a while",
        low=1
    )

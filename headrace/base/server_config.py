"""Options of the HTTP process: what it serves and to whom, and how its operators watch it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.base.option import Section, option

LOG_LEVELS = ("none", "line", "fields", "prompts")


@dataclass(frozen=True, kw_only=True)
class OperationsConfig(Section):
    """Logging, recording, tracing and administration."""

    log_requests: str = option(
        "none", "log per request: a line, the line and fields without texts, or with texts; keys are never logged",
        choices=LOG_LEVELS
    )
    dump_requests: str | None = option(
        None, "write requests and responses, texts included, here; headrace replay sends them again", metavar="FOLDER"
    )
    dump_limit_mib: int = option(1024, "maximum size of that folder in MiB; the oldest files are deleted first", low=1)
    otlp_endpoint: str | None = option(
        None, "address of an OpenTelemetry collector for request traces, such as http://127.0.0.1:4318", metavar="URL"
    )
    trace_sampling: float = option(
        1.0, "share of requests that are traced; a traceparent header takes precedence", low=0.0, high=1.0
    )
    profile_folder: str | None = option(
        None, "folder for traces of /start_profile, which is refused without one", metavar="FOLDER"
    )
    weights_root: str | None = option(
        None, "folder that /update_weights_from_disk may read; default: only the served model's files",
        metavar="FOLDER"
    )


@dataclass(frozen=True, kw_only=True)
class AccessConfig(Section):
    """Address of the HTTP process, and access to it."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all interfaces")
    port: int = option(8000, "port to listen on; 0: any free port", low=0, high=65535)
    api_key: str | None = option(None, "clients must send Authorization: Bearer KEY", metavar="KEY")
    admin_api_key: str | None = option(
        None, "key of the admin routes; without one they are closed unless host is a loopback address", metavar="KEY"
    )
    cors_origins: str = option("", "comma-separated origins of browser pages that may send requests; * for any")
    allowed_hosts: str = option(
        "", "comma-separated names, as of a proxy, under which loopback may be reached without a key; * for any",
        metavar="NAMES"
    )
    trusted_proxies: str = option(
        "", "comma-separated addresses or networks of proxies whose X-Forwarded-For names the client; * for any"
    )


@dataclass(frozen=True, kw_only=True)
class KeepingConfig(AccessConfig):
    """Stored responses."""

    responses_store: int = option(
        0, "memory for stored responses of /v1/responses (previous_response_id), in MiB; 0: store none", low=0,
        high=2**20, metavar="MIB"
    )
    responses_ttl_s: float = option(3600.0, "seconds a stored response is kept after its last use", low=1.0)


@dataclass(frozen=True, kw_only=True)
class ToleranceConfig(KeepingConfig):
    """What requests may hold beyond the documented fields."""

    lenient: bool = option(
        False, "ignore unknown fields of requests, named in the response header Warning, instead of refusing them"
    )
    trust_request_chat_template: bool = option(
        False, "let requests bring a chat_template; only for trusted clients: a template can use much time and memory"
    )


@dataclass(frozen=True, kw_only=True)
class ServerConfig(ToleranceConfig):
    """The HTTP process."""

    served_model_name: str | None = option(
        None, "name clients use, or several, separated by commas; responses have the first; default: the model's own",
        metavar="NAME"
    )
    chat_template: str | None = option(None, "Jinja file that replaces the model's chat template", metavar="FILE")
    tool_parser: str = option(
        "auto", "format of the model's tool calls; auto: from the chat template; none: no tools",
        metavar="NAME"
    )
    reasoning_parser: str = option(
        "auto",
        "format of the model's reasoning; auto: from the chat template; none: reasoning stays in the text",
        metavar="NAME"
    )
    max_body_bytes: int = option(32 * 2**20, "maximum size of a request body, in bytes", low=1024)
    max_batch_prompts: int = option(2048, "maximum prompts in one request", low=1)
    drain_s: float = option(30.0, "seconds that running requests have to finish after SIGTERM", low=0.0)
    max_restarts: int = option(5, "restarts of a crashed engine within ten minutes before the server exits", low=0)
    stall_timeout_s: float = option(
        300.0,
        "maximum seconds without a sign of life before a loaded engine is restarted (less if steps are short); 0: no "
        "limit",
        low=0.0
    )
    root_path: str = option("", "path prefix behind a proxy")

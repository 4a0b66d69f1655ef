"""`AppContext`: what the routes of one application share: client, options, metrics, running requests."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import msgspec
from starlette.requests import Request

from headrace.base import VERSION
from headrace.base.errors import ConfigError, EngineAsleep, EngineUnavailable, RequestError
from headrace.base.messages import ModelFacts
from headrace.base.option import split_list
from headrace.base.server_config import OperationsConfig, ServerConfig
from headrace.service.client.adapters import AdapterCatalog
from headrace.service.client.admin import EngineAdmin
from headrace.service.parsing.choice import Formats, formats_of
from headrace.serving.http.generation.background import BackgroundRuns
from headrace.serving.http.generation.response_store import ResponseStore
from headrace.serving.http.transport.endpoint import BODY_BYTES, JsonBody
from headrace.serving.http.transport.errors import ModelNotFound
from headrace.serving.http.transport.metrics import Metrics
from headrace.serving.http.transport.recording import DumpFolder
from headrace.serving.http.transport.threads import WorkThreads
from headrace.serving.http.transport.tracing import open_tracing
from headrace.serving.media.intake import MediaIntake

if TYPE_CHECKING:
    from headrace.service.client.client import EngineClient
    from headrace.service.client.stream import RequestStream
    from headrace.service.tokenization import Tokenizer

RETRY_AFTER_S = 5.0
"""Seconds that clients are told to wait for an engine that starts or restarts (``Retry-After``)."""
UNAVAILABLE = {
    "starting": "the model is still loading", "restarting": "the engine is restarting",
    "draining": "the server is shutting down",
}
MOST_NAMED = 8
"""Adapters that an error lists."""
DEFAULT_MODEL = "default"
"""Names the served model, whatever it is called."""
ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_", "transcribe-")
T = TypeVar("T", bound=msgspec.Struct)
W = TypeVar("W")


@dataclass
class AppContext:
    """State shared by all routes: one per application, at ``app.state.context``.

    ``running`` maps a client's request id to its engine streams, one per prompt, and ``wide`` has the ids of those that
    want the logprobs of all tokens (`Generation` adds and removes them).
    ``is_open`` is False until `HttpServer` has started the client; ``is_draining`` is True from the first signal on.
    ``created`` is in seconds since the epoch. ``_formats`` is set on first use: it needs the loaded tokenizer.
    """

    client: EngineClient
    server: ServerConfig
    metrics: Metrics
    operations: OperationsConfig = field(default_factory=OperationsConfig)
    running: dict[str, list[RequestStream]] = field(default_factory=dict)
    wide: set[str] = field(default_factory=set)
    background: BackgroundRuns = field(default_factory=BackgroundRuns)
    is_open: bool = True
    is_draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    threads: WorkThreads = field(default_factory=WorkThreads)
    _formats: Formats | None = None

    def __post_init__(self) -> None:
        self.admin, self.adapters = EngineAdmin(self.client), AdapterCatalog(self.client)
        hidden = [module.name for module in self.client.config.adapters.modules if module.name in self.own_names]
        if hidden:
            raise ConfigError(
                f"lora_modules has {hidden[0]!r}, the served model's own name; choose another for the adapter",
                param="lora_modules"
            )
        self.media = MediaIntake(self.client.config)
        self.tracing = open_tracing(self.operations)
        limit = self.operations.dump_limit_mib * 2**20
        self.dump = DumpFolder(self.operations.dump_requests, limit) if self.operations.dump_requests else None
        # the option is in MiB
        self.responses = ResponseStore(self.server.responses_store * 2**20, self.server.responses_ttl_s)

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted."""
        return self.state == "ready"

    @property
    def state(self) -> str:
        """The engine's state, or this process's own while it starts or drains."""
        if self.is_draining:
            return "draining"
        # The client reports ready a moment before `HttpServer` opens the context.
        return "starting" if not self.is_open and self.client.state == "ready" else self.client.state

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names clients use; none while the model is loading and no name was configured."""
        own = (self.client.facts.model,) if self.client.facts else ()
        return tuple(dict.fromkeys(split_list(self.server.served_model_name or ""))) or own

    @property
    def model_name(self) -> str:
        """The first of them, which responses have; empty if there is none."""
        return next(iter(self.model_names), "")

    @property
    def own_names(self) -> tuple[str, ...]:
        """The names by which requests mean the served model itself."""
        return *self.model_names, DEFAULT_MODEL

    @property
    def system_fingerprint(self) -> str:
        """Identifies what output depends on beside the request: version, model, its weights, dtype and device."""
        facts, model = self.client.facts, self.client.config.model
        named = (VERSION, facts and (facts.model, facts.dtype, facts.device), model.quantization, model.load_format)
        weights = self.admin.weight_version
        return "fp_" + hashlib.sha256(repr((named, weights)).encode()).hexdigest()[:12]

    def facts(self) -> ModelFacts:
        """The model's facts; raises `EngineUnavailable` until the model is loaded."""
        if self.client.facts is None:
            raise EngineUnavailable(UNAVAILABLE["starting"], retry_after=RETRY_AFTER_S)
        return self.client.facts

    def close(self) -> None:
        """Stop work on texts; flush recordings and traces. May take seconds."""
        self.threads.close()
        if self.dump is not None:
            self.dump.close()
        if self.tracing is not None:
            self.tracing.close()

    def check_available(self) -> None:
        """Raise `EngineUnavailable` unless requests are accepted."""
        if self.is_ready:
            return
        if self.state == "asleep":
            raise EngineAsleep("the model sleeps, its memory is freed; send POST /wake_up", retry_after=RETRY_AFTER_S)
        reason = UNAVAILABLE.get(self.state, f"the engine is {self.state}")
        if self.client.state in ("starting", "restarting"):
            reason += f" ({self.client.progress[0]})"
        raise EngineUnavailable(reason, retry_after=RETRY_AFTER_S)

    def check_model(self, name: str | None, *, field: str = "model") -> str:
        """The adapter that a request names as its model, by its name or as ``base:name``; empty for the served model,
        which None and "default" mean too. Raises `ModelNotFound` for another name, and `EngineUnavailable` while the
        model loads and has no name yet."""
        if name and not self.model_name:
            self.facts()
        if not name or name in self.own_names:
            return ""
        adapter = self.adapters.find(name, self.model_names)
        if adapter is None:
            served = ", ".join(repr(known) for known in (*self.model_names, *self.adapters.names[:MOST_NAMED]))
            raise ModelNotFound(f"the model {name!r} is not served here; {served} is", param=field)
        return adapter

    def check_request(self, model: str | None) -> str:
        """`check_available` and `check_model`."""
        self.check_available()
        return self.check_model(model)

    def formats(self) -> Formats:
        """The formats in which the served model writes tool calls and reasoning."""
        if self._formats is None:
            server = self.server
            self._formats = formats_of(
                self.client.tokenizer, self.facts(), tool_parser=server.tool_parser,
                reasoning_parser=server.reasoning_parser,
            )
        return self._formats

    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises `RequestError` when the model is served without one."""
        if self.client.tokenizer is None:
            raise RequestError("this model is served without a tokenizer: token ids only")
        return self.client.tokenizer

    def abort(self, request_id: str) -> int:
        """Abort the running requests with this id, whole or as the client gave it (without the prefix of its API);
        returns the number of engine requests aborted."""
        names = (request_id, *(prefix + request_id for prefix in ID_PREFIXES))
        streams = [stream for name in names for stream in self.running.get(name, ())]
        for stream in streams:
            stream.abort()
        return len(streams)

    def abort_all(self) -> int:
        """Abort all running requests; returns the number of engine requests aborted."""
        return sum(self.abort(request_id) for request_id in list(self.running))


def context_of(request: Request) -> AppContext:
    """The application's context."""
    context: AppContext = request.app.state.context
    return context


async def read_request(request: Request, body: JsonBody[T]) -> tuple[AppContext, T]:
    """The context and the decoded body; raises `RequestError` (400, 408, 413 or 415)."""
    context = context_of(request)
    server, facts = context.server, context.client.facts
    return context, await body.read(
        request, server.max_body_bytes, context.threads, is_lenient=server.lenient,
        most_ids=None if facts is None else facts.max_model_len,
    )


async def compute(request: Request, work: Callable[[], W], *, size: int = 0) -> W:
    """The result of ``work``, which takes time in proportion to the request's body, or to ``size`` characters if they
    are more. See `WorkThreads.run`."""
    num_bytes = request.scope.get("state", {}).get(BODY_BYTES, 0)
    return await context_of(request).threads.run(request, max(num_bytes, size), work)

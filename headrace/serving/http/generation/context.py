"""`AppContext`: what all routes of one application share: the client, the server's options, metrics, what is
running."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request

from headrace.base.config import OperationsConfig, ServerConfig
from headrace.base.errors import EngineAsleep, EngineUnavailable, RequestError
from headrace.base.messages import ModelFacts
from headrace.service.client.admin import EngineAdmin
from headrace.service.parsing.choice import Formats, formats_of
from headrace.serving.http.generation.response_store import ResponseStore
from headrace.serving.http.transport.errors import ModelNotFound
from headrace.serving.http.transport.metrics import Metrics
from headrace.serving.http.transport.recording import DumpFolder
from headrace.serving.http.transport.tracing import open_tracing

if TYPE_CHECKING:
    from headrace.service.client.client import EngineClient
    from headrace.service.client.stream import RequestStream
    from headrace.service.tokenization import Tokenizer

RETRY_AFTER_S = 5.0


@dataclass
class AppContext:
    """One per application, at ``app.state.context``. ``running`` maps the request ids of clients to engine streams.
    ``is_open`` is False while the caller is still starting the client."""

    client: EngineClient
    server: ServerConfig
    metrics: Metrics
    operations: OperationsConfig = field(default_factory=OperationsConfig)
    running: dict[str, list[RequestStream]] = field(default_factory=dict)
    is_open: bool = True
    is_draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    responses: ResponseStore = field(init=False)
    _formats: Formats | None = None

    def __post_init__(self) -> None:
        self.admin = EngineAdmin(self.client)
        self.tracing = open_tracing(self.operations)
        limit = self.operations.dump_limit_mib * 2**20
        self.dump = DumpFolder(self.operations.dump_requests, limit) if self.operations.dump_requests else None
        self.responses = ResponseStore(self.server.responses_store * 2**20, self.server.responses_ttl_s)

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self.state == "ready"

    @property
    def state(self) -> str:
        """The engine's state in a word, what this process adds to it included."""
        if self.is_draining:
            return "draining"
        return "starting" if not self.is_open and self.client.state == "ready" else self.client.state

    @property
    def model_name(self) -> str:
        """The name clients use; empty while the model is loading and no name was configured."""
        facts = self.client.facts
        return self.server.served_model_name or (facts.model if facts else "")

    def facts(self) -> ModelFacts:
        """The model's facts; raises `EngineUnavailable` as long as they are unknown."""
        if self.client.facts is None:
            raise EngineUnavailable("the model is still loading", retry_after=RETRY_AFTER_S)
        return self.client.facts

    def close(self) -> None:
        """Let what is recorded of requests reach its place; may take seconds."""
        if self.dump is not None:
            self.dump.close()
        if self.tracing is not None:
            self.tracing.close()

    def check_available(self) -> None:
        """Raise `EngineUnavailable` unless requests are taken."""
        if not self.is_ready:
            reasons = {
                "starting": "the model is still loading", "restarting": "the engine is restarting",
                "draining": "the server is shutting down"
            }
            if self.state == "asleep":
                raise EngineAsleep(
                    "the model sleeps: its memory is given back until it is woken", retry_after=RETRY_AFTER_S
                )
            raise EngineUnavailable(reasons.get(self.state, f"the engine is {self.state}"), retry_after=RETRY_AFTER_S)

    def check_model(self, name: str | None) -> None:
        """Raise `ModelNotFound` for another model's name; none means the served one."""
        if name and name != self.model_name:
            raise ModelNotFound(f"the model {name!r} is not served here; {self.model_name!r} is", param="model")

    def formats(self) -> Formats:
        """How the served model writes tool calls and reasoning."""
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
        """End the running request of that id; how many engine requests were told."""
        streams = self.running.get(request_id, [])
        for stream in streams:
            stream.abort()
        return len(streams)


def context_of(request: Request) -> AppContext:
    """The application's context."""
    context: AppContext = request.app.state.context
    return context

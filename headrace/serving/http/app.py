"""`create_app`: the HTTP application over an engine client. Refuses: sockets, signals and processes (``server.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from headrace.base.config import OperationsConfig, ServerConfig
from headrace.serving.http.access import OPEN_PATHS, AdminGate, KeyGate, Prefix, RequestLedger, check_key
from headrace.serving.http.context import AppContext
from headrace.serving.http.errors import install_handlers
from headrace.serving.http.metrics import Metrics
from headrace.serving.http.openapi import document_handler
from headrace.serving.http.page import page_handler
from headrace.serving.http.recording import Recorder, Sink, open_log
from headrace.serving.http.routes import (
    admin,
    chat,
    completions,
    control,
    embeddings,
    health,
    messages,
    models,
    native,
    ollama,
    ollama_embeddings,
    responses,
    scoring,
    tokens,
    upkeep,
)
from headrace.serving.http.tracing import TracedRequests

if TYPE_CHECKING:
    from headrace.service.client.client import EngineClient

ENDPOINTS = (
    # looked through in order: the busiest come first
    *chat.ENDPOINTS, *completions.ENDPOINTS, *messages.ENDPOINTS, *responses.ENDPOINTS,
    *embeddings.ENDPOINTS, *ollama.ENDPOINTS, *ollama_embeddings.ENDPOINTS,
    *scoring.ENDPOINTS, *models.ENDPOINTS, *tokens.ENDPOINTS, *native.ENDPOINTS, *control.ENDPOINTS, *admin.ENDPOINTS,
    *upkeep.ENDPOINTS, *health.ENDPOINTS,
)


def create_app(client: EngineClient, server: ServerConfig, operations: OperationsConfig | None = None) -> Starlette:
    """The application. Starting and closing ``client`` is the caller's part; until it is ready, requests get 503.
    What routes share is at ``app.state.context``."""
    app = Starlette()
    app.router.redirect_slashes = False  # a redirect would lead wherever the Host header says
    context = app.state.context = AppContext(client, server, Metrics(), operations or OperationsConfig())
    for endpoint in ENDPOINTS:
        app.add_route(endpoint.path, endpoint.handler, methods=list(endpoint.methods))
    app.add_route("/", page_handler(), methods=["GET"])
    app.add_route("/openapi.json", document_handler(ENDPOINTS, server, OPEN_PATHS), methods=["GET"])
    install_handlers(app)
    _add_middleware(app, context, frozenset({"/", "/openapi.json", *(e.path for e in ENDPOINTS)}))
    return app


def _add_middleware(app: Starlette, context: AppContext, routes: frozenset[str]) -> None:
    """What stands before the routes, the innermost first: only what was let in is recorded."""
    server = context.server
    sinks: list[Sink] = [sink for sink in (context.dump, open_log(context.operations)) if sink is not None]
    if sinks:
        app.add_middleware(Recorder, sinks=sinks, paths=frozenset(e.path for e in ENDPOINTS if not e.is_admin))
    if server.api_key is not None:
        app.add_middleware(KeyGate, key=check_key(server.api_key))
    app.add_middleware(AdminGate, server=server, paths=frozenset(e.path for e in ENDPOINTS if e.is_admin))
    origins = [o.strip() for o in server.cors_origins.split(",") if o.strip()]
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"]
        )
    if context.tracing is not None:
        app.add_middleware(TracedRequests, context=context, routes=routes)
    app.add_middleware(RequestLedger, context=context, routes=routes)
    if server.root_path:
        app.add_middleware(Prefix, prefix=server.root_path)

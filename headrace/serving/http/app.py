"""`create_app`: the HTTP application over an engine client, and its pages for browsers. Refuses: sockets, signals and
processes (``server.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from headrace.base.server_config import OperationsConfig, ServerConfig
from headrace.serving.http.generation.context import AppContext
from headrace.serving.http.openapi import document_handler
from headrace.serving.http.pages import add_pages
from headrace.serving.http.routes import (
    adapters,
    admin,
    audio,
    chat,
    completions,
    control,
    messages,
    native,
    ollama,
    pooling,
    responses,
    tokens,
)
from headrace.serving.http.transport.access import (
    OPEN_PATHS,
    Gates,
    Prefix,
    RequestLedger,
    cors_options,
    open_gates,
    read_proxies,
)
from headrace.serving.http.transport.errors import install_handlers
from headrace.serving.http.transport.metrics import Metrics
from headrace.serving.http.transport.recording import Recorder, Sink, open_log

if TYPE_CHECKING:
    from headrace.service.client.client import EngineClient

# Starlette tries routes in this order, so the busiest come first.
_MODULES = (chat, completions, messages, responses, pooling, ollama, tokens, native, audio, control, admin, adapters)
ENDPOINTS = tuple(each for module in _MODULES for endpoint in module.ENDPOINTS for each in endpoint.expand())


def create_app(client: EngineClient, server: ServerConfig, operations: OperationsConfig | None = None) -> Starlette:
    """The application. The caller starts and closes ``client``; until it is ready, requests get 503. The routes share
    ``app.state.context``."""
    app = Starlette()
    app.router.redirect_slashes = False  # a redirect would go to the host in the Host header
    context = app.state.context = AppContext(client, server, Metrics(), operations or OperationsConfig())
    for endpoint in ENDPOINTS:
        app.add_route(endpoint.path, endpoint.handler, methods=list(endpoint.methods))
    pages = add_pages(app)
    app.add_route("/openapi.json", document_handler(ENDPOINTS, server, OPEN_PATHS), methods=["GET"])
    install_handlers(app)
    _add_middleware(app, context, pages)
    return app


def _add_middleware(app: Starlette, context: AppContext, pages: frozenset[str]) -> None:
    """Add middleware; ``pages`` are the paths of the pages' files. Starlette wraps the application with each, so the
    last one added sees a request first. The order matters: `Recorder` is inside the gates, so refused requests are not
    recorded; CORS is outside the gates, as browsers send preflights without a key; `RequestLedger` also counts refused
    requests and preflights, and logs the client's address, which the proxies' headers tell; `Prefix` sets the root path
    that `path_of` needs in all others."""
    server = context.server
    routes = frozenset({"/openapi.json", *pages, *(e.path for e in ENDPOINTS)})
    sinks: list[Sink] = [sink for sink in (context.dump, open_log(context.operations)) if sink is not None]
    if sinks:
        app.add_middleware(Recorder, sinks=sinks, paths=frozenset(e.path for e in ENDPOINTS if not e.is_admin))
    admin_paths = frozenset(e.path for e in ENDPOINTS if e.is_admin)
    app.add_middleware(Gates, gates=open_gates(server, admin_paths, OPEN_PATHS | pages))
    cors = cors_options(server)
    if cors is not None:
        app.add_middleware(CORSMiddleware, **cors)
    has_log = context.operations.log_requests != "none"
    app.add_middleware(
        RequestLedger, metrics=context.metrics.http, routes=routes, tracing=context.tracing, has_log=has_log
    )
    proxies = read_proxies(server.trusted_proxies)
    if proxies:
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=proxies)
    if server.root_path:
        app.add_middleware(Prefix, prefix=server.root_path)

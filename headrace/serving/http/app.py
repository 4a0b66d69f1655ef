"""The chat page at ``/``: one static file with a policy that lets it talk to this server only.

`create_app`: the HTTP application over an engine client. Refuses: sockets, signals and processes (``server.py``)."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse

from headrace.base.config import OperationsConfig, ServerConfig
from headrace.serving.http.generation.context import AppContext
from headrace.serving.http.openapi import document_handler
from headrace.serving.http.routes import (
    admin,
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
from headrace.serving.http.transport.access import OPEN_PATHS, AdminGate, KeyGate, Prefix, RequestLedger, check_key
from headrace.serving.http.transport.errors import install_handlers
from headrace.serving.http.transport.metrics import Metrics
from headrace.serving.http.transport.recording import Recorder, Sink, open_log
from headrace.serving.http.transport.tracing import TracedRequests

if TYPE_CHECKING:
    from headrace.service.client.client import EngineClient


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page_policy(html: str) -> str:
    """Content-Security-Policy: the page's own script and style by their hashes, connections to this server, no more."""
    scripts = " ".join(map(_digest, re.findall(r"<script>(.*?)</script>", html, re.DOTALL)))
    styles = " ".join(map(_digest, re.findall(r"<style>(.*?)</style>", html, re.DOTALL)))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


async def _show(_request: Request, *, html: str, headers: dict[str, str]) -> HTMLResponse:
    return HTMLResponse(html, headers=headers)


def page_handler() -> partial:
    """The handler of ``/``; the file is read once."""
    html = (files("headrace.serving.http") / "page.html").read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": page_policy(html), "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer"
    }
    return partial(_show, html=html, headers=headers)


ENDPOINTS = (
    # looked through in order: the busiest come first
    *chat.ENDPOINTS, *completions.ENDPOINTS, *messages.ENDPOINTS, *responses.ENDPOINTS,
    *pooling.ENDPOINTS, *ollama.ENDPOINTS, *tokens.ENDPOINTS, *native.ENDPOINTS, *control.ENDPOINTS, *admin.ENDPOINTS,
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
        app.add_middleware(TracedRequests, tracing=context.tracing, routes=routes)
    has_log = context.operations.log_requests != "none"
    app.add_middleware(RequestLedger, metrics=context.metrics, routes=routes, has_log=has_log)
    if server.root_path:
        app.add_middleware(Prefix, prefix=server.root_path)

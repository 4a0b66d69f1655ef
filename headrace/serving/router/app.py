"""`Router`: the ASGI application that passes requests on to workers, with routes of its own for health, models, metrics
and the list of workers. `create_app` puts the gates in front of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any, cast
from urllib.parse import parse_qs

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from headrace.base.errors import ConfigError, EngineUnavailable, HeadraceError, NotFound, RequestError
from headrace.serving.http.app import ENDPOINTS
from headrace.serving.http.transport.access import (
    OPEN_PATHS,
    Gates,
    RequestLedger,
    client_of,
    cors_options,
    open_gates,
    read_proxies,
)
from headrace.serving.http.transport.endpoint import read_body
from headrace.serving.http.transport.errors import EncodedResponse, JsonResponse, path_of, respond_error, route_of
from headrace.serving.router.fleet import Fleet
from headrace.serving.router.forwarding import Forwarder
from headrace.serving.router.limits import RateLimit
from headrace.serving.router.metrics import RouterMetrics
from headrace.serving.router.options import RouterOptions
from headrace.serving.router.pairing import Pairing
from headrace.serving.router.workers import Worker

RETRY_AFTER_S = 5.0
RELAYED = frozenset(endpoint.path for endpoint in ENDPOINTS if not endpoint.is_admin)
BROADCAST = frozenset({"/abort_request"})
"""Sent to all workers: nobody knows which one has the request."""
NO_LIMIT = nullcontext()
ADMIN_PATHS = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.is_admin)


def describe_state(worker: Worker) -> str:
    """One word for what a worker does."""
    if worker.is_draining:
        return "draining"
    return worker.health if worker.health != "ready" or worker.takes_requests else "resting"


class WorkerInfo(msgspec.Struct):
    """A worker in the answer of ``/workers``."""

    url: str
    state: str
    reason: str
    models: list[str]
    requests: int
    load_tokens: int
    role: str


class WorkerName(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST and DELETE ``/workers``."""

    url: str


class Router:
    """The application without gates. ``fleet`` answers requests; workers of ``prefill`` compute prompts for it.
    ``awaits_prefill``: it is not ready before one of these has been. ``is_draining`` refuses new requests;
    ``num_running`` counts those that are being relayed."""

    def __init__(
        self, fleet: Fleet, options: RouterOptions, prefill: Fleet | None = None, *, awaits_prefill: bool = False
    ):
        self.fleet, self.metrics = fleet, RouterMetrics([fleet] if prefill is None else [prefill, fleet])
        self._prefill, self._awaits_prefill = prefill, awaits_prefill
        self.is_draining = False
        self.num_running = 0
        self._options = options
        self._limit = RateLimit(options.rate_limit, options.rate_burst, options.max_concurrent_per_client)
        self._has_keys = options.api_key is not None
        self._forwarder = Forwarder(
            fleet, self.metrics, None if prefill is None else Pairing(prefill, self.metrics)
        )
        self._routes: dict[str, Callable[[Scope, Receive], Awaitable[Response]]] = {
            "/health": self._health, "/ping": self._health, "/ready": self._ready, "/metrics": self._metrics,
            "/v1/models": self._models, "/workers": self._workers,
        }

    def begin_drain(self) -> None:
        """See `headrace.serving.http.listening.Drained`."""
        self.is_draining = True

    async def end_running(self) -> None:
        """See `headrace.serving.http.listening.Drained`."""
        for worker in self.all_workers():
            worker.give_up()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = path_of(scope)
        try:
            own = self._routes.get(path)
            if own is not None:
                await (await own(scope, receive))(scope, receive, send)
            else:
                await self._relay(path, scope, receive, send)
        except HeadraceError as error:
            await respond_error(error, scope)(scope, receive, send)

    async def _relay(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if route_of(path, RELAYED) == "unmatched":
            raise NotFound(f"{path} is an admin route: send it to a worker" if path in ADMIN_PATHS else
                           f"there is no {path}; the router passes on the routes of inference servers")
        if self.is_draining:
            raise EngineUnavailable("the router is shutting down", retry_after=RETRY_AFTER_S)
        client = client_of(scope, has_keys=self._has_keys) if self._limit.is_on else ()
        self.num_running += 1
        try:
            with self._limit.admit(client) if self._limit.is_on else NO_LIMIT:
                body = await self._read_body(scope, receive)
                if path in BROADCAST:
                    answer = await self._forwarder.broadcast(scope, body)
                    await EncodedResponse(answer or b"{}")(scope, receive, send)
                else:
                    await self._forwarder.forward(path, body, scope, send)
        except ClientDisconnect:  # while it sent its request
            return
        finally:
            self.num_running -= 1

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        return b"".join(await read_body(scope, receive, self._options.max_body_bytes))

    async def _health(self, scope: Scope, receive: Receive) -> Response:
        return JsonResponse({"status": "ok"})

    async def _ready(self, scope: Scope, receive: Receive) -> Response:
        if self._prefill is not None and self._prefill.is_ready:
            self._awaits_prefill = False  # later, decode workers do without
        is_ready = self.fleet.is_ready and not self._awaits_prefill and not self.is_draining
        states = [{"url": worker.url, "state": describe_state(worker)} for worker in self.all_workers()]
        content = {"status": "ready" if is_ready else "draining" if self.is_draining else "waiting", "workers": states}
        return JsonResponse(content, 200 if is_ready else 503, None if is_ready else {"Retry-After": "5"})

    async def _metrics(self, scope: Scope, receive: Receive) -> Response:
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, scope: Scope, receive: Receive) -> Response:
        return JsonResponse({"object": "list", "data": list(self.fleet.models())})

    async def _workers(self, scope: Scope, receive: Receive) -> Response:
        """GET lists, POST adds, DELETE drains; the last two with ``{"url": ...}``, or ``?url=``."""
        if scope["method"] in ("POST", "DELETE"):
            url = await self._read_url(scope, receive)
            if scope["method"] == "POST":
                try:
                    self.fleet.add(url)
                except ConfigError as error:
                    raise RequestError(error.message, param="url") from error
            elif not (self.fleet.drain(url) or (self._prefill is not None and self._prefill.drain(url))):
                raise NotFound(f"{url} is no worker of this router", param="url")
        infos = [
            WorkerInfo(w.url, describe_state(w), w.reason, list(w.models), len(w.relays), w.load, self._role_of(w))
            for w in self.all_workers()
        ]
        return JsonResponse({"workers": infos})

    def all_workers(self) -> list[Worker]:
        """Prefill workers, then those that answer."""
        return [*(self._prefill or ()), *self.fleet]

    def _role_of(self, worker: Worker) -> str:
        if self._prefill is None:
            return "worker"
        return "prefill" if worker.is_prefill else "decode"

    async def _read_url(self, scope: Scope, receive: Receive) -> str:
        query: bytes = scope.get("query_string", b"")
        in_query = parse_qs(query.decode("latin-1")).get("url")
        if in_query:
            return in_query[0]
        try:
            named_worker: WorkerName = msgspec.json.decode(await self._read_body(scope, receive), type=WorkerName)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f'the body must be {{"url": "http://host:port"}}: {error}', param="url") from error
        return named_worker.url


def create_app(router: Router, options: RouterOptions) -> ASGIApp:
    """The router behind its gates; see `headrace.serving.http.app` for their order."""
    app: ASGIApp = Gates(router, open_gates(options, frozenset({"/workers"}), OPEN_PATHS))
    cors = cors_options(options)
    if cors is not None:
        app = CORSMiddleware(app, **cors)
    routes = RELAYED | {"/workers"}
    app = cast("ASGIApp", RequestLedger(app, router.metrics.http, routes, has_log=options.log_requests))
    proxies = read_proxies(options.trusted_proxies)
    if proxies:
        app = cast("ASGIApp", ProxyHeadersMiddleware(cast("Any", app), trusted_hosts=proxies))
    return app

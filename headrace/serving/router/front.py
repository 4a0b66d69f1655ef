"""`RouterFront`: what every request of the router passes, relayed or not: proxies that are trusted, CORS, gates, and
the count of requests. The order is that of `headrace.serving.http.app`."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, cast

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from headrace.base.errors import HeadraceError
from headrace.serving.http.transport.access import OPEN_PATHS, LedgerEntry, cors_options, open_gates, read_proxies
from headrace.serving.http.transport.client_request import ClientRequest
from headrace.serving.http.transport.errors import CLIENT_CLOSED_REQUEST, respond_error
from headrace.serving.http_client import RawHeaders
from headrace.serving.router.app import RELAYED, Router
from headrace.serving.router.options import RouterOptions


def run_at_once(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run middleware that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise RuntimeError("the middleware waits for something")


async def _no_app(scope: Scope, receive: Receive, send: Send) -> None:
    """The end of middleware that is only asked for its own part."""


async def _send_nothing(message: Message) -> None:
    """For middleware that changes a message and passes it on."""


async def _receive_nothing() -> Message:
    return {"type": "http.disconnect"}


def _is_preflight(scope: Scope) -> bool:
    """Whether a browser asks if it may send a request."""
    if scope["method"] != "OPTIONS":
        return False
    names = {name for name, _ in scope["headers"]}
    return b"origin" in names and b"access-control-request-method" in names


class RouterFront:
    """The `Front` of a router."""

    def __init__(self, router: Router, options: RouterOptions):
        self._router, self._metrics, self._has_log = router, router.metrics.http, options.log_requests
        self._routes = RELAYED | {"/workers"}
        self._gates = open_gates(options, frozenset({"/workers"}), OPEN_PATHS)
        cors, proxies = cors_options(options), read_proxies(options.trusted_proxies)
        self._cors = None if cors is None else CORSMiddleware(_no_app, **cors)
        self._proxies = ProxyHeadersMiddleware(cast("Any", _no_app), trusted_hosts=proxies) if proxies else None

    def begin(self, request: ClientRequest) -> None:
        """See `Front`."""
        scope = request.scope
        if self._proxies is not None:
            run_at_once(self._proxies(cast("Any", scope), cast("Any", _receive_nothing), cast("Any", _send_nothing)))
        request.entry = LedgerEntry(self._metrics, self._routes, scope, request.given, has_log=self._has_log)
        if self._cors is not None and _is_preflight(scope):
            request.respond(self._cors.preflight_response(request_headers=Headers(scope=scope)))
            return
        for gate in self._gates:
            refusal = gate.refuse(scope)
            if refusal is not None:
                self.refuse(request, refusal)
                return
        try:
            self._router.begin(request)
        except HeadraceError as error:
            self.refuse(request, error)

    def note_body(self, request: ClientRequest) -> None:
        """See `Front`; it is taken when it is whole."""

    def take(self, request: ClientRequest) -> None:
        """See `Front`."""
        try:
            self._router.take(request)
        except HeadraceError as error:
            self.refuse(request, error)

    def refuse(self, request: ClientRequest, error: HeadraceError) -> None:
        """See `Front`."""
        request.respond(respond_error(error, request.scope))

    def complete_head(self, request: ClientRequest, headers: RawHeaders) -> RawHeaders:
        """See `Front`."""
        entry = request.entry
        assert entry is not None, "a request begins before it is answered"
        if self._cors is not None and not _is_preflight(request.scope):
            message: Message = {"type": "http.response.start", "headers": headers}
            run_at_once(self._cors.send(message, _send_nothing, request_headers=Headers(scope=request.scope)))
            headers = message["headers"]
        return headers + entry.note_response(request.status)

    def end(self, request: ClientRequest) -> None:
        """See `Front`."""
        self._router.end(request)
        entry = request.entry
        assert entry is not None, "it has begun"
        if request.is_lost and not request.has_response:
            entry.status = CLIENT_CLOSED_REQUEST
        entry.close()

"""What stands before the routes, as plain ASGI: the proxy's prefix, the API key, one count (and log line) a request."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import time
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.base.config import ServerConfig
from headrace.base.errors import ConfigError, Forbidden, HeadraceError, Unauthorized
from headrace.serving.http.protocol.fields import REQUEST_ID_PATTERN
from headrace.serving.http.transport.errors import method_of, path_of, respond_error, route_of
from headrace.serving.http.transport.metrics import Metrics

logger = logging.getLogger(__name__)

REQUEST_ID = re.compile(REQUEST_ID_PATTERN)
OPEN_PATHS = frozenset({"/", "/openapi.json", "/health", "/ready", "/metrics"})
"""Served without a key, compared exactly: the page (it asks for the key), the description of the routes, and what
monitoring reads."""


class Prefix:
    """Tells the routes the path prefix of the proxy in front; it works whether the proxy strips it or not."""

    def __init__(self, app: ASGIApp, prefix: str):
        self._app = app
        self._prefix = prefix.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["root_path"] = self._prefix
        await self._app(scope, receive, send)


def check_key(key: str, name: str = "api_key") -> str:
    """The key, when it is one; raises `ConfigError` for a blank one, which anybody could send."""
    if not key.strip():
        raise ConfigError(
            f"{name} must not be empty; leave the option (and its variable in the environment) out to serve without a "
            "key",
            param=name
        )
    return key


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _brings_key(headers: Headers, key: bytes) -> bool:
    kind, _, given = headers.get("authorization", "").partition(" ")
    keys = [given if kind.lower() == "bearer" else "", headers.get("x-api-key", "")]
    return any([hmac.compare_digest(k.strip().encode("latin-1"), key) for k in keys])


def owner_of(headers: Headers) -> bytes:
    """Whom a client's stored things belong to: whoever brings the same key. Keys themselves are not kept."""
    kind, _, given = headers.get("authorization", "").partition(" ")
    key = (given if kind.lower() == "bearer" else "").strip() or headers.get("x-api-key", "").strip()
    return hashlib.sha256(key.encode("latin-1")).digest()


class AdminGate:
    """Before the routes that concern the server and everybody on it. With an admin key, only that opens them, and
    nothing else; without one they are closed, unless the server listens to this machine alone. Then pages of other
    sites that a browser here has open stay outside."""

    def __init__(self, app: ASGIApp, server: ServerConfig, paths: frozenset[str]):
        self._app, self._paths = app, paths
        self._key = (
            check_key(server.admin_api_key, "admin_api_key").strip().encode() if server.admin_api_key is not None
            else None
        )
        self._is_local = is_loopback(server.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or path_of(scope) not in self._paths:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal: HeadraceError | None = None
        if self._key is not None:
            refusal = (
                None if _brings_key(headers, self._key)
                else Unauthorized("the admin key is missing or wrong; send Authorization: Bearer KEY")
            )
        elif not self._is_local:
            refusal = Forbidden(
                "admin routes are closed: the server listens to other machines and has no --admin-api-key"
            )
        elif headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            refusal = Forbidden("admin routes are closed to pages of other sites")
        if refusal is not None:
            await respond_error(refusal, scope)(scope, receive, send)
        else:
            scope["is_admin"] = self._key is not None
            await self._app(scope, receive, send)


class KeyGate:
    """Lets a request pass that brings ``Authorization: Bearer KEY``, or ``x-api-key: KEY`` as Anthropic's clients;
    compared in constant time."""

    def __init__(self, app: ASGIApp, key: str):
        self._app = app
        self._key = key.strip().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http" or path_of(scope) in OPEN_PATHS or scope.get("is_admin")
            or _brings_key(Headers(scope=scope), self._key)
        ):
            await self._app(scope, receive, send)
            return
        await respond_error(
            Unauthorized("the API key is missing or wrong; send Authorization: Bearer KEY"), scope
        )(scope, receive, send)


def read_request_id(header: str | None) -> str | None:
    """The header ``X-Request-Id`` if it is a valid request id, else None."""
    return header if header and REQUEST_ID.fullmatch(header) else None


class RequestLedger:
    """Counts requests by method, route and status; logs a line for each when asked to. Puts the request's id on the
    answer: the client's own ``X-Request-Id``, else the one a route gave it."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str], *, has_log: bool):
        self._app, self._metrics, self._routes, self._has_log = app, metrics, routes, has_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, begin = 500, time.perf_counter()
        state = scope.setdefault("state", {})
        state["request_id"] = read_request_id(Headers(scope=scope).get("x-request-id"))

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if state["request_id"] is not None:
                    message["headers"] = [*message.get("headers", ()), (b"x-request-id", state["request_id"].encode())]
            await send(message)

        self._metrics.http_active.inc()
        try:
            await self._app(scope, receive, note_status)
        finally:
            self._metrics.http_active.dec()
            self._metrics.http_requests.labels(
                method_of(scope), route_of(path_of(scope), self._routes), str(status)
            ).inc()
            if self._has_log:
                client = scope.get("client") or ("-", 0)
                seconds, name = time.perf_counter() - begin, state["request_id"] or "-"
                logger.info(
                    "%s %s %s -> %d in %.3f s, id %s", client[0], scope["method"], quote(scope["path"]), status,
                    seconds, name
                )

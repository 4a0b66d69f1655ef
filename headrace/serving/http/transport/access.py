"""Middleware before the routes, as plain ASGI: the proxy's prefix, API keys, the count and log line of each request."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.base.errors import ConfigError, Forbidden, HeadraceError, Unauthorized
from headrace.base.option import split_list
from headrace.base.server_config import AccessConfig
from headrace.serving.http.protocol.fields import REQUEST_ID_PATTERN
from headrace.serving.http.transport.errors import (
    UnsupportedMediaType,
    is_json,
    method_of,
    path_of,
    respond_error,
    route_of,
)
from headrace.serving.http.transport.metrics import HttpMetrics
from headrace.serving.http.transport.tracing import Tracing

logger = logging.getLogger(__name__)

REQUEST_ID = re.compile(REQUEST_ID_PATTERN)
HEADER_ID = re.compile("[ -~]{1,256}")
MAX_WARNED = 16
"""Ignored fields named in a response header."""
OPEN_PATHS = frozenset({"/openapi.json", "/health", "/ready", "/ping", "/metrics"})
"""Served without a key, as are the pages for browsers, which ask the user for it; compared exactly."""


class Prefix:
    """Sets ``root_path``, the path prefix of the proxy in front. `path_of` removes the prefix from paths that have
    it, so it does not matter whether the proxy strips it."""

    def __init__(self, app: ASGIApp, prefix: str):
        self._app = app
        self._prefix = prefix.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["root_path"] = self._prefix
        await self._app(scope, receive, send)


def check_key(key: str, name: str = "api_key") -> str:
    """The key; raises `ConfigError` for a blank one, which any client could send."""
    if not key.strip():
        raise ConfigError(
            f"{name} must not be empty; leave out the option (and its environment variable) to serve without a key",
            param=name
        )
    return key


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bearer(headers: Headers) -> str:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def _has_key(headers: Headers, key: bytes) -> bool:
    """Whether ``Authorization: Bearer`` or ``x-api-key`` (Anthropic's clients) holds the key. Both are always compared,
    in constant time."""
    # A list, not a generator: ``any`` must not stop at the first match, or timing would show which header matched.
    keys = (_bearer(headers), headers.get("x-api-key", "").strip())
    # Bytes: `compare_digest` refuses non-ASCII text. Starlette decoded the headers as Latin-1.
    return any([hmac.compare_digest(k.encode("latin-1"), key) for k in keys])


def owner_of(headers: Headers) -> bytes:
    """The owner of what a client stores: the SHA-256 of its API key. Clients without a key share one owner."""
    key = _bearer(headers) or headers.get("x-api-key", "").strip()
    return hashlib.sha256(key.encode("latin-1")).digest()


@lru_cache(maxsize=64)  # most requests name the same few hosts
def _name_in(netloc: str) -> str:
    """The lower-case host name of ``name:port``; empty if there is none."""
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:  # such as an unclosed bracket
        return ""


class OwnNames:
    """The names under which a server on a loopback address is reached: those of loopback itself, ``host``, and
    ``allowed_hosts``. A browser that uses another name shows a page of another site."""

    def __init__(self, server: AccessConfig):
        self._allowed = frozenset(split_list(server.allowed_hosts.lower()))
        self._host = server.host.lower()

    def reason_against(self, headers: Headers) -> str | None:
        """Why a request must be taken for one from a page of another site; None if there is no sign of that."""
        # Browsers set these headers and pages cannot. Other clients send neither Origin nor Sec-Fetch-Site.
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return "the request comes from a page of another site"
        # DNS rebinding: the attacker's own name leads to this address, and the browser takes the page for ours.
        foreign = [host for host in headers.getlist("host") if not self._is_own(_name_in(host))]
        if foreign:
            return f"Host {foreign[0][:100]!r} is not this server's; allow its name with --allowed-hosts"
        for origin in headers.getlist("origin"):
            netloc = origin.partition("://")[2].lower()  # the scheme may differ: a proxy may speak TLS
            if netloc != headers.get("host", "none").lower() and _name_in(netloc) not in self._allowed:
                return f"Origin {origin[:100]!r} is not this server's; allow its name with --allowed-hosts"
        return None

    def is_rebound(self, host: str) -> bool:
        """Whether ``Host`` may be another site's name that leads here (DNS rebinding): a name with a dot that is not
        this server's. Addresses and names of a private network have no owner who could do that."""
        name = _name_in(host)
        is_address = name.replace(".", "").isdigit() or ":" in name
        return "." in name and not is_address and not self._is_own(name) and "*" not in self._allowed

    def _is_own(self, name: str) -> bool:
        return is_loopback(name) or name == self._host or name in self._allowed


def address_of(scope: Scope) -> str:
    """The client's address; of IPv6 the /64 network, all of whose addresses one machine may use. Empty without a
    network address, as for a Unix socket."""
    host = (scope.get("client") or ("", 0))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return str(host)
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped if mapped is not None else ipaddress.ip_network((address, 64), strict=False))
    return host


def client_of(scope: Scope, *, has_keys: bool) -> tuple[str, ...]:
    """Who sends a request, for fair shares and limits: the API key, else the address. A key that nobody checks
    (``has_keys`` is False) tells users of one address apart, but cannot get an address more than one share."""
    headers, address = Headers(scope=scope), address_of(scope)
    key = owner_of(headers).hex()[:16] if _bearer(headers) or headers.get("x-api-key", "").strip() else ""
    if key and has_keys:
        return (key,)
    return tuple(part for part in (address, key) if part)


def read_proxies(given: str) -> list[str] | str:
    """The addresses and networks of ``--trusted-proxies``, or ``*``; raises `ConfigError` for anything else."""
    proxies = split_list(given)
    if "*" in proxies:
        return "*"
    for proxy in proxies:
        try:
            ipaddress.ip_network(proxy)
        except ValueError as error:
            raise ConfigError(
                f"trusted_proxies must be addresses or networks such as 10.0.0.0/8, separated by commas; {error}",
                param="trusted_proxies"
            ) from None
    return proxies


def cors_options(server: AccessConfig) -> dict[str, Any] | None:
    """The arguments of Starlette's ``CORSMiddleware`` for ``--cors-origins``; None without origins."""
    origins = split_list(server.cors_origins)
    return None if not origins else {
        "allow_origins": origins, "allow_methods": ["*"], "allow_headers": ["*"],
        "expose_headers": ["X-Request-Id", "Retry-After", "Warning"],
    }


def check_form_origin(headers: Headers, server: AccessConfig) -> None:
    """Raise `Forbidden` for a form that a page of another site may have sent: browsers ask the server before they send
    JSON or a key for a page, but not before they send a form."""
    origin, allowed = headers.get("origin"), split_list(server.cors_origins)
    if origin is None or server.api_key is not None or "*" in allowed or origin in allowed:
        return
    is_own = headers.get("sec-fetch-site") == "same-origin"  # which pages cannot set
    if not is_own and origin.partition("://")[2].lower() != headers.get("host", "none").lower():
        raise Forbidden(f"Origin {origin[:100]!r} is not this server's; allow it with --cors-origins")


class Gate(Protocol):
    """Decides from a request's head whether it may pass."""

    def refuse(self, scope: Scope) -> HeadraceError | None:
        """Why it may not; None if it may."""


class Gates:
    """Answers with the first refusal of its gates, in their order."""

    def __init__(self, app: ASGIApp, gates: Sequence[Gate]):
        self._app, self._gates = app, gates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for gate in self._gates:
                refusal = gate.refuse(scope)
                if refusal is not None:
                    await respond_error(refusal, scope)(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def open_gates(server: AccessConfig, admin_paths: frozenset[str], open_paths: frozenset[str]) -> list[Gate]:
    """The gates of a server. `AdminGate` comes first: the others rely on its ``is_admin``."""
    gates: list[Gate] = [AdminGate(server, admin_paths)]
    if server.api_key is not None:
        gates.append(KeyGate(check_key(server.api_key), open_paths))
    elif is_loopback(server.host):
        gates.append(HostGate(server))
    return gates


class HostGate:
    """Refuses requests that a page of another site may have sent by DNS rebinding, on every route. For servers on a
    loopback address without keys, where nothing else tells such a page from the machine's own user."""

    def __init__(self, server: AccessConfig):
        self._names = OwnNames(server)

    def refuse(self, scope: Scope) -> HeadraceError | None:
        """See `Gate`."""
        if scope.get("is_admin"):  # no page has the admin key
            return None
        for name, value in scope["headers"]:
            if name == b"host" and self._names.is_rebound(host := value.decode("latin-1")):
                return Forbidden(
                    f"Host {host[:100]!r} is not this server's; allow its name with --allowed-hosts, or set an API key"
                )
        return None


class AdminGate:
    """Guards routes that affect the server and all its users. With an admin key, only that key opens them. Without one
    they are closed, unless the server listens on a loopback address; then requests from pages of other sites are
    refused, see `OwnNames`. A body must be declared as JSON, which such pages cannot do without being asked for."""

    def __init__(self, server: AccessConfig, paths: frozenset[str]):
        self._paths = paths
        key = server.admin_api_key
        self._key = None if key is None else check_key(key, "admin_api_key").strip().encode()
        self._names = OwnNames(server) if is_loopback(server.host) else None

    def refuse(self, scope: Scope) -> HeadraceError | None:
        """See `Gate`."""
        if path_of(scope) not in self._paths:
            return None
        headers = Headers(scope=scope)
        refusal = self._refusal(headers) or _refuse_media_type(headers)
        if refusal is None:
            scope["is_admin"] = self._key is not None
        return refusal

    def _refusal(self, headers: Headers) -> HeadraceError | None:
        if self._key is not None:
            if _has_key(headers, self._key):
                return None
            return Unauthorized("the admin key is missing or wrong; send Authorization: Bearer KEY")
        if self._names is None:
            return Forbidden("admin routes are closed: the server is open to the network and has no --admin-api-key")
        reason = self._names.reason_against(headers)
        return None if reason is None else Forbidden(f"admin routes are closed here: {reason}")


def _refuse_media_type(headers: Headers) -> HeadraceError | None:
    """A 415 for a body, or a declared type, that is not JSON. A request without both passes, as ``curl -X POST`` sends
    it: from a page it would have an Origin."""
    declared = headers.get("content-type")
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if (declared is None and not has_body) or is_json(declared or ""):
        return None
    return UnsupportedMediaType(f"Content-Type must be application/json, got {declared or 'none'}")


class KeyGate:
    """Requires the API key except on ``open_paths``; requests that passed `AdminGate` with the admin key need no
    other."""

    def __init__(self, key: str, open_paths: frozenset[str]):
        self._key = key.strip().encode()  # stripped like the keys in headers
        self._open_paths = open_paths

    def refuse(self, scope: Scope) -> HeadraceError | None:
        """See `Gate`."""
        if (
            path_of(scope) in self._open_paths or scope.get("is_admin")
            or _has_key(Headers(scope=scope), self._key)
        ):
            return None
        return Unauthorized("the API key is missing or wrong; send Authorization: Bearer KEY")


def read_request_id(header: str | None) -> str | None:
    """The header ``X-Request-Id`` if it can be sent back, else None."""
    return header if header and HEADER_ID.fullmatch(header) else None


def names_request(header: str) -> bool:
    """Whether a header ``X-Request-Id`` can be the id of the request itself, which is part of paths and names."""
    return REQUEST_ID.fullmatch(header) is not None


def in_log(request_id: str | None) -> str:
    """A request id as one word of a log line."""
    return request_id.replace(" ", "%20") if request_id else "-"


def _warning(names: list[str]) -> bytes:
    """The header ``Warning`` (RFC 7234, section 5.5) for ignored fields. The names are the client's: anything that does
    not belong into a quoted header value is replaced."""
    shown = [re.sub(r"[^A-Za-z0-9_.-]", "?", name[:64]) for name in names[:MAX_WARNED]]
    more = f" and {len(names) - MAX_WARNED} more" if len(names) > MAX_WARNED else ""
    return f'299 headrace "ignored unknown fields: {", ".join(shown)}{more}"'.encode()


class LedgerEntry:
    """One request in the count of requests, from its head to its end. ``given``: the first header of each name. Logs a
    line if ``has_log``."""

    __slots__ = ("_begin", "_has_log", "_is_anthropic", "_metrics", "_routes", "_scope", "_state", "status")

    def __init__(
        self, metrics: HttpMetrics, routes: frozenset[str], scope: Scope, given: Mapping[bytes, bytes], *,
        has_log: bool
    ):
        self._metrics, self._routes, self._scope, self._has_log = metrics, routes, scope, has_log
        self.status, self._begin = 500, time.perf_counter()  # 500 if there is no response
        self._state = scope.setdefault("state", {})
        self._is_anthropic = b"anthropic-version" in given
        self._state["request_id"] = read_request_id(given.get(b"x-request-id", b"").decode("latin-1"))
        metrics.num_active += 1

    def note_response(self, status: int) -> list[tuple[bytes, bytes]]:
        """A response begins; returns the headers that it has besides its own."""
        self.status, state = status, self._state
        # Read when the response starts: `open_generation` may have set it since.
        state["request_id"] = state["request_id"] or f"req_{secrets.token_hex(16)}"
        added = [(b"x-request-id", state["request_id"].encode())]
        if self._is_anthropic:
            added.append((b"request-id", added[0][1]))
        if state.get("ignored_fields"):
            added.append((b"warning", _warning(state["ignored_fields"])))
        return added

    def close(self) -> None:
        """The request has ended."""
        self._metrics.num_active -= 1
        scope = self._scope
        self._metrics.count(method_of(scope), route_of(path_of(scope), self._routes), self.status)
        if self._has_log:
            client, path = scope.get("client") or ("-", 0), quote(scope["path"])  # quoted: no forged log lines
            seconds, name = time.perf_counter() - self._begin, in_log(self._state["request_id"])
            logger.info("%s %s %s -> %d in %.3f s, id %s", client[0], scope["method"], path, self.status, seconds, name)


class RequestLedger:
    """Counts requests by method, route and status, traces them, and logs a line for each if ``has_log``. Adds
    ``X-Request-Id`` to the response (and ``Request-Id`` for Anthropic's clients, which read that): the client's own id,
    else the one that the route set, else a new one; and ``Warning`` if fields were ignored."""

    def __init__(
        self, app: ASGIApp, metrics: HttpMetrics, routes: frozenset[str], tracing: Tracing | None, *, has_log: bool
    ):
        self._app, self._metrics, self._routes, self._has_log = app, metrics, routes, has_log
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(reversed([*scope["headers"]]))
        entry = LedgerEntry(self._metrics, self._routes, scope, given, has_log=self._has_log)
        span = self._tracing.begin(scope, self._routes) if self._tracing is not None else None

        async def note_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *entry.note_response(message["status"])]
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        finally:
            entry.close()
            if self._tracing is not None and span is not None:
                self._tracing.end(span, entry.status)

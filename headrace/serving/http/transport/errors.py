"""Errors as HTTP responses: the form of the path's API, the status, ``Retry-After`` where waiting helps. Also the
errors that only HTTP has, and the names of paths and methods in metrics, traces and logs."""

from __future__ import annotations

import copy
import logging
import math
import re

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from headrace.base.errors import HeadraceError, NotFound, RequestError
from headrace.serving.http.protocol.errors import form_of

# Paths of two or more parts, with or without a drive letter, and hexadecimal addresses.
_PATH_OR_ADDRESS = re.compile(r"(?:[A-Za-z]:)?(?:[/\\][\w.@+-]+){2,}[/\\]?|\b0x[0-9a-fA-F]{4,}\b")

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
DEFAULT_RETRY_AFTER_S = 1.0
INTERNAL_ERROR = "the request failed with an internal error; see the server's log"
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})


class BodyTooLarge(RequestError):
    """The body is larger than ``max_body_bytes``."""

    status = 413
    kind = "body_too_large"


class BodyTooSlow(RequestError):
    """The client stopped sending in the middle of a body."""

    status = 408
    kind = "body_too_slow"


class UnsupportedMediaType(RequestError):
    """The body is not declared as plain JSON."""

    status = 415
    kind = "unsupported_media_type"


def is_json(media_type: str) -> bool:
    """Whether a ``Content-Type`` declares JSON."""
    declared = media_type.partition(";")[0].strip().lower()
    return declared == "application/json" or (declared.startswith("application/") and declared.endswith("+json"))


class ModelNotFound(NotFound):
    """The request names a model that is not served."""

    kind = "model_not_found"


class JsonResponse(Response):
    """A response whose content msgspec encodes."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)


class EncodedResponse(JsonResponse):
    """A response whose content is already encoded JSON, as bytes."""

    def render(self, content: object) -> bytes:
        assert isinstance(content, bytes)
        return content


def path_of(scope: Scope) -> str:
    """The path without the proxy's prefix."""
    path, prefix = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path[len(prefix) :] if prefix and path.startswith(prefix + "/") else path


def route_of(path: str, routes: frozenset[str]) -> str:
    """The route template of a path, or ``unmatched``: metric labels must stay few, so paths themselves are no labels.
    A template with parameters matches by the text before its first ``{``."""
    if path in routes:
        return path
    return next((r for r in routes if "{" in r and path.startswith(r.partition("{")[0])), "unmatched")


def method_of(scope: Scope) -> str:
    """The method, or ``other``: clients may invent methods, and a metric's labels must stay few."""
    method: str = scope["method"]
    return method if method in METHODS else "other"


def conceal(error: HeadraceError) -> HeadraceError:
    """The error as clients see it: internal errors (500 and above) without paths and addresses, which the log shows."""
    if error.status < 500:
        return error
    # A copy: the log shows the original.
    concealed = copy.copy(error)
    concealed.message = _PATH_OR_ADDRESS.sub("...", error.message)
    return concealed


def respond_error(error: HeadraceError, scope: Scope) -> Response:
    """The response to a request that failed before anything was sent, in the form of its path."""
    headers = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after or DEFAULT_RETRY_AFTER_S)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is not wanted
    return JsonResponse(form_of(path_of(scope)).describe(conceal(error)), error.status, headers)


def end_of_stream(error: HeadraceError, scope: Scope, media_type: str) -> bytes | None:
    """The error event that ends a stream whose server was lost, in the form of its path; None if a body of this type
    has no place for an error."""
    body = bytes(respond_error(error, scope).body)
    if media_type.startswith("application/x-ndjson"):
        return body + b"\n"
    if not media_type.startswith("text/event-stream"):
        return None
    named = path_of(scope).startswith("/v1/messages")
    return b"event: error\ndata: " + body + b"\n\n" if named else b"data: " + body + b"\n\ndata: [DONE]\n\n"


async def _respond_typed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceError)
    # 503 and 504 are expected under load and during restarts.
    if error.status >= 500 and error.status not in (503, 504):
        logger.error("request failed: %s", error.message)
    return respond_error(error, request.scope)


def _hint(request: Request) -> str:
    """The likely path, for clients whose base URL has ``/v1`` twice or not at all, or ends with a slash."""
    path = path_of(request.scope).rstrip("/")
    routes = {route.path for route in request.app.routes if isinstance(route, Route)} - {"/"}
    found = next((near for near in (path, f"/v1{path}", path.removeprefix("/v1")) if near in routes), None)
    return f"; did you mean {found}?" if found else ""


async def _respond_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no {request.url.path}{_hint(request)}"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed here"
    plain = HeadraceError(message)
    plain.status = error.status_code
    response = respond_error(plain, request.scope)
    response.headers.update(error.headers or {})
    return response


async def _respond_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _respond_internal(request: Request, _error: Exception) -> Response:
    return respond_error(HeadraceError(INTERNAL_ERROR), request.scope)


def install_handlers(app: Starlette) -> None:
    """Respond to every error in the form of its path."""
    app.add_exception_handler(HeadraceError, _respond_typed)
    app.add_exception_handler(HTTPException, _respond_http)
    app.add_exception_handler(ClientDisconnect, _respond_disconnect)
    app.add_exception_handler(Exception, _respond_internal)

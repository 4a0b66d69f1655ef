"""`form_of`: how errors are worded on a path. Each dialect has its own shape; all other paths have OpenAI's.

What a request is called in metrics, spans, logs and dumps: its path as routes see it, its route, its method.

Errors as HTTP answers: one shape, the right status, ``Retry-After`` where waiting helps. Also the errors only HTTP
knows."""

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
from starlette.types import Scope

from headrace.base.errors import HeadraceError, NotFound, RequestError
from headrace.serving.http.protocol.errors import (
    form_of,
)


def path_of(scope: Scope) -> str:
    """The path as routes see it: without the prefix of the proxy."""
    path, prefix = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path[len(prefix) :] if prefix and path.startswith(prefix + "/") else path


def route_of(path: str, routes: frozenset[str]) -> str:
    """The route that a path belongs to, or ``unmatched``."""
    if path in routes:
        return path
    return next((r for r in routes if "{" in r and path.startswith(r.partition("{")[0])), "unmatched")


def method_of(scope: Scope) -> str:
    """The method, or ``other``: clients may invent any number of them, a metric's labels must stay few."""
    known = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")
    return scope["method"] if scope["method"] in known else "other"


_PLACES = re.compile(r"(?:[A-Za-z]:)?(?:[/\\][\w.@+-]+){2,}[/\\]?|\b0x[0-9a-fA-F]{4,}\b")
logger = logging.getLogger(__name__)
CLIENT_CLOSED_REQUEST = 499
DEFAULT_RETRY_AFTER_S = 1.0
SERVER_FAULT = "the server failed on this request; its log tells why"


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


class ModelNotFound(NotFound):
    """The request names a model that is not served."""

    kind = "model_not_found"


class JsonResponse(Response):
    """A msgspec-encoded answer."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)


class EncodedResponse(JsonResponse):
    """An answer that is JSON already."""

    def render(self, content: object) -> bytes:
        assert isinstance(content, bytes)
        return content


def conceal(error: HeadraceError) -> HeadraceError:
    """The error as clients may read it: what a library said of a fault of ours loses paths and addresses; the log has
    them."""
    if error.status < 500:
        return error
    told = copy.copy(error)
    told.message = _PLACES.sub("...", error.message)
    return told


def respond_error(error: HeadraceError, scope: Scope) -> Response:
    """The answer to a request that failed before anything was sent, in the form of its path."""
    headers = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after or DEFAULT_RETRY_AFTER_S)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["Connection"] = "close"  # nobody wants the rest of the body
    return JsonResponse(form_of(path_of(scope)).describe(conceal(error)), error.status, headers)


async def _answer_typed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceError)
    if error.status >= 500 and error.status not in (503, 504):
        logger.error("request failed: %s", error.message)
    return respond_error(error, request.scope)


def _hint(request: Request) -> str:
    """The path that is meant by clients whose base URL has ``/v1`` once too often or not at all, or that end it with a
    slash."""
    path = path_of(request.scope).rstrip("/")
    routes = {getattr(route, "path", "") for route in request.app.routes} - {"", "/"}
    found = next((near for near in (path, f"/v1{path}", path.removeprefix("/v1")) if near in routes), None)
    return f"; did you mean {found}?" if found else ""


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {
        404: f"there is no {request.url.path}{_hint(request)}", 405: f"{request.method} is not allowed here"
    }.get(error.status_code, str(error.detail))
    plain = HeadraceError(message)
    plain.status = error.status_code
    answer = respond_error(plain, request.scope)
    answer.headers.update(error.headers or {})
    return answer


async def _answer_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _answer_fault(request: Request, _error: Exception) -> Response:
    return respond_error(HeadraceError(SERVER_FAULT), request.scope)


def install_handlers(app: Starlette) -> None:
    """Make every error of the application answer in the form of its path."""
    app.add_exception_handler(HeadraceError, _answer_typed)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(ClientDisconnect, _answer_gone)
    app.add_exception_handler(Exception, _answer_fault)

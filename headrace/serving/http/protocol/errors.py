"""Error bodies of every API: OpenAI's, Anthropic's and Ollama's, and which path uses which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from msgspec import UNSET, Struct, UnsetType

from headrace.base.errors import ContextLengthExceeded, HeadraceError, UnsupportedFeature


class ErrorDetail(Struct):
    """``type`` is OpenAI's error class, ``param`` the offending field, ``code`` the exact kind."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(Struct):
    """OpenAI's error body; also that of all paths without a form of their own."""

    error: ErrorDetail


CODE_OF_STATUS = {401: "invalid_api_key"}
TYPE_OF_STATUS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def describe_error(error: HeadraceError) -> ErrorResponse:
    """The error in OpenAI's form."""
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = TYPE_OF_STATUS.get(error.status, default)
    # no code if it would only repeat the type
    code = CODE_OF_STATUS.get(error.status, None if error.kind in (kind, "internal_error") else error.kind)
    return ErrorResponse(ErrorDetail(error.message, kind, error.param, code))


class MessagesErrorDetail(Struct):
    """Anthropic's error class and the message."""

    type: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET


class MessagesError(Struct, tag_field="type", tag="error"):
    """Anthropic's error, as body or event."""

    error: MessagesErrorDetail


ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}


class ThreadsNotServed(UnsupportedFeature):
    """The client wants the server to keep the conversation. Clients look for these ``details`` and go on without."""

    details: ClassVar[dict[str, Any]] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def describe_messages_error(error: HeadraceError) -> MessagesError:
    """The error in Anthropic's form."""
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    details = error.details if isinstance(error, ThreadsNotServed) else UNSET
    # coding agents search for these words before they shorten a conversation and retry
    message = f"prompt is too long: {error.message}" if isinstance(error, ContextLengthExceeded) else error.message
    return MessagesError(MessagesErrorDetail(ERROR_TYPES.get(error.status, default), message, details))


class OllamaError(Struct):
    """Ollama's error, as body or line."""

    error: str


def describe_ollama_error(error: HeadraceError) -> OllamaError:
    """The error in Ollama's form."""
    return OllamaError(error.message)


@dataclass(frozen=True)
class ErrorForm:
    """An error body's type, and the function that makes it."""

    record: type
    describe: Callable[[HeadraceError], Any]


OPENAI = ErrorForm(ErrorResponse, describe_error)
BY_PREFIX = {
    # Prefixes of paths, so that unmatched paths below them have the form that their clients can read, too.
    "/v1/messages": ErrorForm(MessagesError, describe_messages_error),
    "/api/": ErrorForm(OllamaError, describe_ollama_error),
}


def form_of(path: str) -> ErrorForm:
    """The error form of ``path`` (without the proxy's prefix)."""
    return next((form for prefix, form in BY_PREFIX.items() if path.startswith(prefix)), OPENAI)

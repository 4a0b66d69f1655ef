"""Error bodies of every API: OpenAI's, Anthropic's and Ollama's, and which path uses which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from msgspec import UNSET, Struct, UnsetType

from headrace.base.errors import ContextLengthExceeded, HeadraceError, UnsupportedFeature


class ErrorDetail(Struct):
    """``type`` is OpenAI's class of error, ``param`` the offending field, ``code`` the precise kind."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(Struct):
    """Every error, on every route."""

    error: ErrorDetail


CODE_OF_STATUS = {401: "invalid_api_key"}
TYPE_OF_STATUS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def describe_error(error: HeadraceError) -> ErrorAnswer:
    """The error as clients of OpenAI's API know it."""
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = TYPE_OF_STATUS.get(error.status, default)
    code = CODE_OF_STATUS.get(error.status, None if error.kind in (kind, "internal_error") else error.kind)
    return ErrorAnswer(ErrorDetail(error.message, kind, error.param, code))


class MessagesErrorDetail(Struct):
    """Anthropic's class of error, and what is wrong."""

    type: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET


class MessagesError(Struct, tag_field="type", tag="error"):
    """An error, as the body or as an event."""

    error: MessagesErrorDetail


ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error", 504: "timeout_error",
}


class ThreadsNotServed(UnsupportedFeature):
    """A client asks that the server keep the conversation. Told by its ``details``, it goes on without."""

    details: ClassVar[dict[str, Any]] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def describe_messages_error(error: HeadraceError) -> MessagesError:
    """The error as Anthropic's clients know it."""
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    details = error.details if isinstance(error, ThreadsNotServed) else UNSET
    # coding agents look for these words
    message = f"prompt is too long: {error.message}" if isinstance(error, ContextLengthExceeded) else error.message
    return MessagesError(MessagesErrorDetail(ERROR_TYPES.get(error.status, default), message, details))


class OllamaError(Struct):
    """An error, as the body or as a line."""

    error: str


def describe_ollama_error(error: HeadraceError) -> OllamaError:
    """The error as Ollama's clients know it."""
    return OllamaError(error.message)


@dataclass(frozen=True)
class ErrorForm:
    """The record of an error's body, and how it is made."""

    record: type
    describe: Callable[[HeadraceError], Any]


OPENAI = ErrorForm(ErrorAnswer, describe_error)

BY_PREFIX = {
    "/v1/messages": ErrorForm(MessagesError, describe_messages_error),
    "/api/": ErrorForm(OllamaError, describe_ollama_error),
}


def form_of(path: str) -> ErrorForm:
    """The form of errors on ``path``, which is as routes see it."""
    return next((form for prefix, form in BY_PREFIX.items() if path.startswith(prefix)), OPENAI)

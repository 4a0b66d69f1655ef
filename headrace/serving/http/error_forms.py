"""`form_of`: how errors are worded on a path. Each dialect has its own shape; all other paths have OpenAI's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from headrace.base.errors import HeadraceError
from headrace.serving.http.protocol.answers import ErrorAnswer, describe_error
from headrace.serving.http.protocol.messages import MessagesError, describe_messages_error
from headrace.serving.http.protocol.ollama import OllamaError, describe_ollama_error


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


def path_of(scope: Scope) -> str:
    """The path as routes see it: without the prefix of the proxy."""
    path, prefix = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path[len(prefix) :] if prefix and path.startswith(prefix + "/") else path

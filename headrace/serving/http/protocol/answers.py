"""Parts of answers that several routes share: usage, errors, models, prompt logprobs."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from headrace.base.errors import HeadraceError


class PromptTokensDetails(Struct):
    """How many prompt tokens came from the prefix cache."""

    cached_tokens: int = 0


class Usage(Struct):
    """Token counts of a request, its ``n`` choices and prompts added up; every prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        """The record from its three counts."""
        details = PromptTokensDetails(cached_tokens)
        return cls(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


class PromptLogprob(Struct):
    """One candidate at a prompt position; ``rank`` is 1 for the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobsJson = dict[str, PromptLogprob]
"""Candidates of one prompt position by token id."""


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


class ModelCard(Struct):
    """A served model. ``task``: it generates text, makes embeddings, or tells classes apart."""

    id: str
    created: int
    max_model_len: int
    root: str
    task: Literal["generate", "embed", "classify"] = "generate"
    object: Literal["model"] = "model"
    owned_by: str = "headrace"


class ModelList(Struct):
    """All served models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"

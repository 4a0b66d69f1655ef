"""``/v1/completions``: the request and its answers."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from headrace.serving.http.protocol.answers import PromptLogprobsJson, Usage
from headrace.serving.http.protocol.fields import Choices, NumTop, StopFields, TokenId

DEFAULT_MAX_TOKENS = 16
PromptItem = str | TokenId | list[TokenId]
Prompt = str | Annotated[list[PromptItem], Meta(min_length=1)]


class CompletionRequest(StopFields, kw_only=True, forbid_unknown_fields=True):
    """Text or token ids to continue; ``prompt`` is a string, token ids, or a list of either. ``echo`` puts the prompt
    before the output; with ``max_tokens`` 0 nothing comes after it. ``best_of`` must equal ``n``; ``suffix`` must be
    empty."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: NumTop | None = None
    best_of: Choices | None = None
    suffix: Annotated[str, Meta(max_length=0)] | None = None


class CompletionLogprobs(Struct):
    """Parallel lists, one entry a token; ``text_offset`` counts characters from the start of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    """One answer, or with streaming its news. Choice ``i * n + j`` is the j-th of prompt i."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[PromptLogprobsJson | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct):
    """The whole answer, or one server-sent event of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET

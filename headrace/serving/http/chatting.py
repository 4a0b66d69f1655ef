"""`prepare_chat`: from one checked conversation to what the engine is asked and how its output is read. Every dialect
that answers conversations is translated to `ChatRequest` and comes through here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request

from headrace.base.errors import RequestError
from headrace.base.sampling import SamplingParams
from headrace.service.client.prompts import encode_prompt
from headrace.service.tokenization import LONG_TEXT
from headrace.serving.http.answering import AnswerPlan, plan_answer
from headrace.serving.http.context import AppContext
from headrace.serving.http.conversation import render_conversation
from headrace.serving.http.generation import Ask, Prompt
from headrace.serving.http.protocol.chat import ChatRequest
from headrace.serving.http.sampling import given_request_id, pick_request_id, sampling_params
from headrace.serving.http.structure import grammar_field

SPECIALS = 8
"""Tokens beyond one a byte that a prompt may have."""


@dataclass(frozen=True)
class Chat:
    """A conversation ready to be generated for. ``is_capped``: the context leaves less room than ``max_tokens``."""

    ask: Ask
    plan: AnswerPlan
    is_capped: bool = False


def _limit(body: ChatRequest) -> int | None:
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise RequestError("max_tokens and max_completion_tokens are the same limit; give one", param="max_tokens")
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _params(body: ChatRequest, context: AppContext) -> SamplingParams:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    return sampling_params(body, context.facts().default_sampling, max_tokens=_limit(body), logprobs=num_top)


async def _fit(
    context: AppContext, prompt: str, params: SamplingParams, *, add_special_tokens: bool
) -> tuple[Prompt, bool]:
    """``(the prompt, by its ids if they were needed, whether max_tokens was lowered to the room that the context
    leaves)``."""
    limit, asked = context.facts().max_model_len, params.max_tokens
    if asked is None or len(prompt.encode()) + SPECIALS + asked <= limit:
        return prompt, False
    encode = partial(encode_prompt, prompt, context.client.tokenizer, add_special_tokens=add_special_tokens, most=limit)
    ids = await asyncio.to_thread(encode) if len(prompt) > LONG_TEXT else encode()
    room = limit - len(ids)
    if 0 < room < asked:
        params.max_tokens = room
    return ids, params.max_tokens != asked


async def prepare_chat(
    request: Request, context: AppContext, body: ChatRequest, *, id_prefix: str, fits: bool = False
) -> Chat:
    """Render and plan ``body``. ``fits``: more ``max_tokens`` than there is room for are lowered, not refused. Raises
    typed errors for what cannot be served, before anything is submitted."""
    context.check_available()
    context.check_model(body.model)
    params = _params(body, context)
    prompt = await render_conversation(context, body)
    plan = plan_answer(context, body, prompt)
    has_special = bool(body.add_special_tokens)  # templates write the special tokens themselves
    asked, is_capped = await _fit(context, prompt, params, add_special_tokens=has_special) if fits else (prompt, False)
    ask = Ask(
        request_id=pick_request_id(given_request_id(body), request, id_prefix),
        prompts=[asked],
        params=[plan.extend(params)],
        namespace=body.cache_salt or "",
        priority=body.priority or 0,
        deadline_s=body.deadline_s,
        add_special_tokens=has_special,
        truncate=body.truncate_prompt_tokens,
        grammar_field=lambda: grammar_field(body) or "tools",
    )
    return Chat(ask, plan, is_capped)

"""`prepare_chat`: from one checked conversation to what the engine is asked and how its output is read. Every dialect that
answers conversations is translated to `ChatRequest` and comes through here."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from headrace.base.errors import RequestError
from headrace.base.sampling import SamplingParams
from headrace.serving.http.answering import AnswerPlan, plan_answer
from headrace.serving.http.context import AppContext
from headrace.serving.http.conversation import render_conversation
from headrace.serving.http.generation import Ask
from headrace.serving.http.protocol.chat import ChatRequest
from headrace.serving.http.sampling import given_request_id, pick_request_id, sampling_params


@dataclass(frozen=True)
class Chat:
    """A conversation ready to be generated for."""

    ask: Ask
    plan: AnswerPlan


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


async def prepare_chat(request: Request, context: AppContext, body: ChatRequest, *, id_prefix: str) -> Chat:
    """Render and plan ``body``. Raises typed errors for what cannot be served, before anything is submitted."""
    context.check_available()
    context.check_model(body.model)
    params = _params(body, context)
    prompt = await render_conversation(context, body)
    plan = plan_answer(context, body, prompt)
    ask = Ask(
        request_id=pick_request_id(given_request_id(body), request, id_prefix),
        prompts=[prompt],
        params=[plan.extend(params)],
        namespace=body.cache_salt or "",
        priority=body.priority or 0,
        deadline_s=body.deadline_s,
        add_special_tokens=bool(body.add_special_tokens),  # templates write the special tokens themselves
    )
    return Chat(ask, plan)

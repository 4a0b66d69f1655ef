"""``/v1/chat/completions``."""

from __future__ import annotations

import time

from msgspec import UNSET
from starlette.requests import Request

from headrace.base.errors import RequestError
from headrace.base.sampling import SamplingParams
from headrace.serving.http.answering import plan_answer
from headrace.serving.http.body import JsonBody
from headrace.serving.http.chat_answers import ChatEvents, whole_choice
from headrace.serving.http.context import AppContext, context_of
from headrace.serving.http.conversation import render_conversation
from headrace.serving.http.endpoint import Endpoint
from headrace.serving.http.errors import JsonResponse
from headrace.serving.http.generation import Ask, collect_generation
from headrace.serving.http.logprobs import TokenNames, prompt_logprobs_json
from headrace.serving.http.protocol.chat import ChatChunk, ChatCompletion, ChatRequest
from headrace.serving.http.sampling import check_stream_options, given_request_id, pick_request_id, sampling_params
from headrace.serving.http.stream import EventStream, start_stream

BODY = JsonBody(ChatRequest)


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


async def create_chat_completion(request: Request) -> JsonResponse | EventStream:
    """Answer a conversation."""
    context = context_of(request)
    body = await BODY.read(request, context.server.max_body_bytes)
    context.check_available()
    context.check_model(body.model)
    check_stream_options(body)
    params = _params(body, context)
    prompt = await render_conversation(context, body)
    plan = plan_answer(context, body, prompt)
    ask = Ask(
        request_id=pick_request_id(given_request_id(body), request, "chatcmpl-"),
        prompts=[prompt],
        params=[plan.extend(params)],
        namespace=body.cache_salt or "",
        priority=body.priority or 0,
        deadline_s=body.deadline_s,
        add_special_tokens=bool(body.add_special_tokens),  # templates write the special tokens themselves
    )
    names = TokenNames(context.client.tokenizer)
    if body.stream:
        return await start_stream(request, ask, lambda g: ChatEvents(body, g, plan, context.model_name, names))
    generation, (output,) = await collect_generation(request, ask)
    return JsonResponse(ChatCompletion(
        id=ask.request_id, created=int(time.time()), model=context.model_name,
        choices=[whole_choice(c, plan, names, has_ids=bool(body.return_token_ids)) for c in output.outputs],
        usage=generation.usage(),
        prompt_logprobs=prompt_logprobs_json(output.prompt_logprobs, names) if output.prompt_logprobs else UNSET,
        prompt_token_ids=output.prompt_token_ids if body.return_token_ids else UNSET,
    ))


ENDPOINTS = (
    Endpoint(
        path="/v1/chat/completions", methods=("POST",), handler=create_chat_completion, tag="openai", doc="Answer a conversation.",
        body=BODY, answer=ChatCompletion, event=ChatChunk, errors=(404, 429, 503, 504),
    ),
)

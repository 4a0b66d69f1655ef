"""``/v1/chat/completions``."""

from __future__ import annotations

import time

from msgspec import UNSET
from starlette.requests import Request

from headrace.serving.http.body import JsonBody
from headrace.serving.http.chat_answers import ChatEvents, whole_choice
from headrace.serving.http.chatting import prepare_chat
from headrace.serving.http.context import context_of
from headrace.serving.http.endpoint import Endpoint
from headrace.serving.http.errors import JsonResponse
from headrace.serving.http.generation import collect_generation
from headrace.serving.http.logprobs import TokenNames, prompt_logprobs_json
from headrace.serving.http.protocol.chat import ChatChunk, ChatCompletion, ChatRequest
from headrace.serving.http.sampling import check_stream_options
from headrace.serving.http.stream import EventStream, start_stream

BODY = JsonBody(ChatRequest)


async def create_chat_completion(request: Request) -> JsonResponse | EventStream:
    """Answer a conversation."""
    context = context_of(request)
    body = await BODY.read(request, context.server.max_body_bytes)
    check_stream_options(body)
    chat = await prepare_chat(request, context, body, id_prefix="chatcmpl-")
    ask, plan = chat.ask, chat.plan
    names = TokenNames(context.client.tokenizer)
    if body.stream:
        return await start_stream(request, ask, lambda g: ChatEvents(body, g, plan, context.model_name, names))
    generation, (output,) = await collect_generation(request, ask)
    return await generation.answer(lambda: ChatCompletion(
        id=ask.request_id, created=int(time.time()), model=context.model_name,
        choices=[whole_choice(c, plan, names, has_ids=bool(body.return_token_ids)) for c in output.outputs],
        usage=generation.usage(),
        prompt_logprobs=prompt_logprobs_json(output.prompt_logprobs, names) if output.prompt_logprobs else UNSET,
        prompt_token_ids=output.prompt_token_ids if body.return_token_ids else UNSET,
    ))


ENDPOINTS = (
    Endpoint(
        path="/v1/chat/completions", methods=("POST",), handler=create_chat_completion, tag="openai",
        doc="Answer a conversation.",
        body=BODY, answer=ChatCompletion, event=ChatChunk, errors=(404, 429, 503, 504),
    ),
)

"""``/v1/responses``: OpenAI's newer way to ask. Nothing is stored between requests."""

from __future__ import annotations

from collections import deque

from starlette.requests import Request

from headrace.serving.http.body import JsonBody
from headrace.serving.http.chatting import prepare_chat
from headrace.serving.http.context import context_of
from headrace.serving.http.dialects.response_answers import ResponseEvents, ResponseWriter
from headrace.serving.http.dialects.responses import read_response
from headrace.serving.http.endpoint import Endpoint
from headrace.serving.http.errors import JsonResponse
from headrace.serving.http.generation import collect_generation
from headrace.serving.http.protocol.responses import Response, ResponseEvent, ResponsesRequest
from headrace.serving.http.stream import EventStream, start_stream

BODY = JsonBody(ResponsesRequest)


async def create_response(request: Request) -> JsonResponse | EventStream:
    """Answer a conversation."""
    context = context_of(request)
    body = await BODY.read(request, context.server.max_body_bytes)
    chat = await prepare_chat(request, context, read_response(body), id_prefix="resp_")
    writer = ResponseWriter(body, chat.plan, chat.ask.request_id, context.model_name)
    if body.stream:
        return await start_stream(request, chat.ask, lambda g: ResponseEvents(writer, g))
    generation, (output,) = await collect_generation(request, chat.ask)
    deque(writer.write(output.outputs[0]), maxlen=0)
    return JsonResponse(writer.response(generation))


ENDPOINTS = (
    Endpoint(
        path="/v1/responses", methods=("POST",), handler=create_response, tag="openai", doc="Answer a conversation, as items.",
        body=BODY, answer=Response, event=ResponseEvent, errors=(404, 429, 503, 504),
    ),
)

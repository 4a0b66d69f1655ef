"""``/v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's dialect."""

from __future__ import annotations

from starlette.requests import Request

from headrace.serving.http.body import JsonBody
from headrace.serving.http.chatting import prepare_chat
from headrace.serving.http.context import context_of
from headrace.serving.http.conversation import count_prompt
from headrace.serving.http.dialects.message_answers import MessageEvents, whole_message
from headrace.serving.http.dialects.messages import read_messages, read_prompt
from headrace.serving.http.endpoint import Endpoint
from headrace.serving.http.errors import JsonResponse
from headrace.serving.http.generation import collect_generation
from headrace.serving.http.protocol.messages import CountRequest, Message, MessagesRequest, StreamEvent, TokenCount
from headrace.serving.http.stream import EventStream, start_stream

BODY = JsonBody(MessagesRequest)
COUNT_BODY = JsonBody(CountRequest)


async def create_message(request: Request) -> JsonResponse | EventStream:
    """Answer a conversation."""
    context = context_of(request)
    body = await BODY.read(request, context.server.max_body_bytes)
    chat = await prepare_chat(request, context, read_messages(body), id_prefix="msg_", fits=True)
    if body.stream:
        return await start_stream(request, chat.ask, lambda g: MessageEvents(g, chat, context.model_name))
    generation, (output,) = await collect_generation(request, chat.ask)
    return JsonResponse(whole_message(context.model_name, output.outputs[0], chat, generation.usage()))


async def count_tokens(request: Request) -> JsonResponse:
    """The length of a conversation's prompt."""
    context = context_of(request)
    body = await COUNT_BODY.read(request, context.server.max_body_bytes)
    context.check_model(body.model)
    return JsonResponse(TokenCount(await count_prompt(context, read_prompt(body))))


ENDPOINTS = (
    Endpoint(
        path="/v1/messages", methods=("POST",), handler=create_message, tag="anthropic",
        doc="Answer a conversation, in Anthropic's dialect.",
        body=BODY, answer=Message, event=StreamEvent, errors=(404, 429, 503, 504),
    ),
    Endpoint(
        path="/v1/messages/count_tokens", methods=("POST",), handler=count_tokens, tag="anthropic",
        doc="Count the tokens of a conversation.",
        body=COUNT_BODY, answer=TokenCount, errors=(404, 503),
    ),
)

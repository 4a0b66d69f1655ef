"""``/v1/responses``: OpenAI's newer way to ask. Answers are kept between requests only when the server was started
so."""

from __future__ import annotations

from collections import deque
from typing import NoReturn

import msgspec
from starlette.requests import Request

from headrace.base.errors import NotFound, RequestError, UnsupportedFeature
from headrace.serving.http.access import owner_of
from headrace.serving.http.body import JsonBody
from headrace.serving.http.chatting import prepare_chat
from headrace.serving.http.context import AppContext, context_of
from headrace.serving.http.conversation import count_prompt
from headrace.serving.http.dialects.response_answers import ResponseEvents, ResponseWriter
from headrace.serving.http.dialects.responses import read_response
from headrace.serving.http.dialects.stored_responses import MAX_PAGE, Keeper, list_input, read_history
from headrace.serving.http.endpoint import Endpoint
from headrace.serving.http.errors import EncodedResponse, JsonResponse
from headrace.serving.http.generation import collect_generation
from headrace.serving.http.logprobs import TokenNames
from headrace.serving.http.protocol.responses import (
    DeletedResponse,
    InputCount,
    ItemList,
    Response,
    ResponseEvent,
    ResponsesRequest,
)
from headrace.serving.http.response_store import StoredResponse, Turn
from headrace.serving.http.stream import EventStream, start_stream

BODY = JsonBody(ResponsesRequest)
SWITCH = "start the server with --responses-store MIB to keep answers"


class PreviousNotFound(RequestError):
    """The answer to go on from is not there, or another client's."""

    kind = "previous_response_not_found"


async def create_response(request: Request) -> JsonResponse | EventStream:
    """Answer a conversation."""
    context = context_of(request)
    body = await BODY.read(request, context.server.max_body_bytes)
    owner, store = owner_of(request.headers), context.responses
    previous = _find_previous(context, owner, body.previous_response_id)
    chat = await prepare_chat(request, context, read_response(body, read_history(previous)), id_prefix="resp_")
    keeper = Keeper(store, owner, body, previous) if store.is_open and body.store is not False else None
    names = TokenNames(context.client.tokenizer)
    writer = ResponseWriter(
        body, chat.plan, chat.ask.request_id, context.model_name, names, owner=owner, is_kept=keeper is not None
    )
    store.note_running(chat.ask.request_id, writer)
    if body.stream:
        return await start_stream(
            request, chat.ask, lambda g: ResponseEvents(writer, g, keeper.keep if keeper else None)
        )
    generation, (output,) = await collect_generation(request, chat.ask)
    deque(writer.write(output.outputs[0]), maxlen=0)
    response = writer.response(generation)
    if keeper is not None:
        keeper.keep(response)
    return JsonResponse(response)


async def count_input(request: Request) -> JsonResponse:
    """The length of a conversation's prompt."""
    context = context_of(request)
    body = await BODY.read(request, context.server.max_body_bytes)
    context.check_model(body.model)
    previous = _find_previous(context, owner_of(request.headers), body.previous_response_id)
    return JsonResponse(InputCount(await count_prompt(context, read_response(body, read_history(previous)))))


def _find_previous(context: AppContext, owner: bytes, response_id: str | None) -> Turn | None:
    if response_id is None:
        return None
    if not context.responses.is_open:
        raise UnsupportedFeature(
            f"previous_response_id: answers are not stored here; send the items so far as input, or {SWITCH}",
            param="previous_response_id"
        )
    stored = context.responses.find(owner, response_id)
    if stored is None:
        raise PreviousNotFound(
            f"the answer {response_id!r} is not stored (any more); send the items so far as input",
            param="previous_response_id"
        )
    return stored.turn


def _refuse_missing(context: AppContext, response_id: str) -> NoReturn:
    hint = "" if context.responses.is_open else f": {SWITCH}"
    raise NotFound(f"the answer {response_id!r} is not stored{hint}", param="response_id")


def _find_stored(request: Request) -> StoredResponse:
    context, response_id = context_of(request), request.path_params["response_id"]
    stored = context.responses.find(owner_of(request.headers), response_id)
    return stored if stored is not None else _refuse_missing(context, response_id)


async def show_response(request: Request) -> JsonResponse | EncodedResponse:
    """An answer again, or as far as it has come."""
    context, response_id = context_of(request), request.path_params["response_id"]
    for name in ("stream", "starting_after"):
        if request.query_params.get(name, "false") != "false":
            raise UnsupportedFeature(f"{name}: a stored answer is not streamed again", param=name)
    writer = context.responses.find_running(owner_of(request.headers), response_id)
    if writer is not None and writer.is_running:
        return JsonResponse(writer.response())
    return EncodedResponse(_find_stored(request).body)


async def delete_response(request: Request) -> JsonResponse:
    """Forget an answer."""
    context, response_id = context_of(request), request.path_params["response_id"]
    if not context.responses.drop(owner_of(request.headers), response_id):
        _refuse_missing(context, response_id)
    return JsonResponse(DeletedResponse(response_id))


async def cancel_response(request: Request) -> JsonResponse | EncodedResponse:
    """End an answer on its way. Cancelling it again changes nothing."""
    context, response_id = context_of(request), request.path_params["response_id"]
    writer = context.responses.find_running(owner_of(request.headers), response_id)
    if writer is not None and writer.is_running:
        context.abort(response_id)
        return JsonResponse(msgspec.structs.replace(writer.response(), status="cancelled"))
    stored = _find_stored(request)
    if msgspec.json.decode(stored.body, type=_Status).status != "cancelled":
        raise RequestError(f"the answer {response_id!r} has ended already", param="response_id")
    return EncodedResponse(stored.body)


class _Status(msgspec.Struct):
    """What cancelling needs to know of a stored answer."""

    status: str


async def list_input_items(request: Request) -> JsonResponse:
    """What an answer is an answer to."""
    given = request.query_params
    limit, order = given.get("limit", "20"), given.get("order", "desc")
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= MAX_PAGE:
        raise RequestError(f"limit must be a number from 1 to {MAX_PAGE}", param="limit")
    if order not in ("asc", "desc"):
        raise RequestError("order must be asc or desc", param="order")
    stored = _find_stored(request)
    items = list_input(
        request.path_params["response_id"], stored.turn, limit=int(limit), is_newest_first=order == "desc",
        after=given.get("after")
    )
    return JsonResponse(items)


BY_ID = "/v1/responses/{response_id}"
PAGING = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}, "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string"},
}
ENDPOINTS = (
    Endpoint(
        path="/v1/responses", methods=("POST",), handler=create_response, tag="openai",
        doc="Answer a conversation, as items.",
        body=BODY, answer=Response, event=ResponseEvent, errors=(404, 429, 503, 504),
    ),
    Endpoint(
        path="/v1/responses/input_tokens", methods=("POST",), handler=count_input, tag="openai",
        doc="Count the tokens of a conversation.",
        body=BODY, answer=InputCount, errors=(404, 503),
    ),
    Endpoint(
        path=BY_ID, handler=show_response, tag="openai", doc="A stored answer.", answer=Response, errors=(400, 404)
    ),
    Endpoint(
        path=BY_ID, methods=("DELETE",), handler=delete_response, tag="openai", doc="Forget an answer.",
        answer=DeletedResponse, errors=(404,)
    ),
    Endpoint(
        path=BY_ID + "/cancel", methods=("POST",), handler=cancel_response, tag="openai", doc="End a running answer.",
        answer=Response, errors=(400, 404)
    ),
    Endpoint(
        path=BY_ID + "/input_items", handler=list_input_items, tag="openai", doc="What an answer is to.",
        answer=ItemList, query=PAGING, errors=(400, 404)
    ),
)

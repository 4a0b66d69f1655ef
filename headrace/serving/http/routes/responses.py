"""``/v1/responses``: its routes. Responses are stored between requests only if the server was started with
``--responses-store``."""

from __future__ import annotations

from collections import deque
from typing import Any, NoReturn

import msgspec
from starlette.requests import Request
from starlette.responses import StreamingResponse

from headrace.base.errors import NotFound, RequestError, UnsupportedFeature
from headrace.serving.http.generation.background import BackgroundRun
from headrace.serving.http.generation.chat import prepare_chat
from headrace.serving.http.generation.context import AppContext, compute, context_of, read_request
from headrace.serving.http.generation.conversation import count_prompt, render_size
from headrace.serving.http.generation.logprobs import TokenNames
from headrace.serving.http.generation.media import media_of, prepare_media
from headrace.serving.http.generation.response_store import ResponseStore, RunningResponse, StoredResponse, Turn
from headrace.serving.http.generation.run import collect_generation, open_generation
from headrace.serving.http.generation.stream import HEADERS, SSE, EventStream, start_stream
from headrace.serving.http.protocol import responses as wire
from headrace.serving.http.routes.response_items import convert_request, input_items
from headrace.serving.http.routes.response_writer import CALL_EVENTS, ResponseEvents, ResponseWriter
from headrace.serving.http.transport.access import owner_of
from headrace.serving.http.transport.endpoint import GENERATION_ERRORS, Endpoint, JsonBody, Query, post
from headrace.serving.http.transport.errors import EncodedResponse, JsonResponse

BODY = JsonBody(wire.ResponsesRequest)
ENABLE_STORE = "start the server with --responses-store MIB to store responses"
FIELD_NAMES = {"prompt": "input", "max_tokens": "max_output_tokens"}
MAX_PAGE = 100
ID_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco", "reasoning": "rs",
}
_decode_items = msgspec.json.Decoder(list[wire.InputItem]).decode
_encode = msgspec.json.Encoder().encode


class PreviousNotFound(RequestError):
    """The previous response is not stored, or belongs to another client."""

    kind = "previous_response_not_found"


class Keeper:
    """Stores the response of one request when it is final. References the previous turn, so that it exists until then
    even if its response is evicted."""

    def __init__(self, store: ResponseStore, owner: bytes, body: wire.ResponsesRequest, previous: Turn | None):
        self._store, self._owner, self._body, self._previous = store, owner, body, previous

    def keep(self, response: wire.Response) -> None:
        """Store the response. Incomplete calls are left out of the turn that later requests continue."""
        output = [
            item for item in response.output if type(item) not in CALL_EVENTS or item.status == "completed"
        ]
        # Output items become input items: the next request sees them as part of its conversation.
        items = msgspec.convert(msgspec.to_builtins(output), list[wire.InputItem])
        turn = Turn(_encode(input_items(self._body)), _encode(items), self._previous)
        self._store.put(self._owner, response.id, _encode(response), turn)


def _history(turn: Turn | None) -> list[wire.InputItem]:
    """All items up to and including a turn."""
    turns = turn.history() if turn is not None else []
    return [item for turn in turns for part in (turn.input, turn.output) for item in _decode_items(part)]


def _list_input(response_id: str, turn: Turn, *, limit: int, is_newest_first: bool, after: str | None) -> wire.ItemList:
    """A page of a response's input items, earlier turns included. Raises `RequestError` for an unknown ``after``."""
    suffix = response_id.rpartition("_")[2]
    # Ids follow from the position, which never changes for a stored response: pages fit together.
    items = [
        _item_dict(item, f"{ID_PREFIXES[item.type]}_{suffix}_in_{index}")
        for index, item in enumerate([*_history(turn.previous), *_decode_items(turn.input)])
    ]
    if is_newest_first:
        items.reverse()
    if after is not None:
        index = next((index for index, item in enumerate(items) if item["id"] == after), None)
        if index is None:
            raise RequestError(f"after: the response has no item {after!r}", param="after")
        items = items[index + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return wire.ItemList(page, first, last, has_more=len(items) > len(page))


def _item_dict(item: wire.InputItem, item_id: str) -> dict[str, Any]:
    fields = {name: value for name, value in msgspec.to_builtins(item).items() if value is not None}
    fields = {"type": item.type, "id": item_id, "status": "completed", **fields}
    if isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        fields["content"] = [{"type": kind, "text": item.content}]
    for part in fields.get("content", ()):
        if part["type"] == "output_text":
            part.setdefault("annotations", [])
    if item.type == "reasoning":
        fields.setdefault("summary", [])
    return fields


def _resolve(context: AppContext, owner: bytes, item: wire.InputItem, where: str) -> wire.InputItem:
    """The item; for a reference the output item of a stored response, whose id holds that of its response."""
    if item.type != "item_reference":
        return item
    suffix = (item.id or "").partition("_")[2].rpartition("_")[0]
    stored = context.responses.find(owner, f"resp_{suffix}")
    found = [each for each in _decode_items(stored.turn.output) if each.id == item.id] if stored is not None else []
    if not found:
        hint = "" if context.responses.is_open else f" or {ENABLE_STORE}"
        raise RequestError(
            f"{where}: the item {item.id!r} is not stored; send it as it was (clients do with store: false){hint}",
            param=where
        )
    return found[0]


def _settle(request: Request, context: AppContext, body: wire.ResponsesRequest) -> None:
    """Put stored items in the place of references, and leave out web search."""
    if isinstance(body.input, list):
        owner = owner_of(request.headers)
        body.input = [_resolve(context, owner, item, f"input[{index}]") for index, item in enumerate(body.input)]
    served: list[wire.OfferedTool] = [t for t in body.tools or () if not isinstance(t, wire.WebSearch)]
    if body.tools and len(served) < len(body.tools):
        body.tools = served
        request.scope.setdefault("state", {}).setdefault("ignored_fields", []).append("tools.web_search")


async def create_response(request: Request) -> JsonResponse | EventStream | StreamingResponse:
    """Answer a conversation, as items."""
    context, body = await read_request(request, BODY)
    _settle(request, context, body)
    owner, store = owner_of(request.headers), context.responses
    if body.background and body.store is False:
        raise RequestError("background needs the response to be stored; leave store out", param="background")
    previous = _find_previous(context, owner, body.previous_response_id)
    converted = await compute(request, lambda: convert_request(body, _history(previous)))
    chat = await prepare_chat(request, context, converted, id_prefix="resp_", field_names=FIELD_NAMES)
    is_kept = body.background or (store.is_open and body.store is not False)
    keeper = Keeper(store, owner, body, previous) if is_kept else None
    request_id, names = chat.request.request_id, TokenNames(context.client.tokenizer)
    model = chat.request.name_model(context.model_name)
    writer = ResponseWriter(
        body, chat.plan, request_id, model, names, owner=owner, is_kept=keeper is not None
    )
    store.note_running(request_id, writer)  # before the first token, so that the client can cancel at once
    keep = keeper.keep if keeper else None
    if body.background:
        context.background.check_room()
        generation = await open_generation(request, chat.request, is_detached=True)
        events = ResponseEvents(writer, generation, keep)
        initial = JsonResponse(writer.response())  # before it changes
        run = BackgroundRun(generation, events, is_recorded=bool(body.stream))
        context.background.start((owner, request_id), run, events.open_queued())
        return _follow(run, 0) if body.stream else initial
    if body.stream:
        return await start_stream(request, chat.request, lambda g: ResponseEvents(writer, g, keep))
    generation, (output,) = await collect_generation(request, chat.request)
    # Exhausts the generator: the writer collects the items, its stream events are not needed.
    deque(writer.write(output.outputs[0]), maxlen=0)
    response = writer.response(generation)
    if keeper is not None:
        keeper.keep(response)
    return JsonResponse(response)


def _follow(run: BackgroundRun, begin: int) -> StreamingResponse:
    """The events of a background response, from number ``begin`` on. A client that leaves does not end it."""
    headers = {name.decode(): value.decode() for name, value in HEADERS}
    return StreamingResponse(run.follow(begin), headers=headers, media_type=SSE.decode())


async def count_input(request: Request) -> JsonResponse:
    """Count the tokens of a conversation."""
    context, body = await read_request(request, BODY)
    context.check_model(body.model)
    _settle(request, context, body)
    previous = _find_previous(context, owner_of(request.headers), body.previous_response_id)
    converted = await compute(request, lambda: convert_request(body, _history(previous)))
    items = await prepare_media(request, context, media_of(converted.messages))
    count = await compute(request, lambda: count_prompt(context, converted, items), size=render_size(converted))
    return JsonResponse(wire.InputCount(count))


def _find_previous(context: AppContext, owner: bytes, response_id: str | None) -> Turn | None:
    if response_id is None:
        return None
    stored = context.responses.find(owner, response_id)
    if stored is None and not context.responses.is_open:
        raise UnsupportedFeature(
            f"previous_response_id: responses are not stored; send all items as input, or {ENABLE_STORE}",
            param="previous_response_id"
        )
    if stored is None:
        raise PreviousNotFound(
            f"the response {response_id!r} is not stored (any more); send all items as input",
            param="previous_response_id"
        )
    return stored.turn


def _refuse_missing(context: AppContext, response_id: str) -> NoReturn:
    hint = "" if context.responses.is_open else f": {ENABLE_STORE}"
    raise NotFound(f"the response {response_id!r} is not stored{hint}", param="response_id")


def _find_running(request: Request) -> RunningResponse | None:
    """The running response that a path names."""
    store = context_of(request).responses
    running = store.find_running(owner_of(request.headers), request.path_params["response_id"])
    return running if running is not None and running.is_running else None


def _find_stored(request: Request) -> StoredResponse:
    """The stored response that a path names; raises `NotFound`."""
    context, response_id = context_of(request), request.path_params["response_id"]
    stored = context.responses.find(owner_of(request.headers), response_id)
    return stored if stored is not None else _refuse_missing(context, response_id)


async def show_response(request: Request) -> JsonResponse | StreamingResponse:
    """A stored or running response. A running one has no output yet; of one that was started in the background with a
    stream, its events may be streamed."""
    given = request.query_params
    if given.get("stream", "false") != "false":
        after = given.get("starting_after", "-1")
        if not after.removeprefix("-").isdecimal() or not after.isascii() or len(after) > 9:
            raise RequestError("starting_after must be a sequence number", param="starting_after")
        key = (owner_of(request.headers), request.path_params["response_id"])
        run = context_of(request).background.find(key)
        if run is None or not run.frames:
            raise UnsupportedFeature(
                "stream: only responses that were created with background and stream are streamed again, while their "
                "events are kept; get it without stream", param="stream"
            )
        return _follow(run, max(0, int(after) + 1))
    if "starting_after" in given:
        raise RequestError("starting_after needs stream to be true", param="starting_after")
    running = _find_running(request)
    return JsonResponse(running.response()) if running is not None else EncodedResponse(_find_stored(request).body)


async def delete_response(request: Request) -> JsonResponse:
    """Delete a stored response."""
    context, response_id = context_of(request), request.path_params["response_id"]
    if not context.responses.drop(owner_of(request.headers), response_id):
        _refuse_missing(context, response_id)
    return JsonResponse(wire.DeletedResponse(response_id))


async def cancel_response(request: Request) -> JsonResponse:
    """Cancel a running response. Cancelling it again changes nothing."""
    running = _find_running(request)
    if running is not None:
        context_of(request).abort(request.path_params["response_id"])
        return JsonResponse(msgspec.structs.replace(running.response(), status="cancelled"))
    stored = _find_stored(request)
    if msgspec.json.decode(stored.body, type=_Status).status != "cancelled":
        response_id = request.path_params["response_id"]
        raise RequestError(f"the response {response_id!r} has already ended", param="response_id")
    return EncodedResponse(stored.body)


class _Status(msgspec.Struct):
    """The part of a stored response that cancelling needs."""

    status: str


async def list_input_items(request: Request) -> JsonResponse:
    """The input items of a stored response."""
    given = request.query_params
    limit, order = given.get("limit", "20"), given.get("order", "desc")
    # `isdigit` alone accepts digits that `int` refuses, and `int` refuses thousands of digits
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= MAX_PAGE:
        raise RequestError(f"limit must be a number from 1 to {MAX_PAGE}", param="limit")
    if order not in ("asc", "desc"):
        raise RequestError("order must be asc or desc", param="order")
    stored = _find_stored(request)
    return JsonResponse(_list_input(
        request.path_params["response_id"], stored.turn, limit=int(limit), is_newest_first=order == "desc",
        after=given.get("after")
    ))


BY_ID = "/v1/responses/{response_id}"
PAGING: Query = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}, "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string"},
}
RESUMING: Query = {"stream": {"type": "boolean"}, "starting_after": {"type": "integer"}}
ENDPOINTS = (
    post(
        "/v1/responses", create_response, "openai", wire.Response, body=BODY, event=wire.ResponseEvent,
        errors=GENERATION_ERRORS
    ),
    post("/v1/responses/input_tokens", count_input, "openai", wire.InputCount, body=BODY, errors=(404, 503)),
    Endpoint(
        BY_ID, show_response, "openai", wire.Response, event=wire.ResponseEvent, query=RESUMING, errors=(400, 404)
    ),
    Endpoint(BY_ID, delete_response, "openai", wire.DeletedResponse, methods=("DELETE",), errors=(404,)),
    post(BY_ID + "/cancel", cancel_response, "openai", wire.Response, errors=(400, 404)),
    Endpoint(BY_ID + "/input_items", list_input_items, "openai", wire.ItemList, query=PAGING, errors=(400, 404)),
)

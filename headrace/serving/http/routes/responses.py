"""Requests of ``/v1/responses`` as chat requests.

Answers of ``/v1/responses`` on their way into the store and out of it: turns, histories, pages of items.

``/v1/responses``: OpenAI's newer way to ask. Answers are kept between requests only when the server was started
so."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import msgspec
from starlette.requests import Request

from headrace.base.errors import NotFound, RequestError, UnsupportedFeature
from headrace.serving.http.generation.chat import prepare_chat
from headrace.serving.http.generation.context import AppContext, context_of
from headrace.serving.http.generation.conversation import count_prompt
from headrace.serving.http.generation.logprobs import TokenNames
from headrace.serving.http.generation.response_store import ResponseStore, StoredResponse, Turn
from headrace.serving.http.generation.run import collect_generation
from headrace.serving.http.generation.stream import EventStream, start_stream
from headrace.serving.http.protocol.fields import JsonSchemaFormat, ResponseFormat
from headrace.serving.http.protocol.openai import ChatMessage, ChatRequest
from headrace.serving.http.protocol.responses import (
    AllowedFunctions,
    DeletedResponse,
    InputCount,
    InputItem,
    InputPart,
    ItemList,
    NamedFunction,
    OutputCall,
    Response,
    ResponseEvent,
    ResponsesRequest,
    TextFormat,
)
from headrace.serving.http.protocol.tools import (
    AllowedSet,
    AllowedTools,
    CallRecord,
    FunctionCall,
    FunctionName,
    FunctionTool,
    NamedTool,
    Tool,
    ToolChoice,
)
from headrace.serving.http.routes.response_writer import ResponseEvents, ResponseWriter
from headrace.serving.http.transport.access import owner_of
from headrace.serving.http.transport.endpoint import Endpoint, JsonBody
from headrace.serving.http.transport.errors import EncodedResponse, JsonResponse

T = TypeVar("T")
LOGPROBS = "message.output_text.logprobs"


def _needed(value: T | None, param: str) -> T:
    if value is None:
        raise RequestError(f"{param} is required", param=param)
    return value


def _text(content: str | list[InputPart], param: str) -> str:
    if isinstance(content, str):
        return content
    texts = [_needed(p.refusal if p.type == "refusal" else p.text, f"{param}[{i}].text") for i, p in enumerate(content)]
    return "\n".join(texts)


class MessageList:
    """Items put together to messages: reasoning, text and calls of the assistant that follow each other are one."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []

    def add(self, item: InputItem, where: str) -> None:
        """Take the next item."""
        match item.type:
            case "message":
                self._add_message(item, where)
            case "reasoning":
                self._assistant(is_new=True).reasoning_content = (
                    _text(item.content or item.summary or "", f"{where}.content") or None
                )
            case "function_call":
                self._add_call(item, where)
            case "function_call_output":
                output = _text(_needed(item.output, f"{where}.output"), f"{where}.output")
                self.messages.append(
                    ChatMessage(role="tool", tool_call_id=_needed(item.call_id, f"{where}.call_id"), content=output)
                )

    def _assistant(self, *, is_new: bool) -> ChatMessage:
        if is_new or not self.messages or self.messages[-1].role != "assistant":
            self.messages.append(ChatMessage(role="assistant"))
        return self.messages[-1]

    def _add_message(self, item: InputItem, where: str) -> None:
        role, text = (
            _needed(item.role, f"{where}.role"), _text(_needed(item.content, f"{where}.content"), f"{where}.content")
        )
        if role != "assistant":
            self.messages.append(ChatMessage(role=role, content=text))
            return
        last = self._assistant(is_new=False)
        if last.content is not None or last.tool_calls:
            last = self._assistant(is_new=True)
        last.content = text

    def _add_call(self, item: InputItem, where: str) -> None:
        function = FunctionCall(
            name=_needed(item.name, f"{where}.name"), arguments=_needed(item.arguments, f"{where}.arguments")
        )
        call = CallRecord(id=_needed(item.call_id, f"{where}.call_id"), type="function", function=function)
        message = self._assistant(is_new=False)
        message.tool_calls = [*(message.tool_calls or ()), call]


def _read_format(asked: TextFormat) -> ResponseFormat:
    if asked.type != "json_schema":
        return ResponseFormat(type=asked.type)
    schema = _needed(asked.schema, "text.format.schema")
    return ResponseFormat(
        type="json_schema", json_schema=JsonSchemaFormat(schema=schema, name=asked.name, strict=asked.strict)
    )


def _read_choice(
    choice: ToolChoice | NamedFunction | AllowedFunctions | None
) -> ToolChoice | NamedTool | AllowedTools | None:
    if isinstance(choice, NamedFunction):
        return _name(choice)
    if isinstance(choice, AllowedFunctions):
        return AllowedTools(
            allowed_tools=AllowedSet(mode=choice.mode, tools=[_name(function) for function in choice.tools])
        )
    return choice


def _name(function: NamedFunction) -> NamedTool:
    return NamedTool(function=FunctionName(name=function.name))


def input_items(body: ResponsesRequest) -> list[InputItem]:
    """What a request says, as items."""
    return [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def read_response(body: ResponsesRequest, history: Sequence[InputItem] = ()) -> ChatRequest:
    """The chat request of ``body``, said after ``history``. Raises `RequestError` for items that miss a field."""
    items = MessageList()
    if body.instructions:
        items.messages.append(ChatMessage(role="system", content=body.instructions))
    for item in history:
        items.add(item, "previous_response_id")
    for index, item in enumerate(input_items(body)):
        items.add(item, f"input[{index}]")
    chat = ChatRequest(
        messages=items.messages, model=body.model, stream=body.stream, max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature, top_p=body.top_p, parallel_tool_calls=body.parallel_tool_calls,
    )
    if body.tools:
        chat.tools = [Tool(type="function", function=FunctionTool(
            name=t.name, description=t.description, parameters=t.parameters, strict=t.strict,
        )) for t in body.tools]
    chat.tool_choice = _read_choice(body.tool_choice)
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        chat.logprobs, chat.top_logprobs = True, body.top_logprobs
    if body.reasoning is not None:
        chat.reasoning_effort = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        chat.response_format = _read_format(body.text.format)
    return chat


MAX_PAGE = 100
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_decode_items = msgspec.json.Decoder(list[InputItem]).decode
_encode = msgspec.json.Encoder().encode


class Keeper:
    """Keeps the answer of one request when it is there."""

    def __init__(
        self, store: ResponseStore, owner: bytes, body: ResponsesRequest, previous: Turn | None
    ):
        self._store, self._owner, self._body, self._previous = store, owner, body, previous

    def keep(self, response: Response) -> None:
        """Take the answer in its final state. Calls that broke off are no part of what later requests go on from."""
        said = [item for item in response.output if not isinstance(item, OutputCall) or item.status == "completed"]
        turn = Turn(
            _encode(input_items(self._body)), _encode(msgspec.convert(msgspec.to_builtins(said), list[InputItem])),
            self._previous
        )
        self._store.put(self._owner, response.id, _encode(response), turn)


def read_history(turn: Turn | None) -> list[InputItem]:
    """What was said up to and with a turn."""
    turns = turn.history() if turn is not None else []
    return [item for turn in turns for part in (turn.question, turn.answer) for item in _decode_items(part)]


def list_input(response_id: str, turn: Turn, *, limit: int, is_newest_first: bool, after: str | None) -> ItemList:
    """A page of what an answer is an answer to, earlier turns included. Raises `RequestError` for an unknown
    ``after``."""
    items = [*read_history(turn.previous), *_decode_items(turn.question)]
    suffix = response_id.rpartition("_")[2]
    told = [_tell(item, f"{PREFIXES[item.type]}_{suffix}_in_{place}") for place, item in enumerate(items)]
    if is_newest_first:
        told.reverse()
    if after is not None:
        place = next((place for place, item in enumerate(told) if item["id"] == after), None)
        if place is None:
            raise RequestError(f"after: the answer has no item {after!r}", param="after")
        told = told[place + 1 :]
    page = told[:limit]
    return ItemList(
        page, page[0]["id"] if page else None, page[-1]["id"] if page else None, has_more=len(told) > len(page)
    )


def _tell(item: InputItem, item_id: str) -> dict[str, Any]:
    told = {name: value for name, value in msgspec.to_builtins(item).items() if value is not None}
    told = {"type": item.type, "id": item_id, "status": "completed", **told}
    if isinstance(item.content, str):
        told["content"] = [{"type": "output_text" if item.role == "assistant" else "input_text", "text": item.content}]
    for part in told.get("content", ()):
        if part["type"] == "output_text":
            part.setdefault("annotations", [])
    if item.type == "reasoning":
        told.setdefault("summary", [])
    return told


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

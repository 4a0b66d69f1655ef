"""Answers of ``/v1/responses`` on their way into the store and out of it: turns, histories, pages of items."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.base.errors import RequestError
from headrace.serving.http.dialects.response_answers import ResponseWriter
from headrace.serving.http.dialects.responses import input_items
from headrace.serving.http.protocol.responses import InputItem, ItemList, OutputCall, Response, ResponsesRequest
from headrace.serving.http.response_store import ResponseStore, Turn

MAX_PAGE = 100
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_decode_items = msgspec.json.Decoder(list[InputItem]).decode
_encode = msgspec.json.Encoder().encode


class Keeper:
    """Keeps the answer of one request when it is there."""

    def __init__(
        self, store: ResponseStore[ResponseWriter], owner: bytes, body: ResponsesRequest, previous: Turn | None
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

"""Responses of ``/v1/responses``: `ItemWriter` turns parse events into items, `ResponseWriter` makes the response,
`ResponseEvents` its stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from headrace.base.errors import HeadraceError
from headrace.service.client.outputs import ChoiceDelta, CompletionOutput
from headrace.service.parsing.events import CallArguments, CallEnd, CallStart, Event, TextDelta
from headrace.serving.http.generation.chat import OutputPlan, OutputReader
from headrace.serving.http.generation.logprobs import TokenNames, chat_logprobs
from headrace.serving.http.generation.run import Generation
from headrace.serving.http.generation.stream import Events, named_frame
from headrace.serving.http.protocol import responses as wire
from headrace.serving.http.protocol.openai import ContentLogprob
from headrace.serving.http.routes.response_items import named_tools

ECHOED_FIELDS = (
    "instructions", "max_output_tokens", "temperature", "top_p", "top_logprobs", "tools", "tool_choice",
    "parallel_tool_calls", "text", "reasoning", "metadata", "previous_response_id", "background",
)
"""Request fields that the response repeats."""


CALL_EVENTS: dict[type[wire.OutputItem], str] = {
    wire.OutputCall: "function_call_arguments", wire.OutputCustomCall: "custom_tool_call_input"
}
"""Items that are calls, and the events about their arguments or input."""


class ItemWriter:
    """Turns parse events into output items. At most one item is open: it is added, grows by deltas, and is done.
    ``items`` are those so far; an item has its text once it is done. ``logprobs`` are of sampled tokens whose text
    the parser has not emitted yet; the caller appends to them before `write`. ``tools``: see `named_tools`."""

    def __init__(self, request_id: str, tools: dict[str, tuple[wire.NamespaceTool, str | None]]):
        self._tools = tools
        self.items: list[wire.OutputItem] = []
        self.logprobs: list[ContentLogprob] = []
        self._suffix = request_id.rpartition("_")[2]
        self._texts: list[str] = []  # pieces of the open item's text, joined when it is done
        self._is_open = False

    def write(self, event: Event) -> Iterator[wire.ResponseEvent]:
        """The stream events for ``event``. They share parts with ``items``, which later events change: encode each one
        before taking the next."""
        match event:
            case TextDelta(text, is_reasoning):
                yield from self._turn_to(wire.OutputReasoning if is_reasoning else wire.OutputMessage)
                kind = "response.reasoning_text.delta" if is_reasoning else "response.output_text.delta"
                yield self._grow(kind, text)
            case CallStart(_, call_id, name):
                yield from self.close("completed")
                tool, namespace = self._tools.get(name, (None, None))
                call: wire.OutputCall | wire.OutputCustomCall
                if isinstance(tool, wire.ResponseCustomTool):
                    call = wire.OutputCustomCall(self._item_id("ctc"), "in_progress", call_id, name, "")
                else:
                    call = wire.OutputCall(self._item_id("fc"), "in_progress", call_id, name, "")
                if tool is not None and namespace is not None:
                    call.name, call.namespace = tool.name, namespace
                yield from self._add(call)
            case CallArguments(_, text):
                yield self._grow(f"response.{CALL_EVENTS[type(self.items[-1])]}.delta", text)
            case CallEnd(_, is_complete):
                yield from self.close("completed" if is_complete else "incomplete")

    def close(self, status: wire.Status) -> Iterator[wire.ResponseEvent]:
        """End the open item, if any."""
        if not self._is_open:
            return
        self._is_open = False
        item, text = self.items[-1], "".join(self._texts)
        item.status = status
        if isinstance(item, wire.OutputCall):
            item.arguments = text
            yield self._event("response.function_call_arguments.done", name=item.name, arguments=text)
        elif isinstance(item, wire.OutputCustomCall):
            item.input = text
            yield self._event("response.custom_tool_call_input.done", input=text)
        else:
            part = item.content[0]
            part.text = text
            if isinstance(part, wire.OutputText):
                yield self._event("response.output_text.done", content_index=0, text=text, logprobs=part.logprobs)
            else:
                yield self._event("response.reasoning_text.done", content_index=0, text=text)
            yield self._event("response.content_part.done", content_index=0, part=part)
        yield wire.ResponseEvent(type="response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._suffix}_{len(self.items)}"

    def _turn_to(self, kind: type[wire.OutputMessage] | type[wire.OutputReasoning]) -> Iterator[wire.ResponseEvent]:
        """Open an item of this kind, unless the open one is."""
        if self._is_open and isinstance(self.items[-1], kind):
            return
        yield from self.close("completed")
        item: wire.OutputMessage | wire.OutputReasoning
        part: wire.OutputText | wire.ReasoningText
        if kind is wire.OutputMessage:
            part = wire.OutputText("")
            item = wire.OutputMessage(self._item_id("msg"), "in_progress", [])
            yield from self._add(item)
            item.content = [part]  # after the event, which must show no content
        else:
            part = wire.ReasoningText("")
            item = wire.OutputReasoning(self._item_id("rs"), "in_progress", [])
            yield from self._add(item)
            item.content = [part]
        yield self._event("response.content_part.added", content_index=0, part=part)

    def _add(self, item: wire.OutputItem) -> Iterator[wire.ResponseEvent]:
        self.items.append(item)
        self._texts, self._is_open = [], True
        copied = msgspec.structs.replace(item)  # shallow: the event keeps the fields that the item has now
        yield wire.ResponseEvent(type="response.output_item.added", output_index=len(self.items) - 1, item=copied)

    def _grow(self, kind: str, text: str) -> wire.ResponseEvent:
        self._texts.append(text)
        event = self._event(kind, delta=text)
        if type(self.items[-1]) not in CALL_EVENTS:
            event.content_index = 0
        item, logprobs = self.items[-1], self._take_logprobs(text)
        if isinstance(item, wire.OutputMessage):
            event.logprobs = logprobs
            item.content[0].logprobs += logprobs
        return event

    def _take_logprobs(self, text: str) -> list[ContentLogprob]:
        """Take the logprobs of the tokens whose bytes contain the next piece of text. Tokens before it (markers
        around items) are dropped, those after it stay. Empty if the tokens do not spell the text, as with reordered
        arguments."""
        if not self.logprobs:
            return []
        spelled = [bytes(entry.bytes or ()) for entry in self.logprobs]
        begin, size, position = b"".join(spelled).find(text.encode()), len(text.encode()), 0  # in bytes
        if begin < 0:
            return []
        taken: list[ContentLogprob] = []
        kept: list[ContentLogprob] = []
        for entry, spelling in zip(self.logprobs, spelled, strict=True):
            position += len(spelling)  # the end of this token
            if position > begin:
                (taken if position - len(spelling) < begin + size else kept).append(entry)
        self.logprobs = kept
        return taken

    def _event(self, kind: str, **fields: Any) -> wire.ResponseEvent:
        return wire.ResponseEvent(type=kind, output_index=len(self.items) - 1, item_id=self.items[-1].id, **fields)


class ResponseWriter:
    """Makes the response of one request. ``is_running`` until the final response was made; ``is_kept`` is its
    ``store``."""

    def __init__(
        self, body: wire.ResponsesRequest, plan: OutputPlan, request_id: str, model: str, names: TokenNames, *,
        owner: bytes = b"", is_kept: bool = False,
    ):
        self.owner, self._names = owner, names
        self._reader = OutputReader(plan)
        self._items = ItemWriter(request_id, named_tools(body.tools))
        echoed = {name: value for name in ECHOED_FIELDS if (value := getattr(body, name)) is not None}
        self._base = wire.Response(
            id=request_id, created_at=int(time.time()), status="queued" if body.background else "in_progress",
            output=[], model=model, store=is_kept, **echoed
        )
        self._finish: str | None = None
        self.is_running = True

    def write(self, delta: ChoiceDelta | CompletionOutput) -> Iterator[wire.ResponseEvent]:
        """The events of a delta, or of a whole output."""
        self._base.status = "in_progress"
        if delta.logprobs is not None:
            self._items.logprobs += chat_logprobs(delta.logprobs, self._names).content
        for event in self._reader.read(delta):
            yield from self._items.write(event)
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
            yield from self._items.close("completed" if delta.finish_reason == "stop" else "incomplete")

    def response(self, generation: Generation | None = None) -> wire.Response:
        """The final response with output and usage if ``generation`` is given, else the initial one."""
        if generation is None:
            return self._base
        self.is_running = False
        # any other reason, such as `abort`, means that the client cancelled it
        status = {"stop": "completed", "length": "incomplete"}.get(self._finish or "", "cancelled")
        usage = generation.usage()
        return msgspec.structs.replace(
            self._base, status=status, output=self._items.items,
            incomplete_details=wire.IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
            usage=wire.ResponseUsage(
                usage.prompt_tokens, usage.completion_tokens, usage.total_tokens,
                wire.CachedDetails(usage.prompt_tokens_details.cached_tokens), wire.OutputDetails(),
            ),
        )


class ResponseEvents(Events):
    """Stream events, numbered; the last one has the whole response."""

    done = b""

    def __init__(
        self, writer: ResponseWriter, generation: Generation, keep: Callable[[wire.Response], None] | None = None
    ):
        self._writer = writer
        self._generation = generation
        self._keep = keep
        self._number = 0
        self._has_begun = False

    def open_queued(self) -> bytes:
        """The first frames of a background response, which is not begun yet."""
        initial = self._writer.response()
        kinds = ("response.created", "response.queued")
        return b"".join(self._frame(wire.ResponseEvent(type=kind, response=initial)) for kind in kinds)

    def render(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        """Frames of one delta."""
        opening = b""
        # With the first delta, not before it: an early error must get its own status.
        if not self._has_begun:
            initial = msgspec.structs.replace(self._writer.response(), status="in_progress")
            kinds = ("response.in_progress",) if self._number else ("response.created", "response.in_progress")
            opening = b"".join(self._frame(wire.ResponseEvent(type=kind, response=initial)) for kind in kinds)
            self._has_begun = True
        return opening + b"".join(map(self._frame, self._writer.write(delta)))

    def end(self) -> bytes:
        """The whole response."""
        response = self._writer.response(self._generation)
        kinds = {"completed": "response.completed", "cancelled": "response.cancelled"}
        kind = kinds.get(response.status, "response.incomplete") if response.background else (
            "response.completed" if response.status == "completed" else "response.incomplete"
        )
        return self._conclude(kind, response)

    def fail(self, error: HeadraceError) -> bytes:
        """The response so far, as failed."""
        response = msgspec.structs.replace(
            self._writer.response(self._generation), status="failed",
            error=wire.ResponseError("server_error", error.message), incomplete_details=None,
        )
        return self._conclude("response.failed", response)

    def _conclude(self, kind: str, response: wire.Response) -> bytes:
        if self._keep is not None:
            self._keep(response)
        return self._frame(wire.ResponseEvent(type=kind, response=response))

    def _frame(self, event: wire.ResponseEvent) -> bytes:
        event.sequence_number = self._number
        self._number += 1
        return named_frame(event.type, event)

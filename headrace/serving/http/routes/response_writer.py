"""Answers of ``/v1/responses``: `ItemWriter` makes items of events, `ResponseWriter` the answer, `ResponseEvents` streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec

from headrace.base.errors import HeadraceError
from headrace.service.client.outputs import ChoiceDelta, CompletionOutput
from headrace.service.parsing.events import CallArguments, CallEnd, CallStart, Event, TextDelta
from headrace.serving.http.generation.chat import AnswerPlan, AnswerReader
from headrace.serving.http.generation.logprobs import TokenNames, chat_logprobs
from headrace.serving.http.generation.run import Generation
from headrace.serving.http.generation.stream import Events, named_frame
from headrace.serving.http.protocol.openai import ContentLogprob
from headrace.serving.http.protocol.responses import (
    CachedDetails,
    IncompleteDetails,
    OutputCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    Response,
    ResponseError,
    ResponseEvent,
    ResponsesRequest,
    ResponseUsage,
)

ASKED = (
    "instructions", "max_output_tokens", "temperature", "top_p", "top_logprobs", "tools", "tool_choice",
    "parallel_tool_calls", "text", "reasoning", "metadata",
    "previous_response_id",
)


class ItemWriter:
    """Events of a model's output as items that are added, grow and are done, one at a time. ``items`` are those so far;
    their texts are whole once they are done. ``logprobs`` are those of tokens whose text is not told yet."""

    def __init__(self, request_id: str):
        self.items: list[OutputItem] = []
        self.logprobs: list[ContentLogprob] = []
        self._suffix = request_id.rpartition("_")[2]
        self._texts: list[str] = []
        self._is_open = False

    def write(self, event: Event) -> Iterator[ResponseEvent]:
        """The events that tell of ``event``."""
        match event:
            case TextDelta(text, is_reasoning):
                yield from self._turn_to(OutputReasoning if is_reasoning else OutputMessage)
                yield self._grow(
                    "response.reasoning_text.delta" if is_reasoning else "response.output_text.delta", text
                )
            case CallStart(_, call_id, name):
                yield from self.close("completed")
                yield from self._add(OutputCall(self._item_id("fc"), "in_progress", call_id, name, ""))
            case CallArguments(_, text):
                yield self._grow("response.function_call_arguments.delta", text)
            case CallEnd(_, is_complete):
                yield from self.close("completed" if is_complete else "incomplete")

    def close(self, status: str) -> Iterator[ResponseEvent]:
        """End the item that is open, if one is."""
        if not self._is_open:
            return
        self._is_open = False
        item, text = self.items[-1], "".join(self._texts)
        item.status = status
        if isinstance(item, OutputCall):
            item.arguments = text
            yield self._event("response.function_call_arguments.done", name=item.name, arguments=text)
        else:
            part = item.content[0]
            part.text = text
            if isinstance(part, OutputText):
                yield self._event("response.output_text.done", content_index=0, text=text, logprobs=part.logprobs)
            else:
                yield self._event("response.reasoning_text.done", content_index=0, text=text)
            yield self._event("response.content_part.done", content_index=0, part=part)
        yield ResponseEvent(type="response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._suffix}_{len(self.items)}"

    def _turn_to(self, kind: type[OutputMessage] | type[OutputReasoning]) -> Iterator[ResponseEvent]:
        if self._is_open and isinstance(self.items[-1], kind):
            return
        yield from self.close("completed")
        if kind is OutputMessage:
            yield from self._add(OutputMessage(self._item_id("msg"), "in_progress", []), OutputText(""))
        else:
            yield from self._add(OutputReasoning(self._item_id("rs"), "in_progress", []), ReasoningText(""))

    def _add(self, item: OutputItem, part: OutputText | ReasoningText | None = None) -> Iterator[ResponseEvent]:
        self.items.append(item)
        self._texts, self._is_open = [], True
        yield ResponseEvent(
            type="response.output_item.added", output_index=len(self.items) - 1, item=msgspec.structs.replace(item)
        )
        if part is not None and not isinstance(item, OutputCall):
            item.content = [part]  # type: ignore[assignment,list-item]
            yield self._event("response.content_part.added", content_index=0, part=part)

    def _grow(self, kind: str, text: str) -> ResponseEvent:
        self._texts.append(text)
        event = self._event(kind, delta=text)
        if not isinstance(self.items[-1], OutputCall):
            event.content_index = 0
        item, logprobs = self.items[-1], self._take_logprobs(text)
        if isinstance(item, OutputMessage):
            event.logprobs = logprobs
            item.content[0].logprobs += logprobs
        return event

    def _take_logprobs(self, text: str) -> list[ContentLogprob]:
        """Those of the tokens that hold the next text; those before it, of marks around items, are dropped. None where the
        text is not what tokens spelled, as in arguments that were put in order."""
        if not self.logprobs:
            return []
        spelled = [bytes(entry.bytes or ()) for entry in self.logprobs]
        begin, wanted, place = b"".join(spelled).find(text.encode()), len(text.encode()), 0
        if begin < 0:
            return []
        taken, kept = [], []
        for entry, spelling in zip(self.logprobs, spelled, strict=True):
            place += len(spelling)
            if place > begin:
                (taken if place - len(spelling) < begin + wanted else kept).append(entry)
        self.logprobs = kept
        return taken

    def _event(self, kind: str, **fields: object) -> ResponseEvent:
        return ResponseEvent(type=kind, output_index=len(self.items) - 1, item_id=self.items[-1].id, **fields)  # type: ignore[arg-type]


class ResponseWriter:
    """Makes the answer of one request, as far as it has come. ``is_running`` until the whole answer was made; ``is_kept``
    is what it says of itself."""

    def __init__(
        self, body: ResponsesRequest, plan: AnswerPlan, request_id: str, model: str, names: TokenNames, *,
        owner: bytes = b"", is_kept: bool = False,
    ):
        self.owner, self._names = owner, names
        self._reader = AnswerReader(plan)
        self._items = ItemWriter(request_id)
        self._base = Response(id=request_id, created_at=int(time.time()), status="in_progress", output=[], model=model, store=is_kept, **{
            name: value for name in ASKED if (value := getattr(body, name)) is not None
        })
        self._finish: str | None = None
        self.is_running = True

    def write(self, news: ChoiceDelta | CompletionOutput) -> Iterator[ResponseEvent]:
        """The events of a delta, or of a whole output."""
        if news.logprobs is not None:
            self._items.logprobs += chat_logprobs(news.logprobs, self._names).content
        for event in self._reader.read(news):
            yield from self._items.write(event)
        if news.finish_reason is not None:
            self._finish = news.finish_reason
            yield from self._items.close("completed" if news.finish_reason == "stop" else "incomplete")

    def response(self, generation: Generation | None = None) -> Response:
        """The answer: with what came and what it took when ``generation`` is given, else as it begins."""
        if generation is None:
            return self._base
        self.is_running = False
        status = {"stop": "completed", "length": "incomplete"}.get(self._finish or "", "cancelled")
        usage = generation.usage()
        return msgspec.structs.replace(
            self._base, status=status, output=self._items.items,
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
            usage=ResponseUsage(
                usage.prompt_tokens, usage.completion_tokens, usage.total_tokens,
                CachedDetails(usage.prompt_tokens_details.cached_tokens), OutputDetails(),
            ),
        )


class ResponseEvents(Events):
    """The wording of a stream: numbered events, the last of them with the whole answer."""

    done = b""

    def __init__(self, writer: ResponseWriter, generation: Generation, keep: Callable[[Response], None] | None = None):
        self._writer = writer
        self._generation = generation
        self._keep = keep
        self._number = 0

    def render(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        """Frames of one delta."""
        opening = b""
        if self._number == 0:
            opening = self._tell("response.created") + self._tell("response.in_progress")
        return opening + b"".join(map(self._frame, self._writer.write(delta)))

    def end(self) -> bytes:
        """The whole answer."""
        response = self._writer.response(self._generation)
        kind = "response.completed" if response.status == "completed" else "response.incomplete"
        return self._conclude(kind, response)

    def fail(self, error: HeadraceError) -> bytes:
        """The answer as far as it came, failed."""
        response = msgspec.structs.replace(
            self._writer.response(self._generation), status="failed",
            error=ResponseError("server_error", error.message), incomplete_details=None,
        )
        return self._conclude("response.failed", response)

    def _conclude(self, kind: str, response: Response) -> bytes:
        if self._keep is not None:
            self._keep(response)
        return self._frame(ResponseEvent(type=kind, response=response))

    def _tell(self, kind: str) -> bytes:
        return self._frame(ResponseEvent(type=kind, response=self._writer.response()))

    def _frame(self, event: ResponseEvent) -> bytes:
        event.sequence_number = self._number
        self._number += 1
        return named_frame(event.type, event)

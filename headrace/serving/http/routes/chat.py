"""``/v1/chat/completions``: responses whole (`whole_choice`) and streamed (`ChatEvents`)."""

from __future__ import annotations

import time
from typing import Literal

from msgspec import UNSET, UnsetType
from starlette.requests import Request

from headrace.service.client.outputs import ChoiceDelta, CompletionOutput
from headrace.service.parsing.events import CallArguments, CallStart, Event, TextDelta
from headrace.serving.http.generation.chat import OutputPlan, OutputReader, prepare_chat
from headrace.serving.http.generation.context import AppContext, read_request
from headrace.serving.http.generation.exchange import answer_router, note_rooms, telling_refusals
from headrace.serving.http.generation.logprobs import TokenNames, chat_logprobs, prompt_logprobs_json
from headrace.serving.http.generation.run import Generation, collect_generation
from headrace.serving.http.generation.sampling import check_stream_options
from headrace.serving.http.generation.stream import Events, EventStream, TextFrames, frame, start_stream
from headrace.serving.http.protocol.openai import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatRequest,
    Usage,
)
from headrace.serving.http.protocol.tools import CallDelta, ResponseCall, ResponseFunction, ResponseInput
from headrace.serving.http.transport.endpoint import GENERATION_ERRORS, JsonBody, post
from headrace.serving.http.transport.errors import JsonResponse

BODY = JsonBody(ChatRequest)


def whole_choice(choice: CompletionOutput, plan: OutputPlan, names: TokenNames, *, has_ids: bool) -> ChatChoice:
    """One finished choice."""
    reader = _ChoiceReader(plan)
    whole = reader.read(choice)
    calls = [
        ResponseCall(str(c.id), "function" if c.custom is UNSET else "custom", c.function, c.custom)
        for c in whole.tool_calls or ()
    ]
    return ChatChoice(
        choice.index,
        AssistantMessage(
            whole.content or (None if calls else ""), reasoning_content=whole.reasoning_content,
            reasoning=whole.reasoning, tool_calls=calls or UNSET,
        ),
        logprobs=chat_logprobs(choice.logprobs, names) if choice.logprobs is not None else None,
        finish_reason=reader.name_reason(choice.finish_reason), stop_reason=choice.stop_reason,
        matched_stop=choice.matched_stop,
        token_ids=choice.token_ids if has_ids else UNSET,
    )


class _ChoiceReader:
    """Turns the deltas of one choice, or the whole of it, into deltas of a message. Has its own parser, as choices of
    one request arrive interleaved."""

    def __init__(self, plan: OutputPlan):
        self._reader, self._plan, self._parses = OutputReader(plan), plan, plan.parses
        self._held_reasoning: list[str] = []
        self._is_custom = False  # the call that has begun last
        self.content_frames: TextFrames | None = None

    def name_reason(self, reason: str | None) -> str | None:
        """A finish reason; ``tool_calls`` instead of ``stop`` when there is a complete call."""
        return "tool_calls" if reason == "stop" and self._reader.has_calls else reason

    def read(self, delta: ChoiceDelta | CompletionOutput) -> ChatDelta:
        """The new parts; empty while the parser holds text back."""
        if not self._parses:
            return ChatDelta(content=delta.text) if delta.text or not delta.finish_reason else ChatDelta()
        added = ChatDelta()
        for event in self._reader.read(delta):
            if isinstance(event, TextDelta) and event.is_reasoning:
                self._held_reasoning.append(event.text)
            elif isinstance(event, TextDelta):
                added.content = event.text if added.content is UNSET else added.content + event.text
            else:
                self._add_call(added, event)
        # With `stream_reasoning` false the reasoning is held back until the parser has left it.
        is_over = not self._reader.is_reasoning or delta.finish_reason is not None
        if self._held_reasoning and (self._plan.streams_reasoning or is_over):
            added.reasoning_content = added.reasoning = "".join(self._held_reasoning)
            self._held_reasoning.clear()
        return added

    def _add_call(self, added: ChatDelta, event: Event) -> None:
        """Add a call event to the delta of its call in this chunk."""
        pieces = added.tool_calls or []
        if isinstance(event, CallStart):
            self._is_custom = event.name in self._plan.custom
            kind: Literal["function", "custom"] = "custom" if self._is_custom else "function"
            pieces.append(CallDelta(event.index, event.call_id, kind, *self._begin(event.name)))
        elif isinstance(event, CallArguments):
            # the call began in an earlier chunk
            if not pieces or pieces[-1].index != event.index:
                pieces.append(CallDelta(event.index, UNSET, UNSET, *self._begin(UNSET)))
            if pieces[-1].custom is not UNSET:
                pieces[-1].custom.input += event.text
            elif pieces[-1].function is not UNSET:
                pieces[-1].function.arguments += event.text
        if pieces:
            added.tool_calls = pieces

    def _begin(self, name: str | UnsetType) -> tuple[ResponseFunction | UnsetType, ResponseInput | UnsetType]:
        """Nothing of the call's arguments or input yet."""
        return (UNSET, ResponseInput("", name)) if self._is_custom else (ResponseFunction("", name), UNSET)


class ChatEvents(Events):
    """Stream events: a role chunk per choice, then its deltas, then usage if requested."""

    def __init__(
        self, body: ChatRequest, generation: Generation, plan: OutputPlan, context: AppContext, names: TokenNames
    ):
        self._generation = generation
        self._plan = plan
        self._model, self._fingerprint = generation.model_name, context.system_fingerprint
        self._names = names
        self._created = int(time.time())
        self._choices: dict[int, _ChoiceReader] = {}
        self._has_usage, self._has_running_usage = check_stream_options(body)
        self._has_ids, self._has_timings = bool(body.return_token_ids), bool(body.return_timings)
        self._is_text_only = not (self._has_running_usage or self._has_ids)

    def render(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        """Chunks of one delta; nothing while its text is held back."""
        opening, reader = b"", self._choices.get(delta.index)
        if reader is None:
            opening = self._open_choice(delta)
            reader = self._choices[delta.index] = _ChoiceReader(self._plan)
        added = reader.read(delta)
        has_content = (
            added.content or added.reasoning or added.tool_calls or delta.finish_reason or delta.logprobs
            or (self._has_ids and delta.token_ids)
        )
        if not has_content:
            return opening
        # The common case, a token of plain text, fills a prepared frame instead of encoding a chunk.
        if self._is_text_only and delta.finish_reason is None and delta.logprobs is None and added.is_content_alone:
            return opening + self._frames_of(reader, delta.index).fill(added.content or "")
        choice = ChatChunkChoice(delta.index, added)
        if delta.logprobs is not None:
            choice.logprobs = chat_logprobs(delta.logprobs, self._names)
        if delta.finish_reason is not None:
            choice.finish_reason = reader.name_reason(delta.finish_reason)
            choice.stop_reason = UNSET if delta.stop_reason is None else delta.stop_reason
            choice.matched_stop = UNSET if delta.matched_stop is None else delta.matched_stop
        if self._has_ids:
            choice.token_ids = delta.token_ids
        chunk = self._chunk([choice])
        if self._has_timings and delta.finish_reason is not None:
            chunk.timings = self._generation.timings()
        return opening + frame(chunk)

    def _open_choice(self, delta: ChoiceDelta) -> bytes:
        chunk = self._chunk([ChatChunkChoice(delta.index, ChatDelta(role="assistant", content=""))])
        if self._has_running_usage and chunk.usage:
            # The delta is counted already, but this chunk shows none of it.
            chunk.usage.completion_tokens -= len(delta.token_ids)
            chunk.usage.total_tokens -= len(delta.token_ids)
        if not self._choices and self._has_ids:
            chunk.prompt_token_ids = self._generation.streams[0].prompt_token_ids
        return frame(chunk)

    def _frames_of(self, reader: _ChoiceReader, index: int) -> TextFrames:
        if reader.content_frames is None:
            reader.content_frames = TextFrames(
                lambda text: self._chunk([ChatChunkChoice(index, ChatDelta(content=text))])
            )
        return reader.content_frames

    def end(self) -> bytes:
        """The usage chunk."""
        return frame(self._chunk([], usage=self._generation.usage())) if self._has_usage else b""

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        name = self._generation.request.request_id
        chunk = ChatChunk(name, self._created, self._model, choices, self._fingerprint)
        if self._has_running_usage:
            chunk.usage = self._generation.usage()
        elif self._has_usage:
            chunk.usage = usage
        return chunk


@telling_refusals
async def create_chat_completion(request: Request) -> JsonResponse | EventStream:
    """Answer a conversation."""
    context, body = await read_request(request, BODY)
    note_rooms(request, body, context)
    check_stream_options(body)
    chat = await prepare_chat(request, context, body, id_prefix="chatcmpl-")
    plan, names = chat.plan, TokenNames(
        context.client.tokenizer, as_ids=bool(body.return_tokens_as_token_ids), wanted=body.logprob_token_ids or ()
    )
    if body.stream:
        return await start_stream(request, chat.request, lambda g: ChatEvents(body, g, plan, context, names))
    generation, (output,) = await collect_generation(request, chat.request)
    return await generation.respond(lambda: ChatCompletion(
        id=chat.request.request_id, created=int(time.time()), model=generation.model_name,
        choices=[whole_choice(c, plan, names, has_ids=bool(body.return_token_ids)) for c in output.outputs],
        usage=generation.usage(), system_fingerprint=context.system_fingerprint,
        prompt_logprobs=prompt_logprobs_json(output.prompt_logprobs, names) if output.prompt_logprobs else UNSET,
        prompt_token_ids=output.prompt_token_ids if body.return_token_ids else UNSET,
        timings=generation.timings() if body.return_timings else UNSET,
        kv_transfer_params=answer_router(chat.request.params, body, context.client.config),
    ))


ENDPOINTS = (
    post(
        "/v1/chat/completions", create_chat_completion, "openai", ChatCompletion, body=BODY, event=ChatChunk,
        errors=GENERATION_ERRORS
    ),
)

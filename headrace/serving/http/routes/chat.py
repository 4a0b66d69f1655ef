"""Chat answers worded: `whole_choice` for one answer at once, `ChatEvents` for a stream.

``/v1/chat/completions``."""

from __future__ import annotations

import time

from msgspec import UNSET
from starlette.requests import Request

from headrace.service.client.outputs import ChoiceDelta, CompletionOutput
from headrace.service.parsing.events import CallArguments, CallStart, Event, TextDelta
from headrace.service.parsing.message import MessageBuilder, ParsedMessage
from headrace.service.parsing.parser import OutputParser
from headrace.serving.http.generation.chat import AnswerPlan, prepare_chat
from headrace.serving.http.generation.context import context_of
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
from headrace.serving.http.protocol.tools import AnsweredCall, AnsweredFunction, CallPiece
from headrace.serving.http.transport.endpoint import Endpoint, JsonBody
from headrace.serving.http.transport.errors import JsonResponse


def finish_reason(reason: str | None, parser: OutputParser | None) -> str | None:
    """``tool_calls`` instead of ``stop`` when there is a complete call to make."""
    return "tool_calls" if reason == "stop" and parser is not None and parser.num_calls else reason


def whole_choice(choice: CompletionOutput, plan: AnswerPlan, names: TokenNames, *, has_ids: bool) -> ChatChoice:
    """One finished answer."""
    parser, message = None, AssistantMessage(choice.text)
    if plan.parses:
        parser, builder = plan.parser(), MessageBuilder()
        builder.add(parser.push(choice.text))
        builder.add(parser.finish())
        message = _message(builder.message(), plan)
    return ChatChoice(
        choice.index, message,
        logprobs=chat_logprobs(choice.logprobs, names) if choice.logprobs is not None else None,
        finish_reason=finish_reason(choice.finish_reason, parser), stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if has_ids else UNSET,
    )


def _message(parsed: ParsedMessage, plan: AnswerPlan) -> AssistantMessage:
    message = AssistantMessage(parsed.content if parsed.content or not parsed.tool_calls else None)
    if parsed.reasoning and plan.tells_reasoning:
        message.reasoning_content = message.reasoning = parsed.reasoning
    if parsed.tool_calls:
        message.tool_calls = [AnsweredCall(c.call_id, AnsweredFunction(c.arguments, c.name)) for c in parsed.tool_calls]
    return message


class _ChoiceEvents:
    """Deltas of one choice as news of a message."""

    def __init__(self, plan: AnswerPlan):
        self.parser = plan.parser() if plan.parses else None
        self._plan = plan
        self._held_reasoning: list[str] = []
        self.content_frames: TextFrames | None = None

    def read(self, delta: ChoiceDelta) -> ChatDelta:
        """What the delta brings; empty when its text must wait."""
        if self.parser is None:
            return ChatDelta(content=delta.text) if delta.text or not delta.finish_reason else ChatDelta()
        events = self.parser.push(delta.text)
        if delta.finish_reason is not None:
            events += self.parser.finish()
        news, reasoning = ChatDelta(), []
        for event in events:
            if isinstance(event, TextDelta) and event.is_reasoning:
                reasoning.append(event.text)
            elif isinstance(event, TextDelta):
                news.content = event.text if news.content is UNSET else news.content + event.text
            else:
                _add_call(news, event)
        thought = self._tell(reasoning, is_over=not self.parser.is_reasoning or delta.finish_reason is not None)
        if thought:
            news.reasoning_content = news.reasoning = thought
        return news

    def _tell(self, reasoning: list[str], *, is_over: bool) -> str:
        """The reasoning to send now: all there is, or with ``stream_reasoning`` false all at its end."""
        if not self._plan.tells_reasoning:
            return ""
        self._held_reasoning += reasoning
        if not (self._plan.streams_reasoning or is_over):
            return ""
        text = "".join(self._held_reasoning)
        self._held_reasoning.clear()
        return text


def _add_call(news: ChatDelta, event: Event) -> None:
    """Add an event of a call to what is told of its index in this chunk."""
    pieces = news.tool_calls = news.tool_calls or []
    if isinstance(event, CallStart):
        pieces.append(CallPiece(event.index, AnsweredFunction("", event.name), event.call_id, "function"))
    elif isinstance(event, CallArguments):
        if not pieces or pieces[-1].index != event.index:
            pieces.append(CallPiece(event.index, AnsweredFunction("")))
        pieces[-1].function.arguments += event.text
    if not pieces:
        news.tool_calls = UNSET


class ChatEvents(Events):
    """The wording of a streamed chat answer: a role chunk for each choice, then its news, then usage when asked for."""

    def __init__(self, body: ChatRequest, generation: Generation, plan: AnswerPlan, model: str, names: TokenNames):
        self._generation = generation
        self._plan = plan
        self._model = model
        self._names = names
        self._created = int(time.time())
        self._choices: dict[int, _ChoiceEvents] = {}
        self._has_usage, self._has_running_usage = check_stream_options(body)
        self._has_ids = bool(body.return_token_ids)
        self._has_text_alone = not (self._has_running_usage or self._has_ids)

    def render(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        """Chunks of one delta; nothing when its text is still being held."""
        opening, choice_events = b"", self._choices.get(delta.index)
        if choice_events is None:
            chunk = self._chunk([ChatChunkChoice(delta.index, ChatDelta(role="assistant", content=""))])
            if not self._choices and self._has_ids:
                chunk.prompt_token_ids = self._generation.streams[0].prompt_token_ids
            choice_events = self._choices[delta.index] = _ChoiceEvents(self._plan)
            opening = frame(chunk)
        news = choice_events.read(delta)
        is_news = (
            news.content or news.reasoning or news.tool_calls or delta.finish_reason or delta.logprobs
            or (self._has_ids and delta.token_ids)
        )
        if not is_news:
            return opening
        if self._has_text_alone and delta.finish_reason is None and delta.logprobs is None and news.is_content_alone:
            return opening + self._frames_of(choice_events, delta.index).fill(news.content)
        choice = ChatChunkChoice(delta.index, news)
        if delta.logprobs is not None:
            choice.logprobs = chat_logprobs(delta.logprobs, self._names)
        if delta.finish_reason is not None:
            choice.finish_reason = finish_reason(delta.finish_reason, choice_events.parser)
            choice.stop_reason = UNSET if delta.stop_reason is None else delta.stop_reason
        if self._has_ids:
            choice.token_ids = delta.token_ids
        return opening + frame(self._chunk([choice]))

    def _frames_of(self, choice_events: _ChoiceEvents, index: int) -> TextFrames:
        if choice_events.content_frames is None:
            choice_events.content_frames = TextFrames(
                lambda text: self._chunk([ChatChunkChoice(index, ChatDelta(content=text))])
            )
        return choice_events.content_frames

    def end(self) -> bytes:
        """The usage chunk."""
        return frame(self._chunk([], usage=self._generation.usage())) if self._has_usage else b""

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        chunk = ChatChunk(self._generation.ask.request_id, self._created, self._model, choices)
        if self._has_running_usage:
            chunk.usage = self._generation.usage()
        elif self._has_usage:
            chunk.usage = usage
        return chunk


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

"""``/v1/chat/completions``."""

from __future__ import annotations

import time

from msgspec import UNSET
from starlette.requests import Request

from headrace.base.errors import RequestError
from headrace.base.sampling import SamplingParams
from headrace.service.client.outputs import ChoiceDelta, CompletionOutput
from headrace.serving.http.body import JsonBody
from headrace.serving.http.context import AppContext, context_of
from headrace.serving.http.conversation import render_conversation
from headrace.serving.http.endpoint import Endpoint
from headrace.serving.http.errors import JsonResponse
from headrace.serving.http.generation import Ask, Generation, collect_generation
from headrace.serving.http.logprobs import TokenNames, chat_logprobs, prompt_logprobs_json
from headrace.serving.http.protocol.answers import Usage
from headrace.serving.http.protocol.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatRequest,
)
from headrace.serving.http.sampling import check_stream_options, given_request_id, pick_request_id, sampling_params
from headrace.serving.http.stream import EventStream, frame, start_stream

BODY = JsonBody(ChatRequest)


def _limit(body: ChatRequest) -> int | None:
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise RequestError("max_tokens and max_completion_tokens are the same limit; give one", param="max_tokens")
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _params(body: ChatRequest, context: AppContext) -> SamplingParams:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    return sampling_params(body, context.facts().default_sampling, max_tokens=_limit(body), logprobs=num_top)


async def create_chat_completion(request: Request) -> JsonResponse | EventStream:
    """Answer a conversation."""
    context = context_of(request)
    body = await BODY.read(request, context.server.max_body_bytes)
    context.check_available()
    context.check_model(body.model)
    check_stream_options(body)
    params = _params(body, context)
    ask = Ask(
        request_id=pick_request_id(given_request_id(body), request, "chatcmpl-"),
        prompts=[await render_conversation(context, body)],
        params=[params],
        namespace=body.cache_salt or "",
        priority=body.priority or 0,
        deadline_s=body.deadline_s,
        add_special_tokens=bool(body.add_special_tokens),  # templates write the special tokens themselves
    )
    names = TokenNames(context.client.tokenizer)
    if body.stream:
        return await start_stream(request, ask, lambda g: ChatEvents(body, g, context.model_name, names))
    generation, (output,) = await collect_generation(request, ask)
    return JsonResponse(ChatCompletion(
        id=ask.request_id, created=int(time.time()), model=context.model_name,
        choices=[_choice(c, names, has_ids=bool(body.return_token_ids)) for c in output.outputs],
        usage=generation.usage(),
        prompt_logprobs=prompt_logprobs_json(output.prompt_logprobs, names) if output.prompt_logprobs else UNSET,
        prompt_token_ids=output.prompt_token_ids if body.return_token_ids else UNSET,
    ))


def _choice(choice: CompletionOutput, names: TokenNames, *, has_ids: bool) -> ChatChoice:
    return ChatChoice(
        choice.index, AssistantMessage(choice.text),
        logprobs=chat_logprobs(choice.logprobs, names) if choice.logprobs is not None else None,
        finish_reason=choice.finish_reason, stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if has_ids else UNSET,
    )


class ChatEvents:
    """The wording of a streamed chat answer: a role chunk for each choice, then content, then usage when asked for."""

    def __init__(self, body: ChatRequest, generation: Generation, model: str, names: TokenNames):
        self._generation = generation
        self._model = model
        self._names = names
        self._created = int(time.time())
        self._begun: set[int] = set()
        self._has_usage, self._has_running_usage = check_stream_options(body)
        self._has_ids = bool(body.return_token_ids)

    def render(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        """Chunks of one delta; nothing when its text is still being held."""
        opening = b""
        if delta.index not in self._begun:
            is_first = not self._begun
            self._begun.add(delta.index)
            chunk = self._chunk([ChatChunkChoice(delta.index, ChatDelta(role="assistant", content=""))])
            if is_first and self._has_ids:
                chunk.prompt_token_ids = self._generation.streams[0].prompt_token_ids
            opening = frame(chunk)
        is_news = delta.text or delta.finish_reason or delta.logprobs or (self._has_ids and delta.token_ids)
        if not is_news:
            return opening
        choice = ChatChunkChoice(delta.index, ChatDelta(content=delta.text) if delta.text or not delta.finish_reason else ChatDelta())
        if delta.logprobs is not None:
            choice.logprobs = chat_logprobs(delta.logprobs, self._names)
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = UNSET if delta.stop_reason is None else delta.stop_reason
        if self._has_ids:
            choice.token_ids = delta.token_ids
        return opening + frame(self._chunk([choice]))

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


ENDPOINTS = (
    Endpoint(
        path="/v1/chat/completions", methods=("POST",), handler=create_chat_completion, tag="openai", doc="Answer a conversation.",
        body=BODY, answer=ChatCompletion, event=ChatChunk, errors=(404, 429, 503, 504),
    ),
)

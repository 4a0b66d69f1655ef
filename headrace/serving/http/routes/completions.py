"""``/v1/completions``: strings or token ids, one or many, with echo."""

from __future__ import annotations

import time
from typing import cast

from msgspec import UNSET
from starlette.requests import Request

from headrace.base.errors import RequestError, UnsupportedFeature
from headrace.base.sampling import SamplingParams
from headrace.base.step import TokenLogprobs
from headrace.service.client.outputs import ChoiceDelta, GenerationOutput
from headrace.serving.http.generation.context import AppContext, context_of
from headrace.serving.http.generation.logprobs import CompletionLogprobsWriter, TokenNames, prompt_logprobs_json
from headrace.serving.http.generation.run import Ask, Generation, Prompt, collect_generation
from headrace.serving.http.generation.sampling import (
    check_stream_options,
    given_request_id,
    grammar_field,
    pick_request_id,
    sampling_params,
)
from headrace.serving.http.generation.stream import Events, EventStream, TextFrames, frame, start_stream
from headrace.serving.http.protocol.openai import (
    DEFAULT_MAX_TOKENS,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from headrace.serving.http.transport.endpoint import Endpoint, JsonBody
from headrace.serving.http.transport.errors import JsonResponse

BODY = JsonBody(CompletionRequest)


def split_prompts(prompt: object, limit: int) -> list[Prompt]:
    """One prompt or several, from the four shapes a client may send; raises `RequestError` for a mixture."""
    if isinstance(prompt, str):
        return [prompt]
    items = cast("list[object]", prompt)
    kinds = set(map(type, items))
    if kinds <= {int}:
        return [cast("list[int]", items)]
    if kinds not in ({str}, {list}):
        raise RequestError("prompt must be a string, token ids, or a list of only one of these", param="prompt")
    if len(items) > limit:
        raise RequestError(f"prompt may hold at most {limit} prompts, got {len(items)}", param="prompt")
    return cast("list[Prompt]", items)


def _params(body: CompletionRequest, context: AppContext) -> SamplingParams:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise UnsupportedFeature("best_of is not supported: it must equal n", param="best_of")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs cannot be streamed; echo with logprobs can", param="prompt_logprobs")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
    params = sampling_params(body, context.facts().default_sampling, max_tokens=max_tokens, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = body.logprobs
    return params


async def create_completion(request: Request) -> JsonResponse | EventStream:
    """Continue prompts."""
    context = context_of(request)
    body = await BODY.read(request, context.server.max_body_bytes)
    context.check_available()
    context.check_model(body.model)
    check_stream_options(body)
    prompts = split_prompts(body.prompt, context.server.max_batch_prompts)
    ask = Ask(
        request_id=pick_request_id(given_request_id(body), request, "cmpl-"),
        prompts=prompts,
        params=[_params(body, context)] * len(prompts),
        namespace=body.cache_salt or "",
        priority=body.priority or 0,
        deadline_s=body.deadline_s,
        add_special_tokens=body.add_special_tokens is not False,
        truncate=body.truncate_prompt_tokens,
        discards_output=body.max_tokens == 0,
        grammar_field=lambda: grammar_field(body),
    )
    if body.stream:
        return await start_stream(request, ask, lambda g: CompletionEvents(body, g, context))
    generation, outputs = await collect_generation(request, ask)
    writer = ChoiceWriter(body, generation, context)
    return await generation.answer(lambda: Completion(
        id=ask.request_id, created=int(time.time()), model=context.model_name,
        choices=[c for i, o in enumerate(outputs) for c in writer.write(i, o)],
        usage=generation.usage(),
    ))


class ChoiceWriter:
    """Words choices: the echoed prompt, the output, their logprobs. Keeps text offsets for each choice, so that a
    choice may come in pieces."""

    def __init__(self, body: CompletionRequest, generation: Generation, context: AppContext):
        self._body = body
        self._generation = generation
        self._tokenizer = context.client.tokenizer
        self._names = TokenNames(self._tokenizer)
        self._writers: dict[int, CompletionLogprobsWriter] = {}
        # logprobs of prompts, which come with their first choices
        self._prompts: dict[int, list[TokenLogprobs | None]] = {}
        self.num_choices = body.n or 1

    def must_wait(self, prompt_index: int, delta: ChoiceDelta) -> bool:
        """Whether the prompt's logprobs, with which the choice opens, have yet to come."""
        is_told = prompt_index in self._prompts or delta.prompt_logprobs is not None
        return bool(self._body.echo) and self._body.logprobs is not None and delta.index > 0 and not is_told

    def write(self, prompt_index: int, output: GenerationOutput) -> list[CompletionChoice]:
        """All choices of one finished prompt."""
        choices = []
        for choice in output.outputs:
            delta = ChoiceDelta(
                choice.index, choice.text, choice.token_ids, choice.logprobs, choice.finish_reason, choice.stop_reason,
                prompt_logprobs=output.prompt_logprobs,
            )
            choices.append(self.write_piece(prompt_index, delta))
            if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
                choices[-1].prompt_logprobs = prompt_logprobs_json(output.prompt_logprobs, self._names)
        return choices

    def write_piece(self, prompt_index: int, delta: ChoiceDelta) -> CompletionChoice:
        """The piece of a choice that a delta brings; the first one opens with the prompt when it is echoed."""
        body, index = self._body, prompt_index * self.num_choices + delta.index
        is_first = index not in self._writers
        writer = self._writers.setdefault(index, CompletionLogprobsWriter(self._names, num_top=body.logprobs or 0))
        text, logprobs = "", None
        if delta.prompt_logprobs is not None:
            self._prompts[prompt_index] = delta.prompt_logprobs
        if is_first and body.echo:
            text, logprobs = self._echo(prompt_index, writer)
        if delta.logprobs is not None:
            logprobs = writer.write(delta.logprobs, into=logprobs)
        piece = CompletionChoice(index, text + delta.text, logprobs, delta.finish_reason, delta.stop_reason)
        if body.return_token_ids:
            piece.token_ids = delta.token_ids
            if is_first:
                piece.prompt_token_ids = self._generation.streams[prompt_index].prompt_token_ids
        return piece

    def _echo(self, prompt_index: int, writer: CompletionLogprobsWriter) -> tuple[str, CompletionLogprobs | None]:
        ids, prompt = (
            self._generation.streams[prompt_index].prompt_token_ids, self._generation.ask.prompts[prompt_index]
        )
        if not isinstance(prompt, str):
            prompt = (
                self._tokenizer.decode(ids, skip_special_tokens=self._body.skip_special_tokens is not False)
                if self._tokenizer else ""
            )
        if self._body.logprobs is None:
            return prompt, None
        return prompt, writer.write_prompt(ids, self._prompts.get(prompt_index, []))


class CompletionEvents(Events):
    """The wording of a streamed completion."""

    def __init__(self, body: CompletionRequest, generation: Generation, context: AppContext):
        self._generation = generation
        self._model = context.model_name
        self._writer = ChoiceWriter(body, generation, context)
        self._created = int(time.time())
        self._has_usage, self._has_running_usage = check_stream_options(body)
        self._has_ids = bool(body.return_token_ids)
        self._has_text_alone = not (
            self._has_running_usage or self._has_ids or body.max_tokens == 0 or body.logprobs is not None
        )
        self._frames: dict[int, TextFrames] = {}
        self._held: dict[int, list[ChoiceDelta]] = {}

    def render(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        """The chunk of one delta; nothing when its text is still being held. Choices that are ahead of their prompt's
        logprobs follow these."""
        frames = self._frames.get(prompt_index * self._writer.num_choices + delta.index)
        if frames is not None and delta.finish_reason is None:
            return frames.fill(delta.text) if delta.text else b""
        if self._writer.must_wait(prompt_index, delta):
            self._held.setdefault(prompt_index, []).append(delta)
            return b""
        chunk = self._render(prompt_index, delta)
        return chunk + b"".join(self._render(prompt_index, held) for held in self._held.pop(prompt_index, ()))

    def _render(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        place = prompt_index * self._writer.num_choices + delta.index
        if self._has_text_alone and delta.finish_reason is None:
            self._frames[place] = TextFrames(lambda text: self._chunk([CompletionChoice(place, text)]))
        piece = self._writer.write_piece(prompt_index, delta)
        if not (piece.text or piece.finish_reason or piece.logprobs or (self._has_ids and delta.token_ids)):
            return b""
        chunk = self._chunk([piece])
        if self._has_running_usage:
            chunk.usage = self._generation.usage()
        return frame(chunk)

    def end(self) -> bytes:
        """The usage chunk."""
        if not self._has_usage:
            return b""
        chunk = self._chunk([])
        chunk.usage = self._generation.usage()
        return frame(chunk)

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        usage = None if self._has_usage else UNSET
        return Completion(self._generation.ask.request_id, self._created, self._model, choices, usage=usage)


ENDPOINTS = (
    Endpoint(
        path="/v1/completions", methods=("POST",), handler=create_completion, tag="openai",
        doc="Continue one or many prompts.",
        body=BODY, answer=Completion, event=Completion, errors=(404, 429, 503, 504),
    ),
)

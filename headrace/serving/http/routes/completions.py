"""``/v1/completions``: strings or token ids, one or many, with echo."""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import UNSET
from starlette.requests import Request

from headrace.base.errors import RequestError, UnsupportedFeature
from headrace.base.sampling import SamplingParams
from headrace.base.step import TokenLogprobs
from headrace.service.client.outputs import ChoiceDelta, GenerationOutput
from headrace.service.client.prompts import encode_around_gap
from headrace.service.tokenization.text_decoder import TextDecoder
from headrace.serving.http.generation.context import AppContext, compute, read_request
from headrace.serving.http.generation.exchange import answer_router, note_rooms, telling_refusals, with_transfers
from headrace.serving.http.generation.logprobs import CompletionLogprobsWriter, TokenNames, prompt_logprobs_json
from headrace.serving.http.generation.media import place_fields, read_fields
from headrace.serving.http.generation.pooling import split_inputs
from headrace.serving.http.generation.run import Generation, GenerationRequest, PlainPrompt, collect_generation
from headrace.serving.http.generation.sampling import (
    body_request_id,
    check_stream_options,
    check_streamed,
    grammar_field,
    openai_params,
    pick_request_id,
)
from headrace.serving.http.generation.stream import Events, EventStream, TextFrames, frame, start_stream
from headrace.serving.http.protocol.openai import (
    DEFAULT_MAX_TOKENS,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from headrace.serving.http.transport.endpoint import GENERATION_ERRORS, JsonBody, post
from headrace.serving.http.transport.errors import JsonResponse

BODY = JsonBody(CompletionRequest)


def _params(body: CompletionRequest, context: AppContext) -> SamplingParams:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise UnsupportedFeature("best_of is not supported: it must equal n", param="best_of")
    check_streamed(body, body.logprobs)
    # 0 means echo only; the engine must sample one token, which `discards_output` removes.
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
    params = openai_params(body, context.facts().default_sampling, max_tokens=max_tokens, logprobs=body.logprobs)
    params.fits_context = body.max_tokens is None
    # logprobs of an echoed prompt are prompt logprobs to the engine
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = body.logprobs
    return params


async def _surround_gap(
    context: AppContext, request: Request, body: CompletionRequest, prompts: Sequence[PlainPrompt]
) -> list[PlainPrompt]:
    """The prompts as token ids that ask the model to fill the gap between each of them and the suffix."""
    suffix, limit, tokenizer = body.suffix or "", context.facts().max_model_len, context.client.tokenizer
    for name, value in (("echo", body.echo), ("truncate_prompt_tokens", body.truncate_prompt_tokens)):
        if value:
            raise RequestError(f"{name} and suffix exclude each other", param=name)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise RequestError(
            "suffix needs prompts of text; put the fill-in-the-middle tokens among your ids", param="suffix"
        )
    has_special = body.add_special_tokens is not False

    def encode() -> list[PlainPrompt]:
        return [encode_around_gap(text, suffix, tokenizer, limit, add_special_tokens=has_special) for text in texts]

    return await compute(request, encode)


@telling_refusals
async def create_completion(request: Request) -> JsonResponse | EventStream:
    """Continue one or many prompts."""
    context, body = await read_request(request, BODY)
    note_rooms(request, body, context)
    adapter = context.check_request(body.model)
    check_stream_options(body)
    prompts = split_inputs(body.prompt, context.server.max_batch_prompts, "prompt", noun="prompts")
    if body.suffix:
        prompts = await _surround_gap(context, request, body, prompts)
    has_special = body.add_special_tokens is not False
    refs = read_fields(body, len(prompts), is_batch=len(prompts) > 1)
    namespace = body.cache_salt or ""
    placed = await place_fields(request, context, prompts, refs, salt=namespace, add_special_tokens=has_special)
    params = with_transfers([_params(body, context)] * len(prompts), body, context.client.config)
    generation_request = GenerationRequest(
        request_id=pick_request_id(body_request_id(body), request, "cmpl-"), prompts=placed, params=params,
        namespace=namespace, priority=body.priority or 0,
        deadline_s=body.deadline_s, add_special_tokens=has_special,
        truncate=body.truncate_prompt_tokens, keeps_begin=body.truncation_side == "right",
        discards_output=body.max_tokens == 0, adapter=adapter,
        grammar_field=lambda: grammar_field(body),
    )
    if body.stream:
        return await start_stream(request, generation_request, lambda g: CompletionEvents(body, g, context))
    generation, outputs = await collect_generation(request, generation_request)
    writer = ChoiceWriter(body, generation, context)
    return await generation.respond(lambda: Completion(
        id=generation_request.request_id, created=int(time.time()), model=generation.model_name,
        choices=[c for i, o in enumerate(outputs) for c in writer.write(i, o)],
        usage=generation.usage(), system_fingerprint=context.system_fingerprint,
        timings=generation.timings() if body.return_timings else UNSET,
        kv_transfer_params=answer_router(params, body, context.client.config),
    ))


class ChoiceWriter:
    """Writes choices: the echoed prompt, the output, their logprobs. Keeps text offsets per choice, so that a choice
    may come in pieces."""

    def __init__(self, body: CompletionRequest, generation: Generation, context: AppContext):
        self._body = body
        self._generation = generation
        self._tokenizer = context.client.tokenizer
        self._names = TokenNames(
            self._tokenizer, as_ids=bool(body.return_tokens_as_token_ids), wanted=body.logprob_token_ids or ()
        )
        # by the number of the choice in the response
        self._writers: dict[int, CompletionLogprobsWriter] = {}
        # prompt logprobs by prompt index; they come with the prompt's first choice
        self._prompts: dict[int, list[TokenLogprobs | None]] = {}
        self.num_choices = body.n or 1

    def must_wait(self, prompt_index: int, delta: ChoiceDelta) -> bool:
        """Whether the choice starts with prompt logprobs that have not arrived yet."""
        is_known = prompt_index in self._prompts or delta.prompt_logprobs is not None
        return bool(self._body.echo) and self._body.logprobs is not None and delta.index > 0 and not is_known

    def write(self, prompt_index: int, output: GenerationOutput) -> list[CompletionChoice]:
        """All choices of one finished prompt."""
        choices = []
        for choice in output.outputs:
            delta = ChoiceDelta(
                choice.index, choice.text, choice.token_ids, choice.logprobs, choice.finish_reason, choice.stop_reason,
                prompt_logprobs=output.prompt_logprobs, matched_stop=choice.matched_stop,
            )
            choices.append(self.write_piece(prompt_index, delta))
            if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
                choices[-1].prompt_logprobs = prompt_logprobs_json(output.prompt_logprobs, self._names)
        return choices

    def write_piece(self, prompt_index: int, delta: ChoiceDelta) -> CompletionChoice:
        """The piece of a choice for one delta; with ``echo`` the first one starts with the prompt."""
        # OpenAI's numbering: all choices of the first prompt, then those of the second
        body, index = self._body, prompt_index * self.num_choices + delta.index
        is_first = index not in self._writers
        writer = self._writers.get(index) or self._writers.setdefault(index, CompletionLogprobsWriter(
            self._names, num_top=body.logprobs or 0, decoder=self._decoder(prompt_index)
        ))
        text, logprobs = "", None
        if delta.prompt_logprobs is not None:
            self._prompts[prompt_index] = delta.prompt_logprobs
        if is_first and body.echo:
            text, logprobs = self._echo(prompt_index, writer)
        if delta.logprobs is not None:
            logprobs = writer.write(delta.logprobs, into=logprobs)
        piece = CompletionChoice(
            index, text + delta.text, logprobs, delta.finish_reason, delta.stop_reason, delta.matched_stop
        )
        if body.return_token_ids:
            piece.token_ids = delta.token_ids
            if is_first:
                piece.prompt_token_ids = self._generation.streams[prompt_index].prompt_token_ids
        return piece

    def _echo(self, prompt_index: int, writer: CompletionLogprobsWriter) -> tuple[str, CompletionLogprobs | None]:
        ids = self._generation.streams[prompt_index].prompt_token_ids
        prompt = self._generation.request.prompts[prompt_index]
        if isinstance(prompt, str) and self._body.truncate_prompt_tokens is None:
            text = prompt
        elif self._tokenizer is None:
            text = ""
        else:
            text = self._tokenizer.decode(ids, skip_special_tokens=self._body.skip_special_tokens is not False)
        if self._body.logprobs is None:
            return text, None
        # a text has the special tokens that the client wrote, and none of those that were added
        decoder = self._decoder(None, shows_special=isinstance(prompt, str))
        return text, writer.write_prompt(ids, self._prompts.get(prompt_index, []), text, decoder)

    def _decoder(self, prompt_index: int | None, *, shows_special: bool = False) -> TextDecoder | None:
        """What makes the text of the output behind a prompt, or of a prompt; None where there is none."""
        if self._tokenizer is None or (self._body.logprobs is None and not self._body.logprob_token_ids):
            return None
        decoder = TextDecoder(
            self._tokenizer.bytes_table,
            skip_special_tokens=self._body.skip_special_tokens is not False and not shows_special,
            spaces_between_special_tokens=self._body.spaces_between_special_tokens is not False,
        )
        if prompt_index is not None:
            decoder.skip_prompt(self._generation.streams[prompt_index].prompt_token_ids)
        return decoder


class CompletionEvents(Events):
    """Stream events of completions."""

    def __init__(self, body: CompletionRequest, generation: Generation, context: AppContext):
        self._generation = generation
        self._model, self._fingerprint = generation.model_name, context.system_fingerprint
        self._writer = ChoiceWriter(body, generation, context)
        self._created = int(time.time())
        self._has_usage, self._has_running_usage = check_stream_options(body)
        self._has_ids, self._has_timings = bool(body.return_token_ids), bool(body.return_timings)
        self._is_text_only = not (
            self._has_running_usage or self._has_ids or body.max_tokens == 0 or body.logprobs is not None
            or body.logprob_token_ids
        )
        self._frames: dict[int, TextFrames] = {}
        self._held: dict[int, list[ChoiceDelta]] = {}

    def render(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        """The chunk of one delta; empty while it has no text. A choice whose echo needs prompt logprobs waits until
        the first choice of its prompt has brought them."""
        # The common case: a choice whose chunks differ only in text fills a prepared frame. Its first chunk took the
        # slow path, which adds the echoed prompt.
        frames = self._frames.get(prompt_index * self._writer.num_choices + delta.index)
        if frames is not None and delta.finish_reason is None:
            return frames.fill(delta.text) if delta.text else b""
        if self._writer.must_wait(prompt_index, delta):
            self._held.setdefault(prompt_index, []).append(delta)
            return b""
        chunk = self._render(prompt_index, delta)
        return chunk + b"".join(self._render(prompt_index, held) for held in self._held.pop(prompt_index, ()))

    def _render(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        index = prompt_index * self._writer.num_choices + delta.index
        if self._is_text_only and delta.finish_reason is None:
            self._frames[index] = TextFrames(lambda text: self._chunk([CompletionChoice(index, text)]))
        piece = self._writer.write_piece(prompt_index, delta)
        if not (piece.text or piece.finish_reason or piece.logprobs or (self._has_ids and delta.token_ids)):
            return b""
        chunk = self._chunk([piece])
        if self._has_running_usage:
            chunk.usage = self._generation.usage()
        if self._has_timings and delta.finish_reason is not None:
            chunk.timings = self._generation.timings()
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
        name = self._generation.request.request_id
        return Completion(name, self._created, self._model, choices, self._fingerprint, usage=usage)


ENDPOINTS = (
    post(
        "/v1/completions", create_completion, "openai", Completion, body=BODY, event=Completion,
        errors=GENERATION_ERRORS
    ),
)

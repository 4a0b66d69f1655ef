"""SGLang's native ``/generate``: one prompt or a batch; stream frames hold all text so far."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import cast

from starlette.requests import Request

from headrace.base.errors import RequestError
from headrace.base.sampling import SamplingParams
from headrace.base.step import TokenLogprobs
from headrace.service.client.outputs import ChoiceDelta, Collector, CompletionOutput, GenerationOutput
from headrace.serving.http.generation.context import AppContext, read_request
from headrace.serving.http.generation.exchange import note_rooms, telling_refusals, with_transfers
from headrace.serving.http.generation.logprobs import TokenNames, native_triples
from headrace.serving.http.generation.media import place_fields, read_fields
from headrace.serving.http.generation.pooling import check_amount
from headrace.serving.http.generation.run import Generation, GenerationRequest, PlainPrompt, collect_generation
from headrace.serving.http.generation.sampling import (
    NATIVE_PREFIX,
    grammar_field,
    pick_request_id,
    sampling_params,
    spread,
)
from headrace.serving.http.generation.stream import Events, EventStream, frame, start_stream
from headrace.serving.http.protocol.native import (
    DEFAULT_MAX_NEW_TOKENS,
    FinishReason,
    Generated,
    GenerateRequest,
    LogprobTriple,
    MetaInfo,
    NativeSampling,
)
from headrace.serving.http.transport.endpoint import JsonBody, post
from headrace.serving.http.transport.errors import JsonResponse

BODY = JsonBody(GenerateRequest, nested=("sampling_params", NativeSampling))
WITHIN = "sampling_params."
FIELD_NAMES = {name: WITHIN + name for name in NativeSampling.__struct_fields__} | {
    "max_tokens": WITHIN + "max_new_tokens", "min_tokens": WITHIN + "min_new_tokens",
    "logprobs": "top_logprobs_num", "prompt_logprobs": "top_logprobs_num", "logprob_token_ids": "token_ids_logprob",
}
"""Fields by the names that the engine's errors have."""


def _prompts(body: GenerateRequest, limit: int) -> tuple[list[PlainPrompt], bool]:
    """``(prompts, whether they are a batch)``."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give one of text and input_ids", param="text")
    if isinstance(body.text, str):
        return [body.text], False
    if isinstance(body.input_ids, array):
        return [body.input_ids], False
    items = cast("list[object]", body.text if body.text is not None else body.input_ids)
    if body.text is None and all(isinstance(item, int) for item in items):
        return [cast("list[int]", items)], False
    if body.text is None and not all(isinstance(item, (list, array)) for item in items):
        raise RequestError("input_ids must be token ids or a list of lists of token ids", param="input_ids")
    check_amount(len(items), limit, "text" if body.text is not None else "input_ids", "prompts")
    return cast("list[PlainPrompt]", items), True


def _params(body: GenerateRequest, fields: NativeSampling, defaults: dict[str, float]) -> SamplingParams:
    if None not in (fields.seed, fields.sampling_seed) and fields.seed != fields.sampling_seed:
        raise RequestError("seed and sampling_seed are the same field; give one", param=WITHIN + "sampling_seed")
    num_top = (body.top_logprobs_num or 0) if body.return_logprob else None
    has_input = num_top is not None and body.logprob_start_len not in (None, -1)
    return sampling_params(
        fields, defaults, within=WITHIN, logprobs=num_top, prompt_logprobs=num_top if has_input else None,
        logprob_token_ids=body.token_ids_logprob,
        max_tokens=DEFAULT_MAX_NEW_TOKENS if fields.max_new_tokens is None else max(fields.max_new_tokens, 1),
        fits_context=fields.max_new_tokens is None, min_tokens=fields.min_new_tokens,
        seed=fields.sampling_seed if fields.seed is None else fields.seed,
        include_stop_str_in_output=bool(fields.no_stop_trim or fields.include_stop_str_in_output),
    )


def _discards_output(sampling: list[NativeSampling]) -> bool:
    """Whether ``max_new_tokens`` is 0 (only prompt logprobs are wanted). It must be so for all of a batch, or none."""
    of_each = {fields.max_new_tokens == 0 for fields in sampling}
    if len(of_each) > 1:
        raise RequestError(
            "max_new_tokens must be 0 for all prompts of a batch, or for none", param=WITHIN + "max_new_tokens"
        )
    return True in of_each


def _request_ids(body: GenerateRequest, request: Request, num_prompts: int) -> tuple[str, list[str] | None]:
    """``(id of the HTTP request, id of each prompt or None if the client gave none)``."""
    if not isinstance(body.rid, list):
        return pick_request_id(body.rid, request, NATIVE_PREFIX), None
    ids: list[str] = spread(body.rid, num_prompts, "rid")
    # The whole HTTP request runs under the first id: aborting that aborts all prompts.
    return ids[0], ids


def _adapter(body: GenerateRequest, context: AppContext, num_prompts: int) -> str | list[str]:
    """The adapter of all prompts, or of each one."""
    given = body.lora_path
    if not isinstance(given, list):
        return context.check_model(given, field="lora_path")
    names: list[str | None] = spread(given, num_prompts, "lora_path")
    return [context.check_model(name, field="lora_path") for name in names]


@telling_refusals
async def generate(request: Request) -> JsonResponse | EventStream:
    """Continue one prompt or a batch (SGLang's API)."""
    context, body = await read_request(request, BODY)
    note_rooms(request, body, context)
    context.check_available()
    for name, value in (("top_logprobs_num", body.top_logprobs_num), ("token_ids_logprob", body.token_ids_logprob)):
        if value and not body.return_logprob:
            raise RequestError(f"{name} needs return_logprob to be true", param=name)
    if body.stream and body.top_logprobs_num == -1:
        raise RequestError("logprobs of all tokens (-1) cannot be streamed", param="top_logprobs_num")
    prompts, is_batch = _prompts(body, context.server.max_batch_prompts)
    adapter = _adapter(body, context, len(prompts))
    sampling = spread(body.sampling_params or NativeSampling(), len(prompts), "sampling_params")
    defaults = context.facts().default_sampling
    if isinstance(body.sampling_params, list):
        params = [_params(body, fields, defaults) for fields in sampling]
    else:
        params = [_params(body, sampling[0], defaults)] * len(prompts)
    params = with_transfers(params, body, context.client.config)
    request_id, stream_ids = _request_ids(body, request, len(prompts))
    refs, namespace = read_fields(body, len(prompts), is_batch=is_batch), "/".join(
        filter(None, (body.cache_salt, body.extra_key))
    )
    placed = await place_fields(request, context, prompts, refs, salt=namespace)
    generation_request = GenerationRequest(
        request_id=request_id, prompts=placed, params=params, stream_ids=stream_ids,
        namespace=namespace, priority=body.priority or 0,
        deadline_s=body.deadline_s, discards_output=_discards_output(sampling), adapter=adapter,
        grammar_field=lambda: next(filter(None, (grammar_field(s, within=WITHIN) for s in sampling)), ""),
        field_names={**FIELD_NAMES, "prompt": "text" if body.input_ids is None else "input_ids"},
    )
    is_list = is_batch or any(p.n > 1 for p in params)
    names = TokenNames(context.client.tokenizer) if body.return_text_in_logprobs else None
    if body.stream:
        return await start_stream(
            request, generation_request, lambda g: NativeEvents(ResultWriter(body, g, names), is_list=is_list)
        )
    generation, outputs = await collect_generation(request, generation_request)
    writer = ResultWriter(body, generation, names)

    def build() -> list[Generated] | Generated:
        results = [writer.write(i, output, choice) for i, output in enumerate(outputs) for choice in output.outputs]
        return results if is_list else results[0]

    return await generation.respond(build)


def _finish_reason(choice: CompletionOutput) -> FinishReason | None:
    if choice.finish_reason is None:
        return None
    reason = FinishReason(choice.finish_reason)
    if choice.finish_reason == "length":
        reason.length = len(choice.token_ids)
    elif choice.finish_reason == "abort":
        reason.message = "aborted"
    elif choice.matched_stop is not None:
        reason.matched = choice.matched_stop
    return reason


class ResultWriter:
    """Writes one choice of one prompt, finished or so far."""

    def __init__(self, body: GenerateRequest, generation: Generation, names: TokenNames | None):
        self._body = body
        self._names = names
        self.generation = generation

    def write(self, prompt_index: int, output: GenerationOutput, choice: CompletionOutput) -> Generated:
        """The record of a choice."""
        generation, body = self.generation, self._body
        is_single = generation.request.params[prompt_index].n == 1
        info = MetaInfo(
            id=output.request_id if is_single else f"{output.request_id}/{choice.index}",
            finish_reason=_finish_reason(choice),
            prompt_tokens=len(output.prompt_token_ids), completion_tokens=len(choice.token_ids),
            cached_tokens=generation.num_cached(prompt_index), e2e_latency=generation.timers[prompt_index].elapsed_s,
        )
        if body.return_prompt_token_ids:
            info.prompt_token_ids = output.prompt_token_ids
        if body.return_timings:
            info.timings = generation.timings()
        if body.return_logprob:
            self._add_logprobs(info, output, choice)
        return Generated(choice.text, choice.token_ids, info)

    def _add_logprobs(self, info: MetaInfo, output: GenerationOutput, choice: CompletionOutput) -> None:
        entries = choice.logprobs or []
        info.output_token_logprobs = self._triples((e.token_id, e.logprob) for e in entries)
        start, ids = self._body.logprob_start_len, output.prompt_token_ids
        has_input = start is not None and start >= 0 and output.prompt_logprobs is not None
        given: Sequence[TokenLogprobs | None] = (output.prompt_logprobs or []) if has_input else []
        missing: list[TokenLogprobs | None] = [None] * (len(ids) - len(given))  # the first token has no logprob
        padded = [*missing, *given] if has_input else []
        # `padded` is empty when no input logprobs were requested; then `kept` is, too.
        kept = list(zip(ids, padded, strict=False))[start or 0 :]
        info.input_token_logprobs = [
            (None, i, self._names.text(i) if self._names else None) if e is None else self._triples([(i, e.logprob)])[0]
            for i, e in kept
        ]
        if self._body.top_logprobs_num:
            info.output_top_logprobs = [self._top(e) for e in entries]
            info.input_top_logprobs = [None if e is None else self._top(e) for _, e in kept]
        wanted = list(dict.fromkeys(self._body.token_ids_logprob or ()))
        if wanted:
            info.output_token_ids_logprobs = [self._triples(zip(wanted, e.id_logprobs, strict=True)) for e in entries]
            info.input_token_ids_logprobs = [
                None if e is None else self._triples(zip(wanted, e.id_logprobs, strict=True)) for _, e in kept
            ]

    def _top(self, entry: TokenLogprobs) -> list[LogprobTriple]:
        return self._triples(zip(entry.top_ids, entry.top_logprobs, strict=True))

    def _triples(self, pairs: Iterable[tuple[int, float]]) -> list[LogprobTriple]:
        return native_triples(pairs, self._names)


class NativeEvents(Events):
    """Stream frames, each with a choice so far. Frames of a batch have an index."""

    def __init__(self, writer: ResultWriter, *, is_list: bool):
        self._writer = writer
        self._is_list = is_list
        generation = writer.generation
        self._collectors = [
            Collector(stream.request_id, None, stream.prompt_token_ids, params.n)
            for stream, params in zip(generation.streams, generation.request.params, strict=True)
        ]
        sizes = [p.n for p in generation.request.params]
        # Choices of all prompts are numbered consecutively: the number of each prompt's first one.
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]

    def render(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        """The frame of one delta."""
        collector = self._collectors[prompt_index]
        collector.add(delta)
        result = self._writer.write(prompt_index, collector.output, collector.output.outputs[delta.index])
        if self._is_list:
            result.index = self._offsets[prompt_index] + delta.index
        return frame(result)

    def end(self) -> bytes:
        """Nothing: every frame is complete."""
        return b""


ENDPOINTS = (
    post(
        "/generate", generate, "native", Generated | list[Generated], body=BODY, event=Generated,
        errors=(404, 429, 503, 504)
    ),
)

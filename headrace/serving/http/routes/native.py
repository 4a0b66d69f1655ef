"""SGLang's native ``/generate``: one prompt or a batch, frames with all text so far when streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from starlette.requests import Request

from headrace.base.errors import RequestError
from headrace.base.sampling import SamplingParams
from headrace.service.client.outputs import ChoiceDelta, Collector, CompletionOutput, GenerationOutput
from headrace.serving.http.generation.context import context_of
from headrace.serving.http.generation.logprobs import TokenNames, native_top, native_triples
from headrace.serving.http.generation.run import Ask, Generation, Prompt, collect_generation
from headrace.serving.http.generation.sampling import grammar_field, pick_request_id, read_defaults, read_grammar
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
from headrace.serving.http.transport.endpoint import Endpoint, JsonBody
from headrace.serving.http.transport.errors import JsonResponse

if TYPE_CHECKING:
    from headrace.base.step import TokenLogprobs

BODY = JsonBody(GenerateRequest, nested=NativeSampling)

SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "bad_words",
    "allowed_token_ids", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
)


def _prompts(body: GenerateRequest, limit: int) -> tuple[list[Prompt], bool]:
    """``(prompts, whether a batch was asked for)``."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give one of text and input_ids", param="text")
    if isinstance(body.text, str):
        return [body.text], False
    items = cast("list[object]", body.text if body.text is not None else body.input_ids)
    if body.text is None and all(isinstance(item, int) for item in items):
        return [cast("list[int]", items)], False
    if body.text is None and not all(isinstance(item, list) for item in items):
        raise RequestError("input_ids must be token ids or a list of lists of token ids", param="input_ids")
    if len(items) > limit:
        raise RequestError(f"a batch may hold at most {limit} prompts, got {len(items)}", param="text")
    return cast("list[Prompt]", items), True


def _sampling(body: GenerateRequest, asked: NativeSampling, defaults: dict[str, float]) -> SamplingParams:
    fields = {name: value for name in SAME_NAME if (value := getattr(asked, name)) is not None}
    if None not in (asked.seed, asked.sampling_seed) and asked.seed != asked.sampling_seed:
        raise RequestError("seed and sampling_seed are the same field; give one", param="sampling_params.sampling_seed")
    if asked.min_new_tokens is not None:
        fields["min_tokens"] = asked.min_new_tokens
    num_top = (body.top_logprobs_num or 0) if body.return_logprob else None
    has_input = num_top is not None and body.logprob_start_len not in (None, -1)
    return SamplingParams(**{
        **read_defaults(defaults), **fields,
        "max_tokens": DEFAULT_MAX_NEW_TOKENS if asked.max_new_tokens is None else max(asked.max_new_tokens, 1),
        "seed": asked.sampling_seed if asked.seed is None else asked.seed,
        "include_stop_str_in_output": bool(asked.no_stop_trim or asked.include_stop_str_in_output),
        "logprobs": num_top,
        "prompt_logprobs": num_top if has_input else None,
        "grammar": read_grammar(asked, within="sampling_params."),
    })


def _params(body: GenerateRequest, num_prompts: int, defaults: dict[str, float]) -> list[SamplingParams]:
    asked = body.sampling_params or NativeSampling()
    if not isinstance(asked, list):
        return [_sampling(body, asked, defaults)] * num_prompts
    if len(asked) != num_prompts:
        raise RequestError(
            f"sampling_params must be one, or one for each of the {num_prompts} prompts", param="sampling_params"
        )
    return [_sampling(body, one, defaults) for one in asked]


def _discards_output(asked: NativeSampling | list[NativeSampling] | None) -> bool:
    """Whether ``max_new_tokens`` is 0: only the prompts' logprobs are wanted. It must be so for all of a batch."""
    of_each = {one.max_new_tokens == 0 for one in (asked if isinstance(asked, list) else [asked]) if one is not None}
    if len(of_each) > 1:
        raise RequestError(
            "max_new_tokens must be 0 for all prompts of a batch, or for none", param="sampling_params.max_new_tokens"
        )
    return True in of_each


def _grammar_field(asked: NativeSampling | list[NativeSampling] | None) -> str:
    of_each = (grammar_field(one, within="sampling_params.") for one in (asked if isinstance(asked, list) else [asked]))
    return next(filter(None, of_each), "")


def _names(body: GenerateRequest, request: Request, num_prompts: int) -> tuple[str, list[str]]:
    """``(id of the whole, id of each prompt)``."""
    if isinstance(body.rid, list):
        if len(body.rid) != num_prompts:
            raise RequestError(f"rid must be one, or one for each of the {num_prompts} prompts", param="rid")
        return body.rid[0], body.rid
    rid = pick_request_id(body.rid, request, "gen-")
    return rid, [rid] if num_prompts == 1 else [f"{rid}-{i}" for i in range(num_prompts)]


async def generate(request: Request) -> JsonResponse | EventStream:
    """Continue one prompt or a batch."""
    context = context_of(request)
    body = await BODY.read(request, context.server.max_body_bytes)
    context.check_available()
    if body.top_logprobs_num and not body.return_logprob:
        raise RequestError("top_logprobs_num needs return_logprob to be true", param="top_logprobs_num")
    prompts, is_batch = _prompts(body, context.server.max_batch_prompts)
    params = _params(body, len(prompts), context.facts().default_sampling)
    request_id, names = _names(body, request, len(prompts))
    salt = f"{body.cache_salt or ''}{'/' if body.cache_salt and body.extra_key else ''}{body.extra_key or ''}"
    ask = Ask(
        request_id=request_id, prompts=prompts, params=params, namespace=salt, priority=body.priority or 0,
        deadline_s=body.deadline_s,
        stream_ids=names, discards_output=_discards_output(body.sampling_params),
        grammar_field=lambda: _grammar_field(body.sampling_params),
    )
    is_list = is_batch or any(p.n > 1 for p in params)
    texts = TokenNames(context.client.tokenizer) if body.return_text_in_logprobs else None
    if body.stream:
        return await start_stream(request, ask, lambda g: NativeEvents(ResultWriter(body, g, texts), is_list=is_list))
    generation, outputs = await collect_generation(request, ask)
    writer = ResultWriter(body, generation, texts)

    def word() -> list[Generated] | Generated:
        results = [writer.write(i, output, choice) for i, output in enumerate(outputs) for choice in output.outputs]
        return results if is_list else results[0]

    return await generation.answer(word)


def _finish_reason(choice: CompletionOutput) -> FinishReason | None:
    if choice.finish_reason is None:
        return None
    reason = FinishReason(choice.finish_reason)
    if choice.finish_reason == "length":
        reason.length = len(choice.token_ids)
    elif choice.finish_reason == "abort":
        reason.message = "aborted"
    elif choice.stop_reason is not None:
        reason.matched = choice.stop_reason
    return reason


class ResultWriter:
    """Words one choice of one prompt, finished or as far as it has come."""

    def __init__(self, body: GenerateRequest, generation: Generation, texts: TokenNames | None):
        self._body = body
        self._texts = texts
        self.generation = generation

    def write(self, prompt_index: int, output: GenerationOutput, choice: CompletionOutput) -> Generated:
        """The record of a choice."""
        generation, body = self.generation, self._body
        num_choices = generation.ask.params[prompt_index].n
        name = output.request_id
        info = MetaInfo(
            id=name if num_choices == 1 else f"{name}/{choice.index}",
            finish_reason=_finish_reason(choice),
            prompt_tokens=len(output.prompt_token_ids), completion_tokens=len(choice.token_ids),
            cached_tokens=generation.num_cached(prompt_index), e2e_latency=generation.timers[prompt_index].elapsed_s,
        )
        if body.return_prompt_token_ids:
            info.prompt_token_ids = output.prompt_token_ids
        if body.return_logprob:
            self._add_logprobs(info, output, choice)
        return Generated(choice.text, choice.token_ids, info)

    def _add_logprobs(self, info: MetaInfo, output: GenerationOutput, choice: CompletionOutput) -> None:
        entries = choice.logprobs or []
        info.output_token_logprobs = native_triples(entries, self._texts)
        start, ids = self._body.logprob_start_len, output.prompt_token_ids
        has_input = start is not None and start >= 0 and output.prompt_logprobs is not None
        given: Sequence[TokenLogprobs | None] = (output.prompt_logprobs or []) if has_input else []
        padded: list[TokenLogprobs | None] = [None] * (len(ids) - len(given)) + list(given) if has_input else []
        kept = list(zip(ids, padded, strict=False))[start or 0 :]
        info.input_token_logprobs = [self._input(token_id, entry) for token_id, entry in kept]
        if self._body.top_logprobs_num:
            info.output_top_logprobs = [native_top(e, self._texts) for e in entries]
            info.input_top_logprobs = [None if e is None else native_top(e, self._texts) for _, e in kept]

    def _input(self, token_id: int, entry: TokenLogprobs | None) -> LogprobTriple:
        if entry is None:
            return None, token_id, self._texts.text(token_id) if self._texts else None
        return native_triples([entry], self._texts)[0]


class NativeEvents(Events):
    """The wording of a stream: each frame holds a choice as far as it has come. Frames of a batch tell their index."""

    def __init__(self, writer: ResultWriter, *, is_list: bool):
        self._writer = writer
        self._is_list = is_list
        generation = writer.generation
        self._collectors = [
            Collector(s.request_id, None, s.prompt_token_ids, p.n) for s,
            p in zip(generation.streams, generation.ask.params, strict=True)
        ]
        sizes = [p.n for p in generation.ask.params]
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
        """Nothing: every frame is complete in itself."""
        return b""


ENDPOINTS = (
    Endpoint(
        path="/generate", methods=("POST",), handler=generate, tag="native",
        doc="Continue one prompt or a batch (SGLang's API).", body=BODY,
        answer=Generated | list[Generated], event=Generated, errors=(429, 503, 504),
    ),
)

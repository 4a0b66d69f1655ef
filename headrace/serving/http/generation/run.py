"""`Generation`: the engine requests behind one HTTP request, from submission to the last delta, on every route.

Owns aborting when the client disconnects, streaming or not. Refuses: response formats (those of the routes).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request

from headrace.base.errors import HeadraceError, QueueFull, RequestError, UnsupportedFeature
from headrace.base.messages import ErrorInfo
from headrace.base.pooling import PoolingSpec
from headrace.base.sampling import SamplingParams
from headrace.service.client.media import MediaPrompt
from headrace.service.client.outputs import ChoiceDelta, Collector, GenerationOutput, first_error
from headrace.service.client.prompts import (
    RequestTags,
    encode_prompt,
    encode_prompt_begin,
    encode_prompt_end,
    read_truncation,
)
from headrace.service.tokenization import LONG_TEXT
from headrace.serving.http.generation.context import AppContext, compute, context_of
from headrace.serving.http.protocol.openai import Timings, Usage
from headrace.serving.http.transport.access import client_of
from headrace.serving.http.transport.errors import JsonResponse, conceal
from headrace.serving.http.transport.metrics import RequestTimer
from headrace.serving.http.transport.pieces import TokenIds
from headrace.serving.http.transport.threads import while_connected

if TYPE_CHECKING:
    from headrace.service.client.stream import RequestStream

PlainPrompt = str | TokenIds
Prompt = PlainPrompt | MediaPrompt

SUBMIT_BATCH = 32
"""Prompts submitted before other tasks get a turn."""
MOST_WIDE = 4
"""Requests at a time that want the logprobs of all tokens."""
MANY_LOGPROBS = 20_000
"""Log probabilities in a response from which on it is encoded on a thread: it would block the event loop too long."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Prompts (text, token ids, or ids with media) with one `SamplingParams` or `PoolingSpec` each.

    ``stream_ids`` are the ids of the engine requests, one per prompt; by default they are derived from ``request_id``.
    ``discards_output``: the client wants prompt logprobs only; the engine must sample one token, which is removed.
    ``truncate``: keep at most this many tokens at the end of each prompt (at the begin if ``keeps_begin``); -1: as many
    as leave room for the output.
    ``deadline_s``: seconds. ``adapter``: the one to use, or one for each prompt; empty for none.
    ``grammar_field`` returns the request field that holds the grammar, and ``field_names`` has the request fields that
    the engine knows by other names (the prompts as ``prompt``), both for errors. ``is_continued``: the client's request
    has begun already, so that it goes on while the server drains.
    """

    request_id: str
    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams | PoolingSpec]
    namespace: str = ""
    priority: int = 0
    deadline_s: float | None = None
    add_special_tokens: bool = True
    stream_ids: list[str] | None = None
    discards_output: bool = False
    truncate: int | None = None
    keeps_begin: bool = False
    grammar_field: Callable[[], str] | None = None
    field_names: Mapping[str, str] = field(default_factory=dict)
    adapter: str | list[str] = ""
    is_continued: bool = False

    def ids(self) -> list[str]:
        """The id of each prompt's engine request."""
        if self.stream_ids is not None:
            return self.stream_ids
        if len(self.prompts) == 1:
            return [self.request_id]
        return [f"{self.request_id}-{i}" for i in range(len(self.prompts))]

    def adapters(self) -> list[str]:
        """The adapter of each prompt."""
        return self.adapter if isinstance(self.adapter, list) else [self.adapter] * len(self.prompts)

    def name_fields(self, message: str, param: str | None) -> tuple[str, str | None]:
        """An error's message and field in the names of the request's API."""
        for name, own_name in self.field_names.items():
            if "_" in name:  # the others are words, too
                message = re.sub(rf"(?<![\w.]){name}\b", own_name, message)
        return message, self.field_names.get(param, param) if param is not None else None

    def name_model(self, base: str) -> str:
        """The model that answers, as clients call it: the adapter of all prompts, else the served model, ``base``."""
        return self.adapter if isinstance(self.adapter, str) and self.adapter else base


class Generation:
    """Running engine requests, one stream per prompt. Owns the streams and the task that watches for a disconnect; call
    `close`, or use it as an async context manager. Registered under the request id in ``context.running`` until closed.
    """

    def __init__(
        self, context: AppContext, request: GenerationRequest, streams: list[RequestStream], http_request: Request, *,
        is_detached: bool = False,
    ):
        self.request = request
        self.streams = streams
        self.timers = [
            RequestTimer(context.metrics, stream.prompt_len, params.n)
            for stream, params in zip(streams, request.params, strict=True)
        ]
        self.is_disconnected = False
        self._context = context
        # set by `RequestLedger`; `open_generation` has created ``state``
        self._span = http_request.scope["state"].get("span")
        context.running[request.request_id] = streams
        if any(isinstance(p, SamplingParams) and p.wants_all_logprobs for p in request.params):
            context.wide.add(request.request_id)
        self._num_completion = self._num_drafted = self._num_accepted = 0
        self._num_cached = [0] * len(streams)
        self._watch = None if is_detached else asyncio.create_task(self._watch_client(http_request))

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def abort(self) -> None:
        """Abort all engine requests; their last deltas still arrive."""
        for stream in self.streams:
            stream.abort()

    def close(self) -> None:
        """Abort what still runs, unregister the request and end the watch for a disconnect. Adds spans to the
        request's trace. Calling it again has no effect."""
        if self._watch is not None:
            self._watch.cancel()  # else it would hold the connection's receive channel
        self.abort()
        self._context.wide.discard(self.request.request_id)
        is_first_close = self._context.running.pop(self.request.request_id, None) is not None
        tracing = self._context.tracing
        if is_first_close and self._span is not None and tracing is not None:
            tracing.add_generation(self._span, self.request.request_id, self.model_name, self.timers)

    @property
    def model_name(self) -> str:
        """The model that answers, as clients call it."""
        return self.request.name_model(self._context.model_name)

    def usage(self) -> Usage:
        """Token counts so far."""
        prompt_tokens = sum(s.prompt_len for s in self.streams)
        usage = Usage.of(prompt_tokens, self._num_completion, sum(self._num_cached))
        for prompt in self.request.prompts:
            for item in prompt.items if isinstance(prompt, MediaPrompt) else ():
                usage.prompt_tokens_details.add_media(item.place.kind, item.place.num_tokens)
        return usage

    async def respond(self, build: Callable[[], object]) -> JsonResponse:
        """The response with the body that ``build`` returns. With many log probabilities it is built and encoded on a
        thread, so ``build`` must not use the event loop."""
        params, usage = [p for p in self.request.params if isinstance(p, SamplingParams)], self.usage()
        # per position: the token itself and its alternatives
        num_each = max((1 + _num_alternatives(p) for p in params), default=0)
        is_small = num_each * usage.total_tokens <= MANY_LOGPROBS
        if is_small and not any(p.wants_all_logprobs for p in params):
            return JsonResponse(build())
        return await asyncio.to_thread(lambda: JsonResponse(build()))

    def timings(self) -> Timings:
        """Where the time of all prompts went, so far."""
        queue = min((t.queued_s for t in self.timers if t.queued_s is not None), default=0.0)
        first = max(queue, *(t.first_token_s for t in self.timers))
        end = max(t.end_s or t.elapsed_s for t in self.timers)
        cached = sum(self._num_cached)
        return Timings(queue, first - queue, max(end - first, 0.0), cached, self._num_drafted, self._num_accepted)

    def num_cached(self, prompt_index: int) -> int:
        """Prompt tokens of one prompt that came from the prefix cache."""
        return self._num_cached[prompt_index]

    async def collect(self) -> list[GenerationOutput]:
        """The whole output of each prompt. Raises the error of the first request that failed (the others are aborted),
        or `ClientDisconnect` when the client is gone."""
        collectors = [
            Collector(s.request_id, p if isinstance(p, str) else None, s.prompt_token_ids, params.n)
            for s, p, params in zip(self.streams, self.request.prompts, self.request.params, strict=True)
        ]
        if len(collectors) == 1:
            await self._collect_one(0, collectors[0])
        else:
            # Concurrently: a prompt that fails aborts the others at once, whatever their order.
            async with asyncio.TaskGroup() as group:
                for index, collector in enumerate(collectors):
                    group.create_task(self._collect_one(index, collector))
        if self.is_disconnected:
            raise ClientDisconnect
        outputs = [c.output for c in collectors]
        error = next(filter(None, map(first_error, outputs)), None)
        if error is not None:
            raise error
        return outputs

    def divert(self, is_free: Callable[[], bool], take: Callable[[int, ChoiceDelta], None]) -> None:
        """Pass deltas to ``take`` as they arrive while ``is_free`` returns True; the others go to `deltas`. Does
        nothing for several prompts: their deltas wait in one queue, which direct deltas would overtake. ``take``
        runs inside `RequestStream.feed`; an exception in it fails the request."""
        if len(self.streams) != 1:
            return

        def offer(delta: ChoiceDelta) -> bool:
            if not is_free():  # the stream keeps and merges what is refused here
                return False
            self._count(0, delta)
            take(0, delta)
            return True

        self.streams[0].divert(offer)

    async def deltas(self) -> AsyncGenerator[tuple[int, ChoiceDelta], None]:
        """``(prompt index, delta)`` in order of arrival. Back-pressure: at most one delta per prompt waits here; the
        engine streams merge the rest, so a slow reader gets fewer, larger deltas."""
        if len(self.streams) == 1:
            async with contextlib.aclosing(aiter(self.streams[0])) as source:
                async for delta in source:
                    self._count(0, delta)
                    yield 0, delta
            return
        queue: asyncio.Queue[tuple[int, ChoiceDelta] | None] = asyncio.Queue()
        slots = asyncio.Semaphore(len(self.streams))  # bounds the queue; None, the end of a pump, needs no slot
        pumps = [asyncio.create_task(self._pump(index, queue, slots)) for index in range(len(self.streams))]
        for pump in pumps:
            # A done callback runs after the pump's last put, so None follows all of its deltas.
            pump.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            num_open = len(pumps)
            while num_open:
                item = await queue.get()
                if item is None:
                    num_open -= 1
                    continue
                slots.release()
                self._count(*item)
                yield item
            await asyncio.gather(*pumps)  # raises what a pump raised
        finally:
            # A pump that waits for a slot would wait forever once nobody reads.
            for pump in pumps:
                pump.cancel()

    async def _pump(
        self, index: int, queue: asyncio.Queue[tuple[int, ChoiceDelta] | None], slots: asyncio.Semaphore
    ) -> None:
        async for delta in self.streams[index]:
            await slots.acquire()
            queue.put_nowait((index, delta))

    async def _collect_one(self, index: int, collector: Collector) -> None:
        async for delta in self.streams[index]:
            self._count(index, delta)
            collector.add(delta)
            # The other prompts cannot become part of a response; their streams end with reason `abort`.
            if delta.error is not None:
                self.abort()

    def _count(self, index: int, delta: ChoiceDelta) -> None:
        self.timers[index].observe(delta)
        if delta.error is not None:
            delta.error = self._name_field(delta.error, self.request.params[index])
        if self.request.discards_output:
            delta.text, delta.token_ids, delta.stop_reason = "", [], None
            delta.logprobs = None if delta.logprobs is None else []
            # the engine may have stopped at the one token that the client did not ask for
            delta.finish_reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
        self._num_completion += len(delta.token_ids)
        self._num_drafted += delta.num_draft_tokens
        self._num_accepted += delta.num_accepted_tokens
        self._num_cached[index] = max(self._num_cached[index], delta.num_cached_tokens)

    def _name_field(self, error: ErrorInfo, params: SamplingParams | PoolingSpec) -> ErrorInfo:
        """An error about a field or the grammar, with the name of the request field that holds it."""
        if error.param in self.request.field_names:
            return ErrorInfo(error.kind, *self.request.name_fields(error.message, error.param), error.retry_after)
        grammar = params.grammar if isinstance(params, SamplingParams) else None
        field = self.request.grammar_field() if self.request.grammar_field is not None else ""
        if grammar is None or not field or error.param not in (grammar.kind, "grammar"):
            return error
        has_prefix = error.message.startswith(grammar.kind + ":")
        message = field + error.message.removeprefix(grammar.kind) if has_prefix else error.message
        return ErrorInfo(error.kind, message, field, error.retry_after)

    async def _watch_client(self, request: Request) -> None:
        # The body was read before; a request without one still delivers an empty message, which is skipped.
        message: dict[str, Any] = {}
        while message.get("type") != "http.disconnect":
            message = dict(await request.receive())
        self.is_disconnected = True
        self.abort()


def _num_alternatives(params: SamplingParams) -> int:
    """Logprobs at each position beside that of the token itself; 0 also where none are wanted."""
    return max(params.logprobs or 0, params.prompt_logprobs or 0, len(params.logprob_token_ids or ()))


def _check_wide(context: AppContext, params: Sequence[SamplingParams | PoolingSpec]) -> None:
    """Refuse a request for the logprobs of all tokens while too many of them run: each may fill 100 MB."""
    is_wide = any(isinstance(p, SamplingParams) and p.wants_all_logprobs for p in params)
    if is_wide and len(context.wide) >= MOST_WIDE:
        raise QueueFull(
            f"{MOST_WIDE} requests for the logprobs of all tokens are running; try again", param="logprobs",
            retry_after=1.0
        )
    if is_wide and len(params) > 1:
        raise RequestError("logprobs of all tokens (-1) are for requests with one prompt", param="logprobs")


async def open_generation(
    http_request: Request, request: GenerationRequest, *, is_detached: bool = False
) -> Generation:
    """Validate, encode and submit all prompts; if one is refused, those already submitted are aborted. Raises typed
    errors. The caller must close the generation. ``is_detached``: it goes on when the client disconnects."""
    try:
        return await _submit_all(http_request, request, is_detached=is_detached)
    except HeadraceError as error:
        error.message, error.param = request.name_fields(error.message, error.param)
        raise


async def _submit_all(http_request: Request, request: GenerationRequest, *, is_detached: bool) -> Generation:
    context = context_of(http_request)
    if not request.is_continued:
        # before any work; `submit` would refuse, too, but only after `_encode_prompts`
        context.check_available()
    state = http_request.scope.setdefault("state", {})
    # for the response header that `RequestLedger` adds
    state["request_id"] = state.get("request_id") or request.request_id
    if context.adapters.is_reloading(request.adapters()):
        settling = asyncio.ensure_future(context.adapters.settle(request.adapters()))
        await (settling if is_detached else while_connected(http_request, settling))
    # `EngineClient.submit` checks engine ids; this one is not an engine id when there are several prompts.
    if request.request_id in context.running:
        raise RequestError(f"request_id {request.request_id!r} is in use by a running request", param="request_id")
    num_choices, limit = sum(p.n for p in request.params), context.server.max_batch_prompts
    if num_choices > limit:
        raise RequestError(f"prompts times n must be at most {limit}, got {num_choices}", param="n")
    _check_wide(context, request.params)
    prompts = await _encode_prompts(http_request, context, request)
    await _mark_breakers(http_request, context, request.params)
    client = client_of(http_request.scope, has_keys=context.server.api_key is not None)
    if not request.is_continued:
        context.check_available()  # again: encoding may have taken long
    streams: list[RequestStream] = []
    with contextlib.ExitStack() as undo:
        for index, (request_id, prompt, params, adapter) in enumerate(
            zip(request.ids(), prompts, request.params, request.adapters(), strict=True), 1
        ):
            stream = context.client.submit(
                prompt, params, request_id=request_id, namespace=request.namespace, priority=request.priority,
                deadline_s=request.deadline_s, add_special_tokens=request.add_special_tokens,
                tags=RequestTags((*client, request.request_id), adapter),
            )
            # if a later prompt is refused, or the task is cancelled in `sleep`
            undo.callback(stream.abort)
            streams.append(stream)
            if index % SUBMIT_BATCH == 0:
                await asyncio.sleep(0)
        undo.pop_all()  # all were accepted: `Generation` aborts them from here on
    return Generation(context, request, streams, http_request, is_detached=is_detached)


async def _mark_breakers(
    http_request: Request, context: AppContext, params: Sequence[SamplingParams | PoolingSpec]
) -> None:
    """Find the tokens that end sequences for DRY, on a thread: the first time the whole vocabulary is read. They are
    remembered, so that `EngineClient.submit` finds them."""
    tokenizer, facts = context.client.tokenizer, context.facts()
    breakers = {p.breakers() for p in params if isinstance(p, SamplingParams) and p.dry_multiplier > 0}
    if tokenizer is not None and breakers:
        await compute(
            http_request, lambda: [tokenizer.mark_tokens(texts, facts.vocab_size) for texts in breakers],
            size=facts.vocab_size,
        )


async def _encode_prompts(
    http_request: Request, context: AppContext, request: GenerationRequest
) -> Sequence[Prompt]:
    """The prompts; token ids instead of text if the texts are long together or must be truncated. Long texts are
    encoded on a thread, as `EngineClient.submit` would block the event loop."""
    num_chars = sum(len(p) for p in request.prompts if isinstance(p, str))
    if request.truncate is None and num_chars <= LONG_TEXT:
        return request.prompts
    facts, tokenizer, has_special = context.facts(), context.client.tokenizer, request.add_special_tokens

    def encode(prompt: Prompt, params: SamplingParams | PoolingSpec) -> Prompt:
        if isinstance(prompt, MediaPrompt):
            if request.truncate is not None:
                raise UnsupportedFeature("a prompt with media cannot be truncated", param="truncate_prompt_tokens")
            return prompt
        if request.truncate is not None:
            num_out = (params.max_tokens or 1) if isinstance(params, SamplingParams) else 0
            kept = read_truncation(request.truncate, facts.max_model_len, num_out)
            cut = encode_prompt_begin if request.keeps_begin else encode_prompt_end
            return cut(prompt, tokenizer, kept, add_special_tokens=has_special)
        if isinstance(prompt, str):
            return encode_prompt(prompt, tokenizer, add_special_tokens=has_special, most=facts.max_model_len)
        return prompt

    def encode_all() -> list[Prompt]:
        return [encode(prompt, params) for prompt, params in zip(request.prompts, request.params, strict=True)]

    return await context.threads.run(http_request, num_chars, encode_all)


async def collect_generation(
    http_request: Request, request: GenerationRequest
) -> tuple[Generation, list[GenerationOutput]]:
    """Run ``request`` to its end; the closed generation still has usage and timing."""
    async with await open_generation(http_request, request) as generation:
        return generation, await generation.collect()


def delta_error(delta: ChoiceDelta) -> HeadraceError | None:
    """The typed error that ended a choice, None if it did not fail. Paths and addresses are removed from internal
    errors."""
    return conceal(delta.error.to_error()) if delta.error is not None else None

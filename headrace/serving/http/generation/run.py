"""`Generation`: the engine requests behind one HTTP request, from submission to the last delta, whatever the route.

Owns aborting when the client leaves, streaming or not. Refuses: answer formats (the routes' own).


From the fields that say what output must look like to one `Grammar`, whatever their dialect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request

from headrace.base.errors import HeadraceError, RequestError
from headrace.base.messages import ErrorInfo
from headrace.base.pooling import PoolingSpec
from headrace.base.sampling import SamplingParams
from headrace.service.client.outputs import ChoiceDelta, Collector, GenerationOutput, first_error
from headrace.service.client.prompts import encode_prompt, encode_prompt_end, read_truncation
from headrace.service.tokenization import LONG_TEXT
from headrace.serving.http.generation.context import AppContext, context_of
from headrace.serving.http.protocol.openai import Usage
from headrace.serving.http.transport.errors import JsonResponse, conceal
from headrace.serving.http.transport.metrics import RequestTimer

if TYPE_CHECKING:
    from headrace.service.client.stream import RequestStream

Prompt = str | list[int]
SUBMITTED_AT_ONCE = 32

MANY_LOGPROBS = 20_000
"""In an answer, from which on it takes longer to word than others should wait."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a route wants generated or read: prompts, with one `SamplingParams` or `PoolingSpec` each. ``stream_ids``
    name the engine requests of the prompts; by default they follow from ``request_id``. ``discards_output``: only the
    prompts are of interest, outputs are told as empty (``max_tokens`` is 1 then, since the engine computes one).
    ``truncate``: tokens of a prompt to keep at most, the last ones, -1 for as many as leave room for the output.
    ``grammar_field`` tells the field that asked for a grammar."""

    request_id: str
    prompts: list[Prompt]
    params: list[SamplingParams | PoolingSpec]
    namespace: str = ""
    priority: int = 0
    deadline_s: float | None = None
    add_special_tokens: bool = True
    stream_ids: list[str] | None = None
    discards_output: bool = False
    truncate: int | None = None
    grammar_field: Callable[[], str] | None = None

    def ids(self) -> list[str]:
        """The id of each prompt's engine request."""
        if self.stream_ids is not None:
            return self.stream_ids
        return (
            [self.request_id] if len(self.prompts) == 1
            else [f"{self.request_id}-{i}" for i in range(len(self.prompts))]
        )


class Generation:
    """Running engine requests, one stream a prompt. Close it, or use it as an async context manager."""

    def __init__(self, context: AppContext, ask: Ask, streams: list[RequestStream], request: Request):
        self.ask = ask
        self.streams = streams
        self.timers = [
            RequestTimer(context.metrics, len(s.prompt_token_ids), p.n) for s,
            p in zip(streams, ask.params, strict=True)
        ]
        self.is_disconnected = False
        self._context = context
        self._span = getattr(request.state, "span", None)
        self._running = context.running
        self._running[ask.request_id] = streams
        self._num_completion = 0
        self._num_cached = [0] * len(streams)
        self._watch = asyncio.create_task(self._watch_client(request))

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def abort(self) -> None:
        """End all requests now; their last deltas still come."""
        for stream in self.streams:
            stream.abort()

    def close(self) -> None:
        """End what still runs and forget it."""
        self._watch.cancel()
        self.abort()
        is_first_time = self._running.pop(self.ask.request_id, None) is not None
        if is_first_time and self._span is not None and self._context.tracing is not None:
            self._context.tracing.add_generation(self._span, self.ask.request_id, self._context.model_name, self.timers)

    def usage(self) -> Usage:
        """Token counts so far."""
        prompt_tokens = sum(len(s.prompt_token_ids) for s in self.streams)
        return Usage.of(prompt_tokens, self._num_completion, sum(self._num_cached))

    async def answer(self, word: Callable[[], object]) -> JsonResponse:
        """The answer that ``word`` makes of the output; on a thread where it tells many log probabilities."""
        params, usage = [p for p in self.ask.params if isinstance(p, SamplingParams)], self.usage()
        num_each = max(
            (
                1 + max(p.logprobs or 0, p.prompt_logprobs or 0)
                for p in params if (p.logprobs, p.prompt_logprobs) != (None, None)
            ),
            default=0
        )
        if num_each * usage.total_tokens <= MANY_LOGPROBS:
            return JsonResponse(word())
        return await asyncio.to_thread(lambda: JsonResponse(word()))

    def num_cached(self, prompt_index: int) -> int:
        """Prompt tokens of one prompt that came from the prefix cache."""
        return self._num_cached[prompt_index]

    async def collect(self) -> list[GenerationOutput]:
        """The whole output, one for each prompt. Raises the error of the first request that failed (the others are
        ended), or `ClientDisconnect` when nobody waits for it any more."""
        collectors = [
            Collector(s.request_id, p if isinstance(p, str) else None, s.prompt_token_ids, params.n)
            for s, p, params in zip(self.streams, self.ask.prompts, self.ask.params, strict=True)
        ]
        if len(collectors) == 1:
            await self._collect_one(0, collectors[0])
        else:
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
        """While ``is_free``, give deltas to ``take`` as soon as they come, and the rest to `deltas`. Of a lone prompt:
        several prompts' deltas wait in a queue for their turn."""
        if len(self.streams) != 1:
            return

        def offer(delta: ChoiceDelta) -> bool:
            if not is_free():
                return False
            self._count(0, delta)
            take(0, delta)
            return True

        self.streams[0].divert(offer)

    async def deltas(self) -> AsyncGenerator[tuple[int, ChoiceDelta], None]:
        """``(prompt index, delta)`` in the order they come. A slow reader gets fewer, merged deltas (the streams see
        to it); at most one waits for each prompt here."""
        if len(self.streams) == 1:
            async with contextlib.aclosing(aiter(self.streams[0])) as source:
                async for delta in source:
                    self._count(0, delta)
                    yield 0, delta
            return
        queue: asyncio.Queue[tuple[int, ChoiceDelta] | None] = asyncio.Queue()
        room = asyncio.Semaphore(len(self.streams))  # bounds the queue; None, the end of a pump, always fits
        pumps = [asyncio.create_task(self._pump(index, queue, room)) for index in range(len(self.streams))]
        for pump in pumps:
            pump.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            num_open = len(pumps)
            while num_open:
                item = await queue.get()
                if item is None:
                    num_open -= 1
                    continue
                room.release()
                self._count(*item)
                yield item
            await asyncio.gather(*pumps)  # tells of an error in a pump
        finally:
            for pump in pumps:
                pump.cancel()

    async def _pump(
        self, index: int, queue: asyncio.Queue[tuple[int, ChoiceDelta] | None], room: asyncio.Semaphore
    ) -> None:
        async for delta in self.streams[index]:
            await room.acquire()
            queue.put_nowait((index, delta))

    async def _collect_one(self, index: int, collector: Collector) -> None:
        async for delta in self.streams[index]:
            self._count(index, delta)
            collector.add(delta)
            if delta.error is not None:
                self.abort()

    def _count(self, index: int, delta: ChoiceDelta) -> None:
        self.timers[index].observe(delta)
        if delta.error is not None:
            delta.error = self._name_field(delta.error, self.ask.params[index])
        if self.ask.discards_output:
            delta.text, delta.token_ids, delta.stop_reason = "", [], None
            delta.logprobs = None if delta.logprobs is None else []
            delta.finish_reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
        self._num_completion += len(delta.token_ids)
        self._num_cached[index] = max(self._num_cached[index], delta.num_cached_tokens)

    def _name_field(self, error: ErrorInfo, params: SamplingParams | PoolingSpec) -> ErrorInfo:
        grammar = params.grammar if isinstance(params, SamplingParams) else None
        if grammar is None or self.ask.grammar_field is None:
            return error
        return name_field(error, grammar.kind, self.ask.grammar_field())

    async def _watch_client(self, request: Request) -> None:
        message: dict[str, Any] = {}
        while message.get("type") != "http.disconnect":
            message = dict(await request.receive())
        self.is_disconnected = True
        self.abort()


async def open_generation(request: Request, ask: Ask) -> Generation:
    """Validate and submit all prompts of ``ask``; when one is refused none runs. Raises typed errors."""
    context = context_of(request)
    context.check_available()
    request.state.request_id = getattr(request.state, "request_id", None) or ask.request_id
    if ask.request_id in context.running:
        raise RequestError(f"request_id {ask.request_id!r} is in use by a running request", param="request_id")
    num_choices, limit = sum(p.n for p in ask.params), context.server.max_batch_prompts
    if num_choices > limit:
        raise RequestError(f"prompts times n must be at most {limit}, got {num_choices}", param="n")
    prompts = await _encode_prompts(context, ask)
    context.check_available()
    streams: list[RequestStream] = []
    with contextlib.ExitStack() as undo:
        for index, (request_id, prompt, params) in enumerate(zip(ask.ids(), prompts, ask.params, strict=True), 1):
            stream = context.client.submit(
                prompt, params, request_id=request_id, namespace=ask.namespace, priority=ask.priority,
                deadline_s=ask.deadline_s,
                add_special_tokens=ask.add_special_tokens,
            )
            undo.callback(stream.abort)
            streams.append(stream)
            if index % SUBMITTED_AT_ONCE == 0:
                await asyncio.sleep(0)  # others' turn
        undo.pop_all()
    return Generation(context, ask, streams, request)


async def _encode_prompts(context: AppContext, ask: Ask) -> list[Prompt]:
    """The prompts; token ids instead of text when there is much of it, or when some of it is to be left out."""
    is_long = sum(len(p) for p in ask.prompts if isinstance(p, str)) > LONG_TEXT
    if ask.truncate is None and not is_long:
        return ask.prompts
    facts, tokenizer = context.facts(), context.client.tokenizer

    def encode(prompt: Prompt, params: SamplingParams | PoolingSpec) -> Prompt:
        if ask.truncate is None:
            return (
                encode_prompt(prompt, tokenizer, add_special_tokens=ask.add_special_tokens, most=facts.max_model_len)
                if isinstance(prompt, str) else prompt
            )
        num_out = (params.max_tokens or 1) if isinstance(params, SamplingParams) else 0
        kept = read_truncation(ask.truncate, facts.max_model_len, num_out)
        return encode_prompt_end(prompt, tokenizer, kept, add_special_tokens=ask.add_special_tokens)

    def encode_all() -> list[Prompt]:
        return [encode(prompt, params) for prompt, params in zip(ask.prompts, ask.params, strict=True)]

    return await asyncio.to_thread(encode_all) if is_long else encode_all()


async def collect_generation(request: Request, ask: Ask) -> tuple[Generation, list[GenerationOutput]]:
    """Run ``ask`` to its end; the closed generation still tells usage and timing."""
    async with await open_generation(request, ask) as generation:
        return generation, await generation.collect()


def delta_error(delta: ChoiceDelta) -> HeadraceError | None:
    """The typed error that ended a choice."""
    return conceal(delta.error.to_error()) if delta.error is not None else None


def name_field(error: ErrorInfo, kind: str, field: str) -> ErrorInfo:
    """The engine's error about a grammar of this kind, told of the field that asked for it."""
    if error.param != kind or not field:
        return error
    message = field + error.message.removeprefix(kind) if error.message.startswith(kind + ":") else error.message
    return ErrorInfo(error.kind, message, field, error.retry_after)

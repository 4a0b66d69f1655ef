"""`AsyncLLM`: a model in an engine process, for asyncio programs. Importing this does not import torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncGenerator
from typing import Any

from headrace.base.adapters import LoRARequest
from headrace.base.config import engine_config
from headrace.base.errors import EngineUnavailable, HeadraceError
from headrace.base.messages import EngineStats, ModelFacts
from headrace.base.sampling import SamplingParams
from headrace.service.client.adapters import AdapterCatalog
from headrace.service.client.client import EngineClient
from headrace.service.client.media import MediaPrompt, place_items
from headrace.service.client.outputs import Collector, GenerationOutput
from headrace.service.client.prompts import RequestTags
from headrace.service.tokenization import Tokenizer
from headrace.serving.offline.media import OfflineMedia, WithMedia
from headrace.serving.offline.params import (
    call_unless_forked,
    name_of,
    spread_params,
)
from headrace.serving.offline.prompts import Prompt, read_prompt


class AsyncLLM:
    """A model in an engine process, for asyncio programs. Options are those of `LLM`. Use it as ``async with``, or
    let the first `generate` start it and call `close`. Not thread-safe: it belongs to the event loop that started
    it."""

    def __init__(self, model: str | os.PathLike[str], **options: Any):
        config = engine_config(model=name_of(model), **options)
        self._client, self._media = EngineClient(config), OfflineMedia(config)
        self.adapters = AdapterCatalog(self._client)
        """The LoRA adapters: loading and unloading them."""
        self._starting: asyncio.Task[None] | None = None
        weakref.finalize(self, call_unless_forked, os.getpid(), self._client.end_soon)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def facts(self) -> ModelFacts | None:
        """Facts of the model; None until started."""
        return self._client.facts

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None until started."""
        return self._client.tokenizer

    async def start(self) -> None:
        """Start the engine process and wait until it is ready; does nothing if it is started. Raises
        `EngineUnavailable` in another event loop than the one that started it."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="engine-start")
        if self._starting.get_loop() is not asyncio.get_running_loop():
            raise EngineUnavailable(
                "this AsyncLLM was started in another event loop: use it in that one alone (one asyncio.run for all "
                "calls), or create an AsyncLLM in each"
            )
        # Shielded: callers share the task, and cancelling one of them must not cancel the start for the others.
        await asyncio.shield(self._starting)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None, *,
        priority: int = 0, lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Complete one prompt; yields the whole output so far whenever it grows. Leaving the loop or cancelling it
        aborts the request. Raises typed errors, also for failures midway. ``lora_request``: the adapter to use, which
        is loaded unless it is."""
        await self.start()
        adapter = await self.adapters.make_ready(lora_request)
        plain, facts = read_prompt(prompt), self._client.facts
        assert facts is not None  # known once started
        (params,) = spread_params(sampling_params, 1, facts)
        given: str | list[int] | MediaPrompt
        if isinstance(plain, WithMedia):
            items = await asyncio.to_thread(self._media.prepare, plain.values, facts)
            given = place_items(plain.plain, items, self._client.tokenizer, facts)
        else:
            given = plain
        tags = RequestTags(adapter=adapter)
        stream = self._client.submit(given, params, request_id=request_id, priority=priority, tags=tags)
        text = plain if isinstance(plain, str) else None
        collector = Collector(stream.request_id, text, stream.prompt_token_ids, params.n)
        # Closed at once when the caller leaves the loop; the garbage collector would abort the request later.
        async with contextlib.aclosing(aiter(stream)) as deltas:
            async for delta in deltas:
                collector.add(delta)
                if delta.error is not None:
                    raise delta.error.to_error()
                # a copy: the collector goes on changing its own
                yield collector.snapshot()

    async def abort(self, request_id: str) -> None:
        """Abort a request; its iterator ends with ``finish_reason`` ``abort``."""
        await self._client.abort(request_id)

    async def stats(self) -> EngineStats:
        """Counters and gauges of the engine."""
        return await self._client.stats()

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False if running requests hold pages."""
        return await self._client.reset_prefix_cache()

    async def close(self) -> None:
        """Stop the engine process; requests in flight fail."""
        await self._client.close()

    async def _start(self) -> None:
        await self._client.start()
        try:
            await self._client.wait_ready()
        except HeadraceError:
            await self._client.close()
            raise

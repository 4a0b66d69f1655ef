"""`LLM` and `AsyncLLM`: Headrace as a Python library, with vLLM's interface. Importing this does not import torch.

`LLM` runs the engine in the caller's process and thread, or where several devices are asked for in processes of their
own; `AsyncLLM` starts engine processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from msgspec.structs import replace

from headrace.base import env
from headrace.base.adapters import AdapterInfo, LoRARequest
from headrace.base.config import engine_config
from headrace.base.errors import EngineUnavailable, HeadraceError, RequestError
from headrace.base.messages import EngineStats, MemoryLine, ModelFacts
from headrace.base.pooling import PoolingFacts, unpack_floats
from headrace.base.sampling import SamplingParams
from headrace.service.client.adapters import AdapterCatalog
from headrace.service.client.client import EngineClient
from headrace.service.client.jobs import Job
from headrace.service.client.local import LocalClient
from headrace.service.client.media import MediaPrompt, place_items
from headrace.service.client.outputs import Collector, GenerationOutput, first_error, pooled_of
from headrace.service.client.pooling import PoolingEncoder, PoolingInput, activate, plan_scores, shorten
from headrace.service.client.prompts import RequestTags, require_tokenizer
from headrace.service.client.replicated import ReplicatedClient
from headrace.service.parsing.choice import AUTO, Formats, formats_of
from headrace.service.parsing.forcing import confine_output
from headrace.service.parsing.message import ParsedMessage, parse_output
from headrace.service.parsing.rendering import render_with_tools
from headrace.service.tokenization import Tokenizer
from headrace.serving.offline.adapters import LoRARequests, OfflineAdapters
from headrace.serving.offline.media import OfflineMedia, WithMedia, split_messages
from headrace.serving.offline.prompts import Message, Plain, Prompt, read_conversations, read_prompt, read_prompts

OWN_VARIABLES = frozenset(
    {"tokenizer", "messages", "formats", "tools", "template", "add_generation_prompt", "continue_final_message"}
)
"""Names that ``chat_template_kwargs`` may not set: they are arguments of `render_with_tools`."""

Params = SamplingParams | Sequence[SamplingParams] | None


class Running(TypedDict, total=False):
    """Options that `LLM.chat` passes to `LLM.generate`."""

    progress: bool
    errors: str
    lora_request: LoRARequests


class LLM:
    """A loaded model, in this process unless ``data_parallel_size``, ``tensor_parallel_size`` or
    ``pipeline_parallel_size`` asks for several.

    ``options`` are the engine options of ``headrace serve``: ``device``, ``dtype``, ``load_format``, ``tokenizer``,
    ``skip_tokenizer``, ``max_model_len``, ``max_running_requests``, ``page_size``, ``prefix_cache``,
    ``memory_fraction``, ``kv_pages``, ``seed``, ``enable_lora`` and others, documented by ``headrace serve --help``.
    Raises `ConfigError` for an unknown one. Use it as a context manager, or call `close`; the model is also freed when
    the object is deleted. Thread-safe: calls of several threads take turns.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any):
        # before torch is imported, which happens while the engine is built
        env.set_passive_waiting()
        config = engine_config(model=_plain_name(model), **options)
        parallel, nodes = config.parallel, config.nodes
        has_one_device = parallel.data_parallel_size == parallel.num_ranks == nodes.nnodes == 1
        self._client: LocalClient | ReplicatedClient = (
            LocalClient(config) if has_one_device else ReplicatedClient(config)
        )
        self.adapters = OfflineAdapters(self._client)
        """The LoRA adapters: `OfflineAdapters.unload`, and what the engine says of them."""
        self._media = OfflineMedia(config)
        weakref.finalize(self, _in_this_process, os.getpid(), self._client.close)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def facts(self) -> ModelFacts:
        """Facts of the model: architecture, limits, sizes."""
        return self._client.facts

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None when it has none."""
        return self._client.tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt] | None = None, sampling_params: Params = None, *,
        prompt_token_ids: Sequence[list[int]] | None = None, add_special_tokens: bool = True, priority: int = 0,
        progress: bool = False, errors: str = "raise", lora_request: LoRARequests = None,
    ) -> list[GenerationOutput]:
        """Complete prompts; outputs are in the order of the prompts.

        ``prompts``: one or many, as text or token ids; or ``prompt_token_ids``, lists of ids. ``sampling_params``: one
        for all, one per prompt, or None for the model's defaults. An invalid prompt raises and aborts the others, as
        prompts are checked while the first ones run. A request that fails (``finish_reason`` "error") raises after all
        others have ended, or is returned with ``.error`` set if ``errors`` is "return". Ctrl-C aborts all prompts; the
        model stays usable. ``lora_request``: the adapter of all prompts, or a list with one or None for each.
        """
        chosen = read_prompts(prompts, prompt_token_ids)
        params = _params_for_each(sampling_params, len(chosen), self.facts)
        # A generator: `LocalClient.run` prepares later prompts while the first ones run.
        adapters = self.adapters.choose(lora_request, len(chosen))
        jobs = (
            self._client.prepare(
                self._place(prompt, add_special_tokens) if isinstance(prompt, WithMedia) else prompt, p,
                add_special_tokens=add_special_tokens, priority=priority, adapter=adapter
            )
            for prompt, p, adapter in zip(chosen, params, adapters, strict=True)
        )
        return self._run(jobs, len(chosen), progress, errors)

    def chat(
        self, messages: list[Message] | list[list[Message]], sampling_params: Params = None, *,
        add_generation_prompt: bool = True, continue_final_message: bool = False, chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None, tools: list[dict[str, Any]] | None = None,
        tool_choice: str = "auto",
        **running: Unpack[Running],
    ) -> list[GenerationOutput]:
        """Answer one conversation or many, rendered by the model's chat template (or ``chat_template``, Jinja text).
        Contents may be lists of parts, with media in OpenAI's form or as values (``{"type": "image", "image": ...}``).
        ``tools`` are functions in OpenAI's form; `parse` extracts their calls from the outputs. ``tool_choice`` is
        "auto", "required", or the name of a tool that must be called; a grammar enforces it."""
        conversations, media = zip(*map(split_messages, read_conversations(messages)), strict=True)
        options = _template_options(chat_template, chat_template_kwargs)
        tokenizer = require_tokenizer(self.tokenizer)
        formats = formats_of(tokenizer, self.facts)
        texts = [
            render_with_tools(
                tokenizer, conversation, formats, tools=tools, template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message, **options,
            )
            for conversation in conversations
        ]
        params = _params_for_each(sampling_params, len(texts), self.facts)
        if tools:
            callable_tools = _callable_tools(tools, tool_choice)
            params = [
                _prepare_calls(p, formats, callable_tools, text, tool_choice)
                for p, text in zip(params, texts, strict=True)
            ]
        prompts: list[Any] = [
            WithMedia(text, values) if values else text for text, values in zip(texts, media, strict=True)
        ]
        return self.generate(prompts, params, add_special_tokens=False, **running)

    def parse(
        self, output: GenerationOutput, *, tools: list[dict[str, Any]] | None = None, tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> list[ParsedMessage]:
        """Parse an output of `chat`: one message with ``content``, ``reasoning`` and ``tool_calls`` (if ``tools`` are
        given) for each of ``output.outputs``. The formats are the model's own unless named."""
        formats = formats_of(self.tokenizer, self.facts, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
        # The template may have opened the reasoning in the prompt; the output then has only its end marker.
        is_open = formats.begins_open(output.prompt or "")
        return [parse_output(choice.text, formats, tools=tools, is_open=is_open) for choice in output.outputs]

    def embed(
        self, texts: Prompt | Sequence[Prompt], *, dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None, progress: bool = False, lora_request: LoRARequests = None,
    ) -> list[list[float]]:
        """Embeddings of texts, in their order. ``dimensions`` keeps the first values of each, at unit length.
        ``truncate_prompt_tokens``: longer texts are cut at the end, -1: at the model's limit; None refuses them."""
        self._require("embed")
        encoder = PoolingEncoder.of(self.facts, self.tokenizer, truncate_prompt_tokens)
        inputs = [self._encode(encoder, text) for text in read_prompts(texts, None)]
        results = self._read(inputs, progress, lora_request)
        return [shorten(unpack_floats(packed), dimensions) for packed in results]

    def score(
        self, queries: str | list[str], documents: str | list[str], *, instruct: str | None = None,
        truncate_prompt_tokens: int | None = None, progress: bool = False, lora_request: LoRARequest | None = None,
    ) -> list[float]:
        """Relevance of each document to the query, or to the query at the same position. The number depends on the
        model: the score of a cross-encoder, the cosine of two embeddings, or, of a generative model, the probability
        that it answers "yes" when asked with ``instruct``."""
        # one query is paired with every document
        rights = [documents] if isinstance(documents, str) else documents
        lefts = [queries] * len(rights) if isinstance(queries, str) else queries
        if len(lefts) != len(rights):
            raise RequestError(
                f"queries must be one text, or as many as documents; got {len(lefts)} and {len(rights)}",
                param="queries"
            )
        encoder = PoolingEncoder.of(self.facts, self.tokenizer, truncate_prompt_tokens)
        plan = plan_scores(list(zip(lefts, rights, strict=True)), encoder, instruct=instruct)
        return plan.finish(self._read(plan.inputs, progress, lora_request))

    def classify(
        self, texts: Prompt | Sequence[Prompt], *, use_activation: bool = True,
        truncate_prompt_tokens: int | None = None, progress: bool = False, lora_request: LoRARequests = None,
    ) -> list[dict[str, float]]:
        """The probability of each class by name, for each text; ``use_activation`` False returns raw logits."""
        pooling = self._require("classify")
        encoder = PoolingEncoder.of(self.facts, self.tokenizer, truncate_prompt_tokens)
        inputs = [self._encode(encoder, text) for text in read_prompts(texts, None)]
        results = self._read(inputs, progress, lora_request)
        activation = pooling.activation if use_activation else "identity"
        return [
            dict(zip(pooling.labels, activate(unpack_floats(packed), activation), strict=True)) for packed in results
        ]

    def load_adapter(
        self, name: str, path: str | os.PathLike[str] | None = None, *,
        tensors: bytes | Mapping[str, Any] | None = None, config: str | Mapping[str, Any] | None = None,
        is_pinned: bool = False, replaces: bool = False
    ) -> AdapterInfo:
        """Load a LoRA adapter from ``path``, or from ``tensors`` by name and ``config``; see `OfflineAdapters.load`."""
        return self.adapters.load(
            name, path, tensors=tensors, config=config, is_pinned=is_pinned, replaces=replaces
        )

    def stats(self) -> EngineStats:
        """Counters and gauges of the engine."""
        return self._client.stats()

    def memory_plan(self) -> list[MemoryLine]:
        """The bytes of device memory by use."""
        return self._client.memory

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False if running requests hold pages."""
        return self._client.reset_prefix_cache()

    def check(self) -> None:
        """Raise `AssertionError` if the engine's accounting of pages and rows is inconsistent."""
        self._client.check()

    def close(self) -> None:
        """Free the model."""
        self._client.close()

    def _require(self, kind: str) -> PoolingFacts:
        pooling = self.facts.pooling
        if pooling is None or pooling.kind != kind:
            raise RequestError(
                f"{self.facts.model} cannot {kind}; load a model made for that, or with task={kind!r}", param="task"
            )
        return pooling

    def _place(self, prompt: WithMedia, add_special_tokens: bool = True) -> MediaPrompt:
        items = self._media.prepare(prompt.values, self.facts)
        return place_items(prompt.plain, items, self.tokenizer, self.facts, add_special_tokens=add_special_tokens)

    def _encode(self, encoder: PoolingEncoder, prompt: Plain) -> PoolingInput:
        return encoder.take(self._place(prompt)) if isinstance(prompt, WithMedia) else encoder.encode(prompt)

    def _read(self, inputs: list[PoolingInput], progress: bool, lora_request: LoRARequests) -> list[bytes]:
        adapters = self.adapters.choose(lora_request, len(inputs))
        jobs = (
            self._client.prepare(item.token_ids, item.spec, adapter=adapter)
            for item, adapter in zip(inputs, adapters, strict=True)
        )
        return [pooled_of(output) for output in self._run(jobs, len(inputs), progress, "raise")]

    def _run(self, jobs: Iterable[Job], num_jobs: int, progress: bool, errors: str) -> list[GenerationOutput]:
        if errors not in ("raise", "return"):
            raise RequestError(f"errors must be 'raise' or 'return', got {errors!r}", param="errors")
        # `advance` is called once per finished job.
        with _progress_bar(num_jobs) if progress else contextlib.nullcontext(lambda: None) as advance:
            outputs = self._client.run(jobs, advance)
        if errors == "raise":
            _raise_first_error(outputs)
        return outputs


class AsyncLLM:
    """A model in an engine process, for asyncio programs. Options are those of `LLM`. Use it as ``async with``, or
    let the first `generate` start it and call `close`. Not thread-safe: it belongs to the event loop that started
    it."""

    def __init__(self, model: str | os.PathLike[str], **options: Any):
        config = engine_config(model=_plain_name(model), **options)
        self._client, self._media = EngineClient(config), OfflineMedia(config)
        self.adapters = AdapterCatalog(self._client)
        """The LoRA adapters: loading and unloading them."""
        self._starting: asyncio.Task[None] | None = None
        weakref.finalize(self, _in_this_process, os.getpid(), self._client.end_soon)

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
        (params,) = _params_for_each(sampling_params, 1, facts)
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


def default_params(facts: ModelFacts) -> SamplingParams:
    """The model's default sampling parameters."""
    defaults: dict[str, Any] = dict(facts.default_sampling)
    return SamplingParams(**defaults)


def _in_this_process(pid: int, end: Callable[[], None]) -> None:
    """Call ``end`` unless this is a fork of the process ``pid``, to which the engine belongs."""
    if os.getpid() == pid:
        end()


def _plain_name(model: str | os.PathLike[str]) -> str:
    return os.fspath(model) if isinstance(model, os.PathLike) else model


def _template_options(template: str | None, options: dict[str, Any] | None) -> dict[str, Any]:
    """Variables for the chat template; those with arguments of `LLM.chat` are refused."""
    if template is not None and not isinstance(template, str):
        raise RequestError(f"chat_template is Jinja text, got {type(template).__name__}", param="chat_template")
    if not isinstance(options or {}, dict):
        raise RequestError(
            f"chat_template_kwargs is an object, got {type(options).__name__}", param="chat_template_kwargs"
        )
    wrong = [name for name in options or {} if not isinstance(name, str) or name in OWN_VARIABLES]
    if wrong:
        raise RequestError(f"chat_template_kwargs cannot set {wrong[0]!r}", param="chat_template_kwargs")
    return dict(options or {})


def _params_for_each(params: Params, count: int, facts: ModelFacts) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or default_params(facts)] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError(
            f"sampling_params is a SamplingParams or a list of them, got {params!r:.80}", param="sampling_params"
        )
    if len(params) != count:
        raise RequestError(f"sampling_params has {len(params)} entries for {count} prompts", param="sampling_params")
    return list(params)


def _callable_tools(tools: list[dict[str, Any]], choice: str) -> list[dict[str, Any]]:
    if choice in ("auto", "required"):
        return tools
    named = [tool for tool in tools if tool["function"]["name"] == choice]
    if not named:
        raise RequestError(
            f"tool_choice must be 'auto', 'required' or the name of one of the tools, got {choice!r}",
            param="tool_choice"
        )
    return named


def _prepare_calls(
    params: SamplingParams, formats: Formats, tools: list[dict[str, Any]], prompt: str, choice: str
) -> SamplingParams:
    """``params`` for an output with tool calls: special tokens that mark calls and reasoning stay visible for the
    parser, and a grammar enforces ``choice``. ``tools`` are those that may be called."""
    params = (
        params if params.keep_special_tokens
        else replace(params, keep_special_tokens=formats.visible_texts(has_tools=True))
    )
    grammar = confine_output(
        formats, params.grammar, tools, prompt, is_parallel=choice in ("auto", "required"), is_forced=choice != "auto"
    )
    return replace(params, grammar=grammar)


def _raise_first_error(outputs: list[GenerationOutput]) -> None:
    for output in outputs:
        error = first_error(output)
        if error is not None:
            raise error


@contextlib.contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("generating", total=total)
        yield lambda: bar.advance(task)

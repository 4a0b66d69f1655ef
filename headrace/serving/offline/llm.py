"""`LLM`: Headrace as a Python library, with vLLM's interface. Importing this does not import torch.

The engine runs in the caller's process and thread, or where several devices are asked for in processes of their own.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from headrace.base import env
from headrace.base.adapters import AdapterInfo, LoRARequest
from headrace.base.config import engine_config
from headrace.base.errors import RequestError
from headrace.base.messages import EngineStats, MemoryLine, ModelFacts
from headrace.base.pooling import PoolingFacts, unpack_floats
from headrace.service.client.jobs import Job
from headrace.service.client.local import LocalClient
from headrace.service.client.media import MediaPrompt, place_items
from headrace.service.client.outputs import GenerationOutput, first_error, pooled_of
from headrace.service.client.pooling import PoolingEncoder, PoolingInput, activate, plan_scores, shorten
from headrace.service.client.prompts import require_tokenizer
from headrace.service.client.replicated import ReplicatedClient
from headrace.service.parsing.choice import AUTO, formats_of
from headrace.service.parsing.message import ParsedMessage, parse_output
from headrace.service.parsing.rendering import render_with_tools
from headrace.service.tokenization import Tokenizer
from headrace.serving.offline.adapters import LoRARequests, OfflineAdapters
from headrace.serving.offline.media import OfflineMedia, WithMedia, split_messages
from headrace.serving.offline.params import (
    Params,
    call_unless_forked,
    find_callable_tools,
    name_of,
    prepare_calls,
    read_template_options,
    spread_params,
)
from headrace.serving.offline.prompts import Message, Plain, Prompt, read_conversations, read_prompts


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
        config = engine_config(model=name_of(model), **options)
        parallel, nodes = config.parallel, config.nodes
        has_one_device = parallel.data_parallel_size == parallel.num_ranks == nodes.nnodes == 1
        self._client: LocalClient | ReplicatedClient = (
            LocalClient(config) if has_one_device else ReplicatedClient(config)
        )
        self.adapters = OfflineAdapters(self._client)
        """The LoRA adapters: `OfflineAdapters.unload`, and what the engine says of them."""
        self._media = OfflineMedia(config)
        weakref.finalize(self, call_unless_forked, os.getpid(), self._client.close)

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
        return self._client.jobs.tokenizer

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
        params = spread_params(sampling_params, len(chosen), self.facts)
        # A generator: `LocalClient.run` prepares later prompts while the first ones run.
        adapters = self.adapters.choose(lora_request, len(chosen))
        jobs = (
            self._client.jobs.make(
                self._place(prompt, add_special_tokens) if isinstance(prompt, WithMedia) else prompt, p, self.facts,
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
        options = read_template_options(chat_template, chat_template_kwargs)
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
        params = spread_params(sampling_params, len(texts), self.facts)
        if tools:
            callable_tools = find_callable_tools(tools, tool_choice)
            params = [
                prepare_calls(p, formats, callable_tools, text, tool_choice)
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
            self._client.jobs.make(item.token_ids, item.spec, self.facts, adapter=adapter)
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

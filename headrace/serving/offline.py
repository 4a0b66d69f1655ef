"""`LLM` and `AsyncLLM`: Headrace as a Python library, in the shape vLLM's users know. Importing this costs no torch.

`LLM` runs the engine in the caller's process and thread. `AsyncLLM` talks to an engine process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence, Set
from typing import Any, TypedDict, Unpack

from msgspec.structs import replace

from headrace.base import env
from headrace.base.config import engine_config
from headrace.base.errors import HeadraceError, RequestError
from headrace.base.messages import EngineStats, MemoryLine, ModelFacts
from headrace.base.pooling import PoolingFacts, unpack_floats
from headrace.base.sampling import SamplingParams
from headrace.service.client.client import EngineClient
from headrace.service.client.local import Job, LocalClient
from headrace.service.client.outputs import Collector, GenerationOutput, first_error
from headrace.service.client.pooling import Reader, Reading, activate, plan_scores, shorten
from headrace.service.client.prompts import require_tokenizer
from headrace.service.parsing.choice import AUTO, Formats, formats_of
from headrace.service.parsing.forcing import confine_output
from headrace.service.parsing.message import ParsedMessage, parse_output
from headrace.service.parsing.rendering import render_with_tools
from headrace.service.tokenization import Tokenizer

OWN_VARIABLES = frozenset(
    {"tokenizer", "messages", "formats", "tools", "template", "add_generation_prompt", "continue_final_message"}
)
"""Names that ``chat_template_kwargs`` may not take."""

Prompt = str | list[int] | dict[str, Any]
"""Text, token ids, or ``{"prompt": text}`` / ``{"prompt_token_ids": ids}``."""

Params = SamplingParams | Sequence[SamplingParams] | None
Message = dict[str, Any]


class Running(TypedDict, total=False):
    """How `LLM.chat` runs, as in `LLM.generate`."""

    progress: bool
    errors: str


class LLM:
    """A model, ready to generate, in this process.

    ``options`` are the options of ``headrace serve`` that concern the engine: ``device``, ``dtype``, ``load_format``,
    ``tokenizer``, ``skip_tokenizer``, ``max_model_len``, ``max_running_requests``, ``page_size``, ``prefix_cache``,
    ``memory_fraction``, ``kv_pages``, ``seed`` and the rest; ``headrace serve --help`` documents each. An unknown one
    is a `ConfigError`. Use it as a context manager, or call `close`. Threads may share it: their calls take turns.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any):
        env.set_passive_waiting()
        self._client = LocalClient(engine_config(model=_plain_name(model), **options))

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def facts(self) -> ModelFacts:
        """What is known of the loaded model: architecture, limits, sizes."""
        return self._client.facts

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None when it has none."""
        return self._client.tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt] | None = None, sampling_params: Params = None, *,
        prompt_token_ids: Sequence[list[int]] | None = None, add_special_tokens: bool = True, priority: int = 0,
        progress: bool = False, errors: str = "raise",
    ) -> list[GenerationOutput]:
        """Complete prompts; outputs come in the prompts' order.

        ``prompts``: one or many, as text or token ids; or ``prompt_token_ids``, lists of ids. ``sampling_params``: one
        for all, one per prompt, or None for the model's own defaults. A prompt that is wrong raises, and ends the
        others: prompts are checked while the first ones begin to run. What fails while it runs (``finish_reason``
        "error") raises after all others have ended, or is returned with ``.error`` set when ``errors`` is "return".
        Ctrl-C aborts all prompts and leaves the model usable.
        """
        chosen = _one_of(prompts, prompt_token_ids)
        params = _params_for_each(sampling_params, len(chosen), self.facts)
        jobs = (
            self._client.prepare(prompt, p, add_special_tokens=add_special_tokens, priority=priority)
            for prompt, p in zip(chosen, params, strict=True)
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
        ``tools`` are functions in OpenAI's form; `parse` finds their calls in the answers. ``tool_choice`` is "auto",
        "required", or the name of the one that must be called; forced calls are a grammar."""
        conversations = _conversations(messages)
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
                _prepare_calls(p, formats, callable_tools, text, tool_choice) for p,
                text in zip(params, texts, strict=True)
            ]
        return self.generate(texts, params, add_special_tokens=False, **running)

    def parse(
        self, output: GenerationOutput, *, tools: list[dict[str, Any]] | None = None, tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> list[ParsedMessage]:
        """What the answers of `chat` say, one message for each of ``output.outputs``: ``content``, ``reasoning`` and
        ``tool_calls`` (looked for when ``tools`` are given). The formats are the model's own unless named."""
        formats = formats_of(self.tokenizer, self.facts, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
        is_open = formats.begins_open(output.prompt or "")
        return [parse_output(choice.text, formats, tools=tools, is_open=is_open) for choice in output.outputs]

    def embed(
        self, texts: Prompt | Sequence[Prompt], *, dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None, progress: bool = False,
    ) -> list[list[float]]:
        """Embeddings of texts, in their order. ``dimensions`` keeps the first numbers of each, at unit length.
        ``truncate_prompt_tokens``: the end of longer texts is cut off, -1 at what the model takes; None refuses
        them."""
        self._require("embed")
        reader = Reader.of(self.facts, self.tokenizer, truncate_prompt_tokens)
        results = self._read([reader.read(text) for text in _one_of(texts, None)], progress)
        return [shorten(unpack_floats(packed), dimensions) for packed in results]

    def score(
        self, queries: str | list[str], documents: str | list[str], *, instruct: str | None = None,
        truncate_prompt_tokens: int | None = None, progress: bool = False,
    ) -> list[float]:
        """How well each document goes with the query, or each with its own: by a cross-encoder's judgement, by the
        angle between embeddings, or by the probability that a model which generates says yes to ``instruct``."""
        rights = [documents] if isinstance(documents, str) else documents
        lefts = [queries] * len(rights) if isinstance(queries, str) else queries
        if len(lefts) != len(rights):
            raise RequestError(
                f"queries must be one text, or as many as documents; got {len(lefts)} and {len(rights)}",
                param="queries"
            )
        reader = Reader.of(self.facts, self.tokenizer, truncate_prompt_tokens)
        plan = plan_scores(list(zip(lefts, rights, strict=True)), reader, instruct=instruct)
        return plan.finish(self._read(plan.readings, progress))

    def classify(
        self, texts: Prompt | Sequence[Prompt], *, use_activation: bool = True,
        truncate_prompt_tokens: int | None = None, progress: bool = False,
    ) -> list[dict[str, float]]:
        """The probability of each class of each text by the class's name; ``use_activation`` False gives raw logits."""
        pooling = self._require("classify")
        reader = Reader.of(self.facts, self.tokenizer, truncate_prompt_tokens)
        results = self._read([reader.read(text) for text in _one_of(texts, None)], progress)
        activation = pooling.activation if use_activation else "identity"
        return [
            dict(zip(pooling.labels, activate(unpack_floats(packed), activation), strict=True)) for packed in results
        ]

    def stats(self) -> EngineStats:
        """Counters and gauges of the engine."""
        return self._client.stats()

    def memory_plan(self) -> list[MemoryLine]:
        """What takes how many bytes of the device's memory."""
        return self._client.memory

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False when some are in use and stayed."""
        return self._client.reset_prefix_cache()

    def check(self) -> None:
        """Raise `AssertionError` when a page or row of the engine is not accounted for."""
        self._client.check()

    def close(self) -> None:
        """Free the model; it cannot be used afterwards."""
        self._client.close()

    def _require(self, kind: str) -> PoolingFacts:
        pooling = self.facts.pooling
        if pooling is None or pooling.kind != kind:
            raise RequestError(
                f"{self.facts.model} cannot {kind}; load a model made for that, or with task={kind!r}", param="task"
            )
        return pooling

    def _read(self, readings: list[Reading], progress: bool) -> list[bytes]:
        jobs = (self._client.prepare(reading.token_ids, reading.spec) for reading in readings)
        return [output.outputs[0].pooled or b"" for output in self._run(jobs, len(readings), progress, "raise")]

    def _run(self, jobs: Iterable[Job], num_jobs: int, progress: bool, errors: str) -> list[GenerationOutput]:
        if errors not in ("raise", "return"):
            raise RequestError(f"errors must be 'raise' or 'return', got {errors!r}", param="errors")
        with _progress_bar(num_jobs) if progress else contextlib.nullcontext(lambda: None) as advance:
            outputs = self._client.run(jobs, advance)
        if errors == "raise":
            _raise_first_error(outputs)
        return outputs


class AsyncLLM:
    """A model in an engine process of its own, for asyncio programs. Options are those of `LLM`.

    Use it as ``async with``, or let the first `generate` start it and call `close`. Belongs to one event loop.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any):
        self._client = EngineClient(engine_config(model=_plain_name(model), **options))
        self._starting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def facts(self) -> ModelFacts | None:
        """What is known of the model; None until it is started."""
        return self._client.facts

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, once started."""
        return self._client.tokenizer

    async def start(self) -> None:
        """Start the engine process and wait until it takes requests; does nothing when it is started."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="engine-start")
        await asyncio.shield(self._starting)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None, *,
        priority: int = 0,
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Complete one prompt; yields the whole output so far each time there is more. Leaving the loop, or being
        cancelled in it, aborts the request. Raises typed errors, also for what fails on the way."""
        await self.start()
        plain = _plain_prompt(prompt)
        (params,) = _params_for_each(sampling_params, 1, self._client.facts)
        stream = self._client.submit(plain, params, request_id=request_id, priority=priority)
        text = plain if isinstance(plain, str) else None
        collector = Collector(stream.request_id, text, stream.prompt_token_ids, params.n)
        async with contextlib.aclosing(aiter(stream)) as deltas:
            async for delta in deltas:
                collector.add(delta)
                if delta.error is not None:
                    raise delta.error.to_error()
                yield collector.snapshot()

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator finishes with reason ``abort``."""
        await self._client.abort(request_id)

    async def stats(self) -> EngineStats:
        """Counters and gauges of the engine."""
        return await self._client.stats()

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False when some are in use and stayed."""
        return await self._client.reset_prefix_cache()

    async def close(self) -> None:
        """End the engine process; requests in flight get an error."""
        await self._client.close()

    async def _start(self) -> None:
        await self._client.start()
        try:
            await self._client.wait_ready()
        except HeadraceError:
            await self._client.close()
            raise


def default_params(facts: ModelFacts) -> SamplingParams:
    """The sampling parameters the model's authors recommend."""
    return SamplingParams(**facts.default_sampling)


def _plain_name(model: str | os.PathLike[str]) -> str:
    return os.fspath(model) if isinstance(model, os.PathLike) else model


def _plain_prompt(prompt: Prompt) -> str | list[int]:
    if isinstance(prompt, dict):
        if len(prompt) != 1 or not prompt.keys() <= {"prompt_token_ids", "prompt"}:
            raise RequestError(
                f"a prompt dict takes prompt or prompt_token_ids and nothing else, got {sorted(map(str, prompt))}",
                param="prompts"
            )
        (prompt,) = prompt.values()
    if isinstance(prompt, (str, list)):
        return prompt
    if isinstance(prompt, tuple):
        return list(prompt)
    raise RequestError(f"a prompt is text or a list of token ids, got {type(prompt).__name__}", param="prompts")


def _one_of(prompts: Prompt | Sequence[Prompt] | None, token_ids: Sequence[list[int]] | None) -> list[str | list[int]]:
    """The prompts as a list, whichever way they were given."""
    if (prompts is None) == (token_ids is None):
        raise RequestError("give either prompts or prompt_token_ids", param="prompts")
    given = prompts if token_ids is None else token_ids
    if isinstance(given, (str, dict)):
        given = [given]
    elif not isinstance(given, Iterable) or isinstance(given, (bytes, bytearray, Set)):
        raise RequestError(
            f"prompts are text, token ids, or a list of either, got {type(given).__name__}", param="prompts"
        )
    else:
        given = list(given)
        given = [given] if given and isinstance(given[0], int) else given
    plain = [_plain_prompt(prompt) for prompt in given]
    if token_ids is not None and any(isinstance(prompt, str) for prompt in plain):
        raise RequestError(
            "prompt_token_ids takes lists of token ids; text goes into prompts", param="prompt_token_ids"
        )
    return plain


def _conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation or many, as many."""
    if not isinstance(messages, (list, tuple)):
        raise RequestError(
            f"messages is a conversation or a list of them, got {type(messages).__name__}", param="messages"
        )
    conversations = [messages] if messages and isinstance(messages[0], dict) else list(messages)
    for conversation in conversations:
        if (
            not isinstance(conversation, (list, tuple))
            or not all(isinstance(message, dict) for message in conversation)
        ):
            raise RequestError(
                "a conversation is a list of messages, and a message an object with role and content", param="messages"
            )
    return conversations


def _template_options(template: str | None, options: dict[str, Any] | None) -> dict[str, Any]:
    """Variables of the chat template; what `LLM.chat` has arguments for is set by those."""
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
    """The parameters with the special tokens visible that mark calls and reasoning, and with the grammar of forced
    calls."""
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

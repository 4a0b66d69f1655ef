"""`AnswerPlan`: how the output of one chat request is told apart into reasoning, text and calls, and forced into
calls.

`AnswerReader`: the events of one choice for dialects whose answers are made of items, whole or in pieces.

`prepare_chat`: from one checked conversation to what the engine is asked and how its output is read. Every dialect
that answers conversations is translated to `ChatRequest` and comes through here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import msgspec
from starlette.requests import Request

from headrace.base.errors import RequestError, UnsupportedFeature
from headrace.base.sampling import SamplingParams, ThinkingBudget
from headrace.service.client.outputs import ChoiceDelta, CompletionOutput
from headrace.service.client.prompts import encode_prompt
from headrace.service.parsing.choice import Formats
from headrace.service.parsing.events import MAX_CALLS, Event, TextDelta, merge_events
from headrace.service.parsing.forcing import confine_output
from headrace.service.parsing.message import new_parser
from headrace.service.parsing.parser import OutputParser
from headrace.service.tokenization import LONG_TEXT
from headrace.serving.http.generation.context import AppContext
from headrace.serving.http.generation.conversation import chosen_names, offered_tools, render_conversation
from headrace.serving.http.generation.run import Ask, Prompt
from headrace.serving.http.generation.sampling import given_request_id, grammar_field, pick_request_id, sampling_params
from headrace.serving.http.protocol.openai import ChatRequest
from headrace.serving.http.protocol.tools import AllowedTools, NamedTool


@dataclass(frozen=True, kw_only=True)
class AnswerPlan:
    """``tools`` are those that the prompt shows, ``callable_tools`` those of them that may be called; ``is_forced``:
    must be. ``continued`` is the text of the assistant's message that the output goes on with, if it does."""

    formats: Formats
    tools: list[dict[str, Any]]
    callable_tools: list[dict[str, Any]]
    is_forced: bool
    is_parallel: bool
    prompt: str
    continued: str | None
    separates: bool
    streams_reasoning: bool
    tells_reasoning: bool
    max_thinking: int | None

    @property
    def is_open(self) -> bool:
        """Whether the prompt has begun the reasoning."""
        return self.formats.begins_open(self.prompt, continued=self.continued)

    @property
    def parses(self) -> bool:
        """Whether there is anything to look for in the output."""
        return bool(self.tools) or self.formats.reasoning is not None

    def parser(self) -> OutputParser:
        """A parser for one choice."""
        return new_parser(
            self.formats, tools=self.tools, is_open=self.is_open, separates=self.separates,
            max_calls=MAX_CALLS if self.is_parallel else 1,
        )

    def _thinking_budget(self, params: SamplingParams) -> ThinkingBudget | None:
        """The limit for the engine; None when there is none or nothing to limit."""
        reasoning = self.formats.reasoning
        if self.max_thinking is None or self.formats.is_closed(self.prompt):
            return None
        if reasoning is None or not reasoning.starts:
            _refuse_budget("it is not known how this model marks its reasoning; see --reasoning-parser")
        if params.grammar is not None and params.grammar.kind == "ebnf":
            _refuse_budget("a grammar in EBNF binds the reasoning, too")
        return ThinkingBudget(
            max_tokens=self.max_thinking, end=reasoning.ends[0], start=None if self.is_open else reasoning.starts[0]
        )

    def extend(self, params: SamplingParams) -> SamplingParams:
        """The sampling parameters with what parsing needs: markers that stay visible, and the grammar of calls."""
        if not self.parses:
            return (
                params if self.max_thinking is None
                else _refuse_budget("it is not known how this model marks its reasoning; see --reasoning-parser")
            )
        kept = self.formats.visible_texts(has_tools=bool(self.tools))
        params = msgspec.structs.replace(
            params, keep_special_tokens=kept, thinking_budget=self._thinking_budget(params)
        )
        grammar = confine_output(
            self.formats, params.grammar, self.callable_tools, self.prompt, is_parallel=self.is_parallel,
            is_forced=self.is_forced,
            is_narrowed=len(self.callable_tools) < len(self.tools), continued=self.continued,
        )
        return msgspec.structs.replace(params, grammar=grammar)


def _refuse_budget(reason: str) -> NoReturn:
    raise UnsupportedFeature(f"thinking_budget cannot be kept: {reason}", param="thinking_budget")


def _read_budget(request: ChatRequest) -> int | None:
    switch = None if request.thinking is None else request.thinking.budget_tokens
    given = {request.thinking_budget, request.thinking_token_budget, request.max_thinking_tokens, switch} - {None}
    if len(given) > 1:
        raise RequestError(
            "thinking_budget, thinking_token_budget, max_thinking_tokens and thinking.budget_tokens are the same; give "
            "one",
            param="thinking_budget"
        )
    return given.pop() if given else None


def plan_answer(context: AppContext, request: ChatRequest, prompt: str) -> AnswerPlan:
    """The plan for a request whose prompt has been rendered. Raises typed errors for tools that cannot be served."""
    tools, formats, choice = offered_tools(request), context.formats(), request.tool_choice
    if tools and formats.tools is None:
        raise UnsupportedFeature(
            "tools cannot be served: it is not known how this model writes tool calls; name the format with "
            "--tool-parser",
            param="tools",
        )
    last = request.messages[-1].content
    continued = None
    if request.continue_final_message:
        continued = "".join(part.text for part in last) if isinstance(last, list) else last or ""
    names = chosen_names(choice)
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
    return AnswerPlan(
        formats=formats, tools=tools, callable_tools=[t for t in tools if not names or t["function"]["name"] in names],
        is_forced=isinstance(choice, NamedTool) or mode == "required",
        is_parallel=request.parallel_tool_calls is not False and not isinstance(choice, NamedTool),
        prompt=prompt, continued=continued,
        separates=request.separate_reasoning is not False, streams_reasoning=request.stream_reasoning is not False,
        tells_reasoning=request.include_reasoning is not False,
        max_thinking=_read_budget(request),
    )


class AnswerReader:
    """Reads one choice. Events come in the order the model wrote them; reasoning nobody asked for is left out."""

    def __init__(self, plan: AnswerPlan):
        self._parser = plan.parser() if plan.parses else None
        self._tells_reasoning = plan.tells_reasoning

    @property
    def has_calls(self) -> bool:
        """Whether there is a complete call so far."""
        return self._parser is not None and self._parser.num_calls > 0

    def read(self, delta: ChoiceDelta | CompletionOutput) -> list[Event]:
        """The events of a delta, or of a whole output."""
        if self._parser is None:
            return [TextDelta(delta.text)] if delta.text else []
        events = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish()
        kept = [e for e in events if self._tells_reasoning or not (isinstance(e, TextDelta) and e.is_reasoning)]
        return merge_events(kept)


SPECIALS = 8
"""Tokens beyond one a byte that a prompt may have."""


@dataclass(frozen=True)
class Chat:
    """A conversation ready to be generated for. ``is_capped``: the context leaves less room than ``max_tokens``."""

    ask: Ask
    plan: AnswerPlan
    is_capped: bool = False


def _limit(body: ChatRequest) -> int | None:
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise RequestError("max_tokens and max_completion_tokens are the same limit; give one", param="max_tokens")
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _params(body: ChatRequest, context: AppContext) -> SamplingParams:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    return sampling_params(body, context.facts().default_sampling, max_tokens=_limit(body), logprobs=num_top)


async def _fit(
    context: AppContext, prompt: str, params: SamplingParams, *, add_special_tokens: bool
) -> tuple[Prompt, bool]:
    """``(the prompt, by its ids if they were needed, whether max_tokens was lowered to the room that the context
    leaves)``."""
    limit, asked = context.facts().max_model_len, params.max_tokens
    if asked is None or len(prompt.encode()) + SPECIALS + asked <= limit:
        return prompt, False
    encode = partial(encode_prompt, prompt, context.client.tokenizer, add_special_tokens=add_special_tokens, most=limit)
    ids = await asyncio.to_thread(encode) if len(prompt) > LONG_TEXT else encode()
    room = limit - len(ids)
    if 0 < room < asked:
        params.max_tokens = room
    return ids, params.max_tokens != asked


async def prepare_chat(
    request: Request, context: AppContext, body: ChatRequest, *, id_prefix: str, fits: bool = False
) -> Chat:
    """Render and plan ``body``. ``fits``: more ``max_tokens`` than there is room for are lowered, not refused. Raises
    typed errors for what cannot be served, before anything is submitted."""
    context.check_available()
    context.check_model(body.model)
    params = _params(body, context)
    prompt = await render_conversation(context, body)
    plan = plan_answer(context, body, prompt)
    has_special = bool(body.add_special_tokens)  # templates write the special tokens themselves
    asked, is_capped = await _fit(context, prompt, params, add_special_tokens=has_special) if fits else (prompt, False)
    ask = Ask(
        request_id=pick_request_id(given_request_id(body), request, id_prefix),
        prompts=[asked],
        params=[plan.extend(params)],
        namespace=body.cache_salt or "",
        priority=body.priority or 0,
        deadline_s=body.deadline_s,
        add_special_tokens=has_special,
        truncate=body.truncate_prompt_tokens,
        grammar_field=lambda: grammar_field(body) or "tools",
    )
    return Chat(ask, plan, is_capped)

"""`prepare_chat`: from a checked `ChatRequest` to a `GenerationRequest` and an `OutputPlan` (how the output is parsed).
Every API that answers conversations is converted to `ChatRequest` and comes through here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import msgspec
from starlette.requests import Request

from headrace.base.errors import RequestError, UnsupportedFeature
from headrace.base.sampling import SamplingParams, ThinkingBudget
from headrace.service.client.media import place_items
from headrace.service.client.outputs import ChoiceDelta, CompletionOutput
from headrace.service.media.wire import PreparedItem
from headrace.service.parsing.choice import Formats
from headrace.service.parsing.events import (
    MAX_CALLS,
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    TextDelta,
    merge_events,
)
from headrace.service.parsing.forcing import confine_output, enforces_lark
from headrace.service.parsing.message import ToolCall, new_parser
from headrace.service.parsing.parser import OutputParser
from headrace.serving.http.generation.context import AppContext, compute
from headrace.serving.http.generation.conversation import (
    chosen_names,
    custom_names,
    lark_grammars,
    offered_tools,
    render_conversation,
    render_size,
)
from headrace.serving.http.generation.exchange import with_transfers
from headrace.serving.http.generation.media import media_of, prepare_media
from headrace.serving.http.generation.run import GenerationRequest, Prompt
from headrace.serving.http.generation.sampling import (
    body_request_id,
    check_streamed,
    grammar_field,
    openai_params,
    pick_request_id,
)
from headrace.serving.http.protocol.media import RefusalPart, TextPart
from headrace.serving.http.protocol.openai import ChatRequest
from headrace.serving.http.protocol.tools import AllowedTools, NamedCustomTool, NamedTool

UNKNOWN_REASONING = "the reasoning format of this model is unknown; name it with --reasoning-parser"


@dataclass(frozen=True, kw_only=True)
class OutputPlan:
    """How one request's output is split into reasoning, text and tool calls, and which calls a grammar forces or
    allows. ``tools`` are shown in the prompt; ``callable_tools`` are those of them that may be called (one must be if
    ``is_forced``), ``custom`` the names of custom tools among them. ``is_parallel``: several calls are allowed.
    ``prompt`` is the rendered text; ``continued`` the text of the assistant message that the output continues, if any.
    ``separates`` False leaves the reasoning in the content, with its markers; ``streams_reasoning`` False sends it in
    one piece, ``includes_reasoning`` False drops it. ``max_thinking``: tokens of reasoning before it is ended, None for
    no limit."""

    formats: Formats
    tools: list[dict[str, Any]]
    callable_tools: list[dict[str, Any]]
    custom: frozenset[str]
    is_forced: bool
    is_parallel: bool
    prompt: str
    continued: str | None
    separates: bool
    streams_reasoning: bool
    includes_reasoning: bool
    max_thinking: int | None

    @property
    def is_open(self) -> bool:
        """Whether the prompt has opened the reasoning."""
        return self.formats.begins_open(self.prompt, continued=self.continued)

    @property
    def parses(self) -> bool:
        """Whether the output needs a parser."""
        return bool(self.tools) or self.formats.reasoning is not None

    def parser(self) -> OutputParser:
        """A parser for one choice."""
        return new_parser(
            self.formats, tools=self.tools, is_open=self.is_open, separates=self.separates,
            max_calls=MAX_CALLS if self.is_parallel else 1, custom=self.custom,
        )

    def _thinking_budget(self, params: SamplingParams) -> ThinkingBudget | None:
        """The reasoning limit for the engine; None without a limit, or if the prompt has already ended the reasoning.
        Raises `UnsupportedFeature` if it cannot be enforced."""
        reasoning = self.formats.reasoning
        if self.max_thinking is None or self.formats.is_closed(self.prompt):
            return None
        if reasoning is None or not reasoning.starts:
            _refuse_budget(UNKNOWN_REASONING)
        if params.grammar is not None and params.grammar.kind == "ebnf":
            _refuse_budget("an EBNF grammar constrains the reasoning, too")
        return ThinkingBudget(
            max_tokens=self.max_thinking, end=reasoning.ends[0], start=None if self.is_open else reasoning.starts[0]
        )

    def extend(self, params: SamplingParams) -> SamplingParams:
        """``params`` for an output that is parsed: special tokens that mark calls and reasoning stay visible, and a
        grammar constrains calls. Raises typed errors for combinations that cannot be enforced."""
        if not self.parses:
            return params if self.max_thinking is None else _refuse_budget(UNKNOWN_REASONING)
        grammar = confine_output(
            self.formats, params.grammar, self.callable_tools, self.prompt, is_parallel=self.is_parallel,
            is_forced=self.is_forced, is_narrowed=len(self.callable_tools) < len(self.tools), continued=self.continued,
        )
        return msgspec.structs.replace(
            params, keep_special_tokens=self.formats.visible_texts(has_tools=bool(self.tools)),
            thinking_budget=self._thinking_budget(params), grammar=grammar,
        )


class OutputReader:
    """Parses the output of one choice into events, for APIs whose responses are lists of items. Works for a whole
    output (one `read`) and for deltas. Events come in output order; reasoning is dropped if the request excluded it."""

    def __init__(self, plan: OutputPlan):
        self._parser = plan.parser() if plan.parses else None
        self._includes_reasoning = plan.includes_reasoning
        self._call, self._arguments = ToolCall("", ""), list[str]()  # the open one of `read_whole`

    @property
    def has_calls(self) -> bool:
        """Whether there is a complete call so far."""
        return self._parser is not None and self._parser.num_calls > 0

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning has begun and not ended."""
        return self._parser is not None and self._parser.is_reasoning

    def read(self, delta: ChoiceDelta | CompletionOutput) -> list[Event]:
        """The events of a delta, or of a whole output."""
        if self._parser is None:
            return [TextDelta(delta.text)] if delta.text else []
        events = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            # flushes text that the parser held back: it may have been the start of a marker
            events += self._parser.finish()
        if not self._includes_reasoning:
            events = [e for e in events if not (isinstance(e, TextDelta) and e.is_reasoning)]
        return merge_events(events) if len(events) > 1 else events

    def read_whole(self, delta: ChoiceDelta | CompletionOutput) -> Iterator[TextDelta | ToolCall]:
        """Texts, and calls once they are complete. Those that the model broke off are dropped: their arguments are not
        valid JSON."""
        for event in self.read(delta):
            match event:
                case TextDelta():
                    yield event
                case CallStart(_, call_id, name):
                    self._call, self._arguments = ToolCall(call_id, name, is_complete=True), []
                case CallArguments(_, text):
                    self._arguments.append(text)
                case CallEnd(_, True):
                    self._call.arguments = "".join(self._arguments) or "{}"
                    yield self._call


@dataclass(frozen=True)
class Chat:
    """A conversation ready for generation."""

    request: GenerationRequest
    plan: OutputPlan


def _refuse_budget(reason: str) -> NoReturn:
    raise UnsupportedFeature(f"thinking_budget cannot be enforced: {reason}", param="thinking_budget")


def _read_budget(body: ChatRequest, formats: Formats) -> int | None:
    switch = None if body.thinking is None else body.thinking.budget_tokens
    given = {body.thinking_budget, body.thinking_token_budget, body.max_thinking_tokens, switch} - {None}
    if len(given) > 1:
        raise RequestError(
            "thinking_budget, thinking_token_budget, max_thinking_tokens and thinking.budget_tokens are the same "
            "field; give one", param="thinking_budget"
        )
    is_switch_alone = (body.thinking_budget, body.thinking_token_budget, body.max_thinking_tokens) == (None,) * 3
    if is_switch_alone and formats.reasoning is None:
        return None  # clients switch reasoning on for every model; of one without reasoning nothing comes
    return given.pop() if given else None


def _plan_output(context: AppContext, body: ChatRequest, prompt: str) -> OutputPlan:
    """Raises typed errors for tools that cannot be served."""
    tools, formats, choice = offered_tools(body.tools, body.tool_choice), context.formats(), body.tool_choice
    if tools and formats.tools is None:
        raise UnsupportedFeature(
            "tools cannot be served: the tool call format of this model is unknown; name it with --tool-parser",
            param="tools",
        )
    continued = None
    if body.continue_final_message:
        last = body.messages[-1].text_or_parts
        parts = last if isinstance(last, list) else [TextPart(text=last or "")]
        continued = "".join(part.text for part in parts if isinstance(part, TextPart | RefusalPart))
    larks = lark_grammars(body.tools)
    # empty: every tool may be called
    names = chosen_names(choice)
    is_named = isinstance(choice, NamedTool | NamedCustomTool)
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
    return OutputPlan(
        formats=formats, tools=tools,
        callable_tools=[_bind(t, larks) for t in tools if not names or t["function"]["name"] in names],
        custom=custom_names(body.tools), is_forced=is_named or mode == "required",
        is_parallel=body.parallel_tool_calls is not False and not is_named,
        prompt=prompt, continued=continued, separates=body.separate_reasoning is not False,
        streams_reasoning=body.stream_reasoning is not False, includes_reasoning=body.include_reasoning is not False,
        max_thinking=_read_budget(body, formats),
    )


def _bind(tool: dict[str, Any], larks: Mapping[str, str]) -> dict[str, Any]:
    """A tool for `confine_output`, with the grammar of its input; the prompt shows it in words."""
    function = tool["function"]
    lark = larks.get(function["name"])
    return tool if lark is None else {**tool, "function": {**function, "lark": lark, "strict": True}}


def _params(body: ChatRequest, context: AppContext) -> SamplingParams:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise RequestError("max_tokens and max_completion_tokens are the same limit; give one", param="max_tokens")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    check_streamed(body, num_top)
    return openai_params(body, context.facts().default_sampling, max_tokens=max_tokens, logprobs=num_top)


async def prepare_chat(
    request: Request, context: AppContext, body: ChatRequest, *, id_prefix: str, fits: bool = False,
    field_names: Mapping[str, str] | None = None,
) -> Chat:
    """Render the conversation of ``body``, check it, and plan its output. ``fits``: the output may be shorter than
    ``max_tokens`` where the context ends (``fits_context`` of `SamplingParams`). ``field_names`` are those of the API
    where they are not those of a chat request (`GenerationRequest`). Submits nothing. Raises typed errors for what
    cannot be served."""
    adapter = context.check_request(body.model)
    if lark_grammars(body.tools) and (own := context.formats().tools) and not enforces_lark(own.writing):
        request.scope.setdefault("state", {}).setdefault("ignored_fields", []).append("tools.format.definition")
    params = _params(body, context)  # cheap checks first: rendering may take long
    params.fits_context = fits
    items = await prepare_media(request, context, media_of(body.messages), salt=body.cache_salt or "")
    chat = await compute(
        request,
        lambda: _prepare(
            request, context, body, params, items, id_prefix=id_prefix, field_names=field_names or {}
        ),
        size=render_size(body)
    )
    return replace(chat, request=replace(chat.request, adapter=adapter))


def _prepare(
    request: Request, context: AppContext, body: ChatRequest, params: SamplingParams, items: Sequence[PreparedItem], *,
    id_prefix: str, field_names: Mapping[str, str],
) -> Chat:
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    named = {"prompt": "messages", "max_tokens": limit, **field_names}
    prompt = render_conversation(context, body)
    plan = _plan_output(context, body, prompt)
    has_special = bool(body.add_special_tokens)  # default off: templates write the special tokens themselves
    given: Prompt = prompt
    if items:
        given = place_items(
            prompt, items, context.client.tokenizer, context.facts(), add_special_tokens=has_special,
            param=named["prompt"]
        )
    # Tool schemas compile to a grammar, too: errors name the field ``tools`` unless the request has a grammar of its
    # own.
    generation = GenerationRequest(
        request_id=pick_request_id(body_request_id(body), request, id_prefix), prompts=[given],
        params=with_transfers([plan.extend(params)], body, context.client.config), namespace=body.cache_salt or "",
        priority=body.priority or 0, deadline_s=body.deadline_s, add_special_tokens=has_special,
        truncate=body.truncate_prompt_tokens, keeps_begin=body.truncation_side == "right",
        grammar_field=lambda: grammar_field(body) or "tools", field_names=named,
    )
    return Chat(generation, plan)

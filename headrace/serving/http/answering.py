"""`AnswerPlan`: how the output of one chat request is told apart into reasoning, text and calls, and forced into
calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from headrace.base.errors import RequestError, UnsupportedFeature
from headrace.base.sampling import SamplingParams, ThinkingBudget
from headrace.service.parsing.calls import MAX_CALLS
from headrace.service.parsing.choice import Formats
from headrace.service.parsing.forcing import confine_output
from headrace.service.parsing.message import new_parser
from headrace.service.parsing.parser import OutputParser
from headrace.serving.http.context import AppContext
from headrace.serving.http.protocol.chat import ChatRequest
from headrace.serving.http.protocol.tools import AllowedTools, NamedTool
from headrace.serving.http.tools import chosen_names, offered_tools


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

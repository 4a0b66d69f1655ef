"""How `LLM` and `AsyncLLM` read what they are given: sampling parameters, tools, template variables, names."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from headrace.base.errors import RequestError
from headrace.base.messages import ModelFacts
from headrace.base.sampling import SamplingParams
from headrace.service.parsing.choice import Formats
from headrace.service.parsing.forcing import confine_output
from headrace.service.parsing.rendering import check_variables

Params = SamplingParams | Sequence[SamplingParams] | None


def default_params(facts: ModelFacts) -> SamplingParams:
    """The model's default sampling parameters. Nobody asked for a number of tokens: the output may end with the
    context."""
    defaults: dict[str, Any] = {"fits_context": True, **facts.default_sampling}
    return SamplingParams(**defaults)


def call_unless_forked(pid: int, end: Callable[[], None]) -> None:
    """Call ``end`` unless this is a fork of the process ``pid``, to which the engine belongs."""
    if os.getpid() == pid:
        end()


def name_of(model: str | os.PathLike[str]) -> str:
    """A model's name, or its path as text."""
    return os.fspath(model) if isinstance(model, os.PathLike) else model


def read_template_options(template: str | None, options: dict[str, Any] | None) -> dict[str, Any]:
    """Variables for the chat template; those with arguments of `LLM.chat` are refused."""
    if template is not None and not isinstance(template, str):
        raise RequestError(f"chat_template is Jinja text, got {type(template).__name__}", param="chat_template")
    if not isinstance(options or {}, dict):
        raise RequestError(
            f"chat_template_kwargs is an object, got {type(options).__name__}", param="chat_template_kwargs"
        )
    check_variables(options or {})
    return dict(options or {})


def spread_params(params: Params, count: int, facts: ModelFacts) -> list[SamplingParams]:
    """The parameters of each of ``count`` prompts; raises `RequestError` for another number, or other types."""
    if params is None or isinstance(params, SamplingParams):
        return [params or default_params(facts)] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError(
            f"sampling_params is a SamplingParams or a list of them, got {params!r:.80}", param="sampling_params"
        )
    if len(params) != count:
        raise RequestError(f"sampling_params has {len(params)} entries for {count} prompts", param="sampling_params")
    return list(params)


def find_callable_tools(tools: list[dict[str, Any]], choice: str) -> list[dict[str, Any]]:
    """The tools that may be called; raises `RequestError` for a ``choice`` that names none of them."""
    if choice in ("auto", "required"):
        return tools
    named = [tool for tool in tools if tool["function"]["name"] == choice]
    if not named:
        raise RequestError(
            f"tool_choice must be 'auto', 'required' or the name of one of the tools, got {choice!r}",
            param="tool_choice"
        )
    return named


def prepare_calls(
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

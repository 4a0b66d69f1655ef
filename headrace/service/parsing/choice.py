"""Chooses the formats of a model's output: given by name, recognised in its chat template, or declared by its family.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from headrace.base.errors import ConfigError
from headrace.base.messages import ModelFacts
from headrace.base.option import suggest
from headrace.base.registry import Registry, installed_points
from headrace.service.parsing.format import ReasoningFormat, ToolFormat, visible_texts
from headrace.service.parsing.known_formats import ALIASES, REASONING_FORMATS, TOOL_FORMATS
from headrace.service.tokenization import Tokenizer

T = TypeVar("T", ToolFormat, ReasoningFormat)

AUTO, NONE = "auto", "none"
TOOL_GROUP, REASONING_GROUP = "headrace.tool_formats", "headrace.reasoning_formats"
"""Entry points that name a format of another package."""
TAIL = 256
"""Characters at the end of a prompt that are searched for an open or ended reasoning."""
EXPLAINED = "hermes"
"""The format taught in the prompt to a model whose template shows no tools."""


@dataclass(frozen=True)
class Formats:
    """The formats of a served model; None if none is known, or parsing is switched off."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    def visible_texts(self, *, has_tools: bool) -> list[str]:
        """Texts in which special tokens must stay visible (`SamplingParams.keep_special_tokens`)."""
        return visible_texts(self.tools if has_tools else None, self.reasoning)

    def is_closed(self, prompt: str) -> bool:
        """Whether the prompt already ends the reasoning (a template with thinking disabled), so that none comes."""
        return (
            self.reasoning is not None and bool(self.reasoning.ends)
            and prompt[-TAIL:].rstrip().endswith(self.reasoning.ends)
        )

    def begins_open(self, prompt: str, *, continued: str | None = None) -> bool:
        """Whether the output continues reasoning that the prompt has begun. ``continued``: the text of the assistant
        message that the output continues (``continue_final_message``), None for a new message."""
        if self.reasoning is None or self.reasoning.channels is not None:
            return False
        if continued is not None:  # open if the last start mark in the message has no end mark behind it
            last_start, last_end = (
                max((continued.rfind(text) for text in texts), default=-1)
                for texts in (self.reasoning.starts, self.reasoning.ends)
            )
            return last_start > last_end
        tail = prompt[-TAIL:].rstrip()
        if tail.endswith(self.reasoning.starts):
            return True
        return self.reasoning.is_open and not tail.endswith(self.reasoning.ends)


def check_names(tool_parser: str, reasoning_parser: str) -> None:
    """Raise `ConfigError` for a name that no format has."""
    _find(tool_parser, TOOL_FORMATS, TOOL_GROUP, "tool_parser")
    _find(reasoning_parser, REASONING_FORMATS, REASONING_GROUP, "reasoning_parser")


def choose_formats(
    *, tool_parser: str = AUTO, reasoning_parser: str = AUTO, templates: Iterable[str] = (), takes_tools: bool = True,
    family_tools: str | None = None, family_reasoning: str | None = None,
) -> Formats:
    """Choose the formats. For ``auto``, the chat template's signs win over the family's declaration: a fine-tuned model
    keeps its architecture and brings its own template. ``takes_tools``: whether the template shows tools; if not, a
    format is explained in the prompt, `EXPLAINED` if the model has none that can be. Raises `ConfigError` for an
    unknown name."""
    texts = list(templates)
    tools = _choose(tool_parser, TOOL_FORMATS, TOOL_GROUP, texts, family_tools)
    if tool_parser == AUTO and not takes_tools and (tools is None or tools.writing is None):
        tools = TOOL_FORMATS.load(EXPLAINED)
    return Formats(tools, _choose(reasoning_parser, REASONING_FORMATS, REASONING_GROUP, texts, family_reasoning))


def formats_of(
    tokenizer: Tokenizer | None, facts: ModelFacts, *, tool_parser: str = AUTO, reasoning_parser: str = AUTO
) -> Formats:
    """The formats of a served model; a model without tokenizer has none."""
    if tokenizer is None:
        return Formats()
    return choose_formats(
        tool_parser=tool_parser, reasoning_parser=reasoning_parser, templates=tokenizer.chat_templates,
        takes_tools=tokenizer.takes_tools,
        family_tools=facts.parsers.tool, family_reasoning=facts.parsers.reasoning,
    )


def _choose(name: str, registry: Registry[T], group: str, templates: list[str], declared: str | None) -> T | None:
    if name != AUTO:
        return _find(name, registry, group, "tool_parser" if group == TOOL_GROUP else "reasoning_parser")
    for entry in registry:
        found = registry.load(entry.name)
        if any(all(sign in text for sign in signs) for text in templates for signs in found.signs):
            return found
    return _find(declared or NONE, registry, group, "family")


def _find(name: str, registry: Registry[T], group: str, param: str) -> T | None:
    if name in (AUTO, NONE):
        return None
    plain = name.lower().replace("-", "_")
    plain = plain if plain in registry else ALIASES.get(plain.replace("_", ""), ALIASES.get(plain, plain))
    if plain in registry:
        return registry.load(plain)
    for entry in installed_points(group).select(name=name):
        found: T = entry.load()
        return found
    names = sorted(registry.names())
    raise ConfigError(
        f"{param} must be {AUTO}, {NONE}, or one of {', '.join(names)}; got {name!r}{suggest(name, names)}", param=param
    )

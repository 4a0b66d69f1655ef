"""What a grammar library must offer, and the registry of those known. Refuses: threads, caches, rows."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Protocol

import numpy as np

from headrace.base.errors import PluginError, UnsupportedFeature
from headrace.base.grammar import Grammar, Vocabulary
from headrace.base.registry import Registry
from headrace.execution.structured.exact import inexactness
from headrace.execution.structured.plain import PlainTokens
from headrace.execution.structured.states import States

INSTALL = "pip install 'headrace[structured]'"


class LeftToOthers(Exception):  # no error: the next library is asked
    """A library finds, as it compiles, that it does not enforce a grammar exactly with this vocabulary."""


class Matcher(Protocol):
    """How far one output has come in a grammar."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens. A token the grammar does not allow leaves the matcher with an ``error``."""

    def read_forced(self) -> bytes:
        """The text that comes next whatever is drawn: empty where there is a choice, or the output may end."""

    @property
    def error(self) -> str | None:
        """Why it cannot go on: a token that was not allowed, or the library's limit on work for a token."""


class CompiledGrammar(Protocol):
    """A grammar for one vocabulary; shared by any number of outputs. ``library`` fills the masks of its matchers.
    ``plain``: tokens that leave a matcher where it is, wherever all of them are allowed; None where none are known to.
    ``states``: where its outputs stand, if an automaton of ours reads it."""

    library: GrammarLibrary
    plain: PlainTokens | None
    states: States | None

    def start(self) -> Matcher:
        """A matcher at the beginning of an output."""


class GrammarLibrary(Protocol):
    """Made once for a vocabulary. `compile` is called from other threads than `fill` and must let those run
    meanwhile."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises `RequestError` when the grammar is wrong, asks for what the library does not enforce, allows no
        output, or is too large; `LeftToOthers` when another library shall. Takes bounded time and memory."""

    def fill(self, matchers: Sequence[Matcher], masks: np.ndarray) -> None:
        """Write the next tokens that matcher i allows into ``masks[i]``, [len(matchers), ceil(V / 32)] int32, in the
        layout of `headrace.kernels.sample`. End-of-text is allowed only where the output may end."""


class LibraryFactory(Protocol):
    """What a registry entry is: makes the library for a vocabulary of ``vocab_size`` ids, ``eos_ids`` of which end
    text."""

    def __call__(self, vocabulary: Vocabulary, vocab_size: int, eos_ids: Sequence[int]) -> GrammarLibrary: ...


GRAMMAR_LIBRARIES: Registry[LibraryFactory] = Registry("grammar library")
"""Queried with a `Grammar`: an entry supports those that it enforces exactly."""


def _missing(package: str) -> str | None:
    return None if find_spec(package) else f"the package {package} is not installed"


GRAMMAR_LIBRARIES.add(
    "xgrammar", "headrace.execution.structured.xgrammar:XgrammarLibrary",
    supports=lambda grammar: _missing("xgrammar") or inexactness(grammar),
    priority=20, doc="JSON and structural tags of plain schemas: the fastest masks",
)
GRAMMAR_LIBRARIES.add(
    "llguidance", "headrace.execution.structured.llguidance:GuidanceLibrary", supports=lambda _: _missing("llguidance"),
    priority=10,
    doc="JSON schemas, regular expressions, GBNF and Lark grammars, choices, structural tags",
)


def choose_library(grammar: Grammar, *tried: str) -> tuple[str, LibraryFactory]:
    """The best library that enforces a grammar exactly, by name, other than those ``tried``; raises
    `UnsupportedFeature` saying what to install."""
    reasons: dict[str, str | None] = dict.fromkeys(tried, "it does not enforce this one exactly")
    for entry in GRAMMAR_LIBRARIES:
        if entry.name in tried:
            continue
        reasons[entry.name] = GRAMMAR_LIBRARIES.reason_against(entry.name, grammar)
        if reasons[entry.name] is None:
            try:
                return entry.name, GRAMMAR_LIBRARIES.load(entry.name)
            except PluginError as error:
                reasons[entry.name] = error.message
    listing = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise UnsupportedFeature(
        f"no grammar library here serves this {grammar.kind} ({listing}); {INSTALL}", param=grammar.kind
    )

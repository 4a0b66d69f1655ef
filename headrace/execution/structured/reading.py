"""`read_automaton`: the automaton that tells where outputs of a grammar stand. Refuses: what it is used for."""

from __future__ import annotations

import re

import msgspec

from headrace.base.grammar import Grammar
from headrace.execution.structured.regex_states import read_regex
from headrace.execution.structured.states import Automaton


def read_automaton(grammar: Grammar) -> Automaton | None:
    """For grammars of which enough is read; None for the others."""
    match grammar.kind:
        case "regex":
            return read_regex(grammar.text)
        case "choice":
            return read_regex("|".join(map(re.escape, msgspec.json.decode(grammar.text))))
    return None

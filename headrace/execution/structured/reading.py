"""`read_automaton`: the automaton that tells where outputs of a grammar stand. Refuses: what it is used for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.base.grammar import Grammar
from headrace.execution.structured.json_states import JsonAutomaton
from headrace.execution.structured.json_values import NotReadError, read_place
from headrace.execution.structured.reach import Reach
from headrace.execution.structured.regex_states import read_regex
from headrace.execution.structured.states import Automaton
from headrace.execution.structured.structural_tag import modernise
from headrace.execution.structured.tag_states import read_tags


def read_automaton(grammar: Grammar, reach: Reach, count: Callable[[bytes, int], bytes]) -> Automaton | None:
    """For grammars of which enough is read; None for the others. ``count``: see `JsonAutomaton`."""
    match grammar.kind:
        case "json_object" | "json_schema" | "structural_tag":
            try:
                return _read_document(grammar, reach, count)
            except (NotReadError, RecursionError):
                return None
        case "regex":
            return read_regex(grammar.text, reach)
        case "choice":
            return read_regex("|".join(map(re.escape, msgspec.json.decode(grammar.text))), reach)
    return None


def _read_document(grammar: Grammar, reach: Reach, count: Callable[[bytes, int], bytes]) -> Automaton:
    document: Any = {"type": "object"} if grammar.kind == "json_object" else msgspec.json.decode(grammar.text)
    if grammar.kind == "structural_tag":
        return read_tags(modernise(document)["format"], reach, count)
    return JsonAutomaton(read_place(document, reach), reach, count)

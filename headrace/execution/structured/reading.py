"""`read_automaton`: the automaton that tells where outputs of a grammar stand. Refuses: what it is used for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.base.grammar import Grammar
from headrace.execution.structured.json_states import JsonAutomaton
from headrace.execution.structured.json_values import NotReadError, read_place
from headrace.execution.structured.regex_states import read_regex
from headrace.execution.structured.states import Automaton
from headrace.execution.structured.structural_tag import modernise
from headrace.execution.structured.tag_states import read_tags


def read_automaton(grammar: Grammar, reach: int, count: Callable[[bytes, int], bytes]) -> Automaton | None:
    """For grammars of which enough is read; None for the others. ``reach`` and ``count``: see `JsonAutomaton`."""
    match grammar.kind:
        case "json_object":
            return _read_schema({"type": "object"}, reach, count)
        case "json_schema":
            return _read_schema(msgspec.json.decode(grammar.text), reach, count)
        case "structural_tag":
            return _read_tags(msgspec.json.decode(grammar.text), reach, count)
        case "regex":
            return read_regex(grammar.text)
        case "choice":
            return read_regex("|".join(map(re.escape, msgspec.json.decode(grammar.text))))
    return None


def _read_schema(schema: Any, reach: int, count: Callable[[bytes, int], bytes]) -> Automaton | None:
    try:
        return JsonAutomaton(read_place(schema), reach, count)
    except (NotReadError, RecursionError):
        return None


def _read_tags(tag: Any, reach: int, count: Callable[[bytes, int], bytes]) -> Automaton | None:
    try:
        return read_tags((modernise(tag) if "structures" in tag else tag)["format"], reach, count)
    except (NotReadError, RecursionError):
        return None

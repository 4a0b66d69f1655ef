"""Cheap checks of sources before anything is compiled: what would cost much is refused by its looks. Schemas:
``schema.py``."""

from __future__ import annotations

import re

from headrace.base.errors import RequestError

MAX_REGEX = 16 * 1024
MAX_EBNF = 64 * 1024
MAX_REPEATS = 10_000
MAX_RULES = 512
MAX_NESTING = 100

_COUNTS = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_CLASS = re.compile(r"\[\^?\]?[^\]]*(\]|\Z)")
"""A bracket that comes first in a class belongs to it."""
_RULE = re.compile(r"^\s*[\w?!.-]+\s*(?:\[[^\]\n]*\]\s*)?(?:::=|:)", re.MULTILINE)
_DIRECTIVE = re.compile(r"%\s*(json|llguidance|lark)\b")


def check_regex(pattern: str, param: str) -> None:
    """Refuse a regular expression that is long, deep, or repeats something very often."""
    _check_size(pattern, MAX_REGEX, param)
    _check_shape(pattern, param)


def check_ebnf(text: str, param: str) -> None:
    """Refuse a grammar that is long, deep, has very many rules or repeats something very often, or speaks to the
    library."""
    _check_size(text, MAX_EBNF, param)
    _check_shape(text, param)
    num_rules = len(_RULE.findall(text))
    if num_rules > MAX_RULES:
        raise RequestError(f"{param}: the grammar has {num_rules} rules; at most {MAX_RULES} are taken", param=param)
    directive = _DIRECTIVE.search(text)
    if directive is not None:
        raise RequestError(f"{param}: {directive[0]} is not served in a grammar", param=param)


def check_whole(pattern: str, param: str) -> None:
    """Refuse a regular expression that ends in the middle of something, or closes what it has not opened: the library
    puts others around it, with which it would make sense of another kind."""
    plain = _CLASS.sub(lambda found: "x" if found[1] else "[", _ESCAPED.sub("x", pattern))
    depth = 0
    for character in plain:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
    if depth or "[" in plain or plain.endswith("\\"):
        raise RequestError(
            f"{param}: the regular expression {pattern[:40]!r} is not whole: a bracket or backslash has no partner",
            param=param
        )


def _check_size(text: str, limit: int, param: str) -> None:
    if len(text) > limit:
        raise RequestError(f"{param} has {len(text)} characters; at most {limit} are taken", param=param)


def _check_shape(text: str, param: str) -> None:
    plain = _ESCAPED.sub("", text)
    for counts in _COUNTS.findall(plain):
        if any(len(count) > 9 or int(count or 0) > MAX_REPEATS for count in counts):
            raise RequestError(
                f"{param} repeats something {'..'.join(filter(None, counts))[:24]} times; at most {MAX_REPEATS} are "
                "taken",
                param=param
            )
    depth = deepest = 0
    for character in plain:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise RequestError(f"{param} is nested {deepest} deep; at most {MAX_NESTING} levels are taken", param=param)

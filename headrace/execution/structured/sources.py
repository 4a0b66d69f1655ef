"""Regular expressions and grammars translated to llguidance's dialect of Lark, after cheap checks of size, nesting and
repetition: a source that would cost much is refused before it is parsed. JSON schemas: ``schema.py``.
"""

from __future__ import annotations

import itertools
import re

import msgspec

from headrace.base.errors import RequestError

HEADER = '%llguidance {"no_forcing": true}\n'
"""Turns off llguidance's own forced tokens: it would tokenise forced text in every step, at a cost that grows with its
length. `ForcedTokens` does that instead, with a cache."""

MAX_REGEX = 16 * 1024
MAX_EBNF = 64 * 1024
MAX_REPEATS = 10_000
MAX_RULES = 512
MAX_NESTING = 100

_COUNTS = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_CLASS = re.compile(r"\[\^?\]?[^\]]*(\]|\Z)")
"""A character class. A ``]`` that comes first in it is a member, not its end."""
_RULE = re.compile(r"^\s*[\w?!.-]+\s*(?:\[[^\]\n]*\]\s*)?(?:::=|:)", re.MULTILINE)
_DIRECTIVE = re.compile(r"%\s*(json|llguidance|lark)\b")
_LARK = re.compile(r"^\s*[?!]?start\s*:(?!:=)", re.MULTILINE)
"""Tells Lark from GBNF, in which a rule may be called ``start``, too."""
_GBNF = re.compile(r'"(?:\\.|[^"\\])*\\?(?:"|\Z)|\[(?:\\.|[^\]\\])*\\?(?:\]|\Z)|#[^\n]*|[\w-]+', re.DOTALL)
"""A string, a class, a comment or a name."""
_RESPELLED = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


def quote(text: str) -> str:
    """A constant in Lark."""
    return msgspec.json.encode(text).decode()


def slash(pattern: str) -> str:
    """A regular expression in Lark: between slashes, with its own slashes and line breaks escaped."""
    return "/" + re.sub(r"\\.|/|\n", lambda found: _RESPELLED.get(found[0], found[0]), pattern, flags=re.DOTALL) + "/"


def read_ebnf(text: str, param: str) -> str:
    """A grammar in Lark, from Lark or GBNF. Raises `RequestError` or llguidance's `GbnfToLarkError`."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    check_ebnf(text, param)
    if _LARK.search(text):
        return text
    # The conversion renames GBNF's ``root`` to ``start``: a rule that has that name already gets another.
    free = next(name for name in map("start-{}".format, itertools.count()) if name not in text)
    return gbnf_to_lark(_GBNF.sub(lambda found: free if found[0] == "start" else found[0], text))


def check_regex(pattern: str, param: str) -> None:
    """Refuse a regular expression that is long, deep, or repeats something very often."""
    _check_size(pattern, MAX_REGEX, param)
    _check_shape(pattern, param)


def check_ebnf(text: str, param: str) -> None:
    """Refuse a grammar that is long, deep, has very many rules, repeats something very often, or holds directives."""
    _check_size(text, MAX_EBNF, param)
    _check_shape(text, param)
    num_rules = len(_RULE.findall(text))
    if num_rules > MAX_RULES:
        raise RequestError(f"{param}: the grammar has {num_rules} rules; at most {MAX_RULES} are taken", param=param)
    directive = _DIRECTIVE.search(text)
    if directive is not None:
        raise RequestError(f"{param}: {directive[0]} is not served in a grammar", param=param)


def check_whole(pattern: str, param: str) -> None:
    """Refuse a regular expression with an unbalanced bracket or a backslash at its end: the library puts other
    expressions around it, with which it could mean something else."""
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

r"""`reword_pattern`: patterns of JSON strings in llguidance's notation, which is Rust's, without the characters that a
string can hold only as ``\uXXXX``, which outputs never do.

JSON schema means JavaScript's syntax, where classes have neither nested classes nor operators; Rust's have both. And
llguidance drops those characters from the middle of a pattern, and takes a class with all of them for one with every
escape, quotes and backslashes included, so that ``[^"]`` would let a quote through. Refuses: parsing patterns beyond
brackets and escapes. `FORMATS`: patterns for strings of some formats.
"""

from __future__ import annotations

import re

from headrace.base.grammar import UNWRITTEN

_LESS = r"--[\x00-\x07\x0B\x0E-\x1F\x7F]"
_LEAP = "[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00"
_DAYS = (
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
)
_DATE = f"(?:[0-9]{{4}}-(?:{_DAYS})|(?:{_LEAP})-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}
"""As RFC 3339 has them, but for leap seconds, which few programs accept. llguidance's own patterns allow a 29th of
February in every year and a 60th second in every minute."""

_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_CLASS = re.compile(r"(\[\^?\]?)((?:\\.|[^\]\\])*\\?(?:\]|\Z))", re.DOTALL)
"""A bracket that comes first belongs to the class. One without an end takes the rest, to be refused elsewhere."""
_SIGNS = re.compile(r"\\.|[\[&~]|--", re.DOTALL)
_NAMING = "pPxuUav"
"""Letters of escapes that may mean such a character, or a class with all of them."""


def reword_pattern(pattern: str) -> str:
    """The pattern of a schema, rewritten so that llguidance enforces what it means in JavaScript's syntax."""
    parts, at = [], 0
    while at < len(pattern):
        escape, bracket = _ESCAPE.match(pattern, at), _CLASS.match(pattern, at)
        found = escape or bracket
        part = written = pattern[at] if found is None else found[0]
        is_wide = escape is not None and part[1] in _NAMING
        if bracket is not None:
            written = bracket[1] + _SIGNS.sub(_spell, bracket[2])
            is_wide = part[1] == "^" or "\\" in part
        parts.append(f"[{written}{_LESS}]" if is_wide or UNWRITTEN.search(part) is not None else written)
        at += len(part)
    return "".join(parts)


def _spell(sign: re.Match[str]) -> str:
    """Escape what is an operator in a class of Rust's (``[``, ``&``, ``~``, ``--``)."""
    if sign[0] == "--":
        return "-\\-" if sign.start() else "\\--"
    return sign[0] if sign[0][0] == "\\" else "\\" + sign[0]

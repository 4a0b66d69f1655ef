"""Inputs of custom tools: one text, which models write as the only argument of a function."""

from __future__ import annotations

import json
import re
from typing import Any

ARGUMENT = "input"
"""The name of the argument."""
_BEGIN = re.compile(rf'\s*\{{\s*"{ARGUMENT}"\s*:\s*"')
_HIGH, _LOW, _ANY = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}", r"\\u[0-9a-fA-F]{4}"
_WHOLE = re.compile(
    rf'(?:[^"\\]++|\\[^u]|{_HIGH}{_LOW}|{_HIGH}(?:(?=[^\\])|(?=\\[^u])|(?={_ANY}))|(?!{_HIGH}){_ANY})*+'
)
"""What can be decoded of the inside of a JSON string: of a character in two halves both, or a half that stays alone."""
_WHOLE_BEGIN, _WHOLE_END = "^(?:", ")$"
_ANCHORED = re.compile(r"\^?((?:[^\\]|\\.)*?)\$?", re.DOTALL)
MAX_BEGIN = 64
"""Characters within which the argument must have begun for its text to be told piece by piece."""


def schema_of_input(pattern: str | None = None) -> dict[str, Any]:
    """The JSON schema of the function's arguments. ``pattern``: a regular expression that matches the whole text."""
    text = {"type": "string"}
    if pattern is not None:
        text["pattern"] = f"{_WHOLE_BEGIN}{pattern}{_WHOLE_END}"
    return {
        "type": "object", "properties": {ARGUMENT: text}, "required": [ARGUMENT], "additionalProperties": False
    }


def find_whole(schema: Any) -> str | None:
    """The ``pattern`` that `schema_of_input` was given, from the schema of a text, without anchors at its ends, which
    say nothing here and are not taken within larger expressions; None if the schema is of another form."""
    pattern = schema.get("pattern") if isinstance(schema, dict) else None
    if not isinstance(pattern, str) or not (pattern.startswith(_WHOLE_BEGIN) and pattern.endswith(_WHOLE_END)):
        return None
    whole = pattern[len(_WHOLE_BEGIN) : -len(_WHOLE_END)]
    found = _ANCHORED.fullmatch(whole)
    return whole if found is None else found[1]


class InputReader:
    """Takes the arguments of a call, JSON in pieces, and returns the text in them, in pieces. Arguments of another form
    are held to the end: the text is then their only string, else they themselves."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._is_begun = self._is_ended = False

    def push(self, arguments: str) -> str:
        """The text that is certain with this piece."""
        if self._is_ended:
            return ""
        self._held.append(arguments)
        if not self._is_begun:
            if len(self._held[0]) >= MAX_BEGIN and len(self._held) > 1:
                return ""  # the beginning is known, and another one
            self._held = ["".join(self._held)]
            begin = _BEGIN.match(self._held[0], 0, MAX_BEGIN)
            if begin is None:
                return ""
            self._is_begun, self._held = True, [self._held[0][begin.end() :]]
        text = "".join(self._held)
        found = _WHOLE.match(text)
        assert found is not None
        self._held = [text[found.end() :]]
        self._is_ended = self._held[0].startswith('"')
        return _decode(found[0])

    def finish(self, *, is_complete: bool) -> str:
        """What is left when the call has ended."""
        if self._is_begun or not is_complete:
            return ""
        arguments = "".join(self._held)
        found = json.loads(arguments)
        texts = [value for value in found.values() if isinstance(value, str)] if isinstance(found, dict) else []
        return texts[0] if len(texts) == 1 else arguments


def _decode(written: str) -> str:
    """The text that the inside of a JSON string stands for; halves of characters become replacement characters."""
    text: str = json.loads(f'"{written}"', strict=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

"""Grammars for structured output: `Grammar`, and the `Vocabulary` that a grammar library needs. Refuses: knowing any
library.

A grammar is made by one of the constructors, wherever it comes from::

    Grammar.json_schema({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})
    Grammar.json_object()                      # any JSON object
    Grammar.regex(r"[a-z]+@[a-z]+\\.(org|com)")  # must match all of the output
    Grammar.ebnf('root ::= "yes" | "no"')      # GBNF (start rule ``root``) or Lark (start rule ``start``)
    Grammar.choice(["red", "green"])
    Grammar.structural_tag({"type": "structural_tag", "format": {...}})

and goes into ``SamplingParams(grammar=...)``. A forced call of one of the tools, in the format of Hermes::

    tag = {"type": "tag", "begin": '<tool_call>\\n{"name": "f", "arguments": ', "end": "}\\n</tool_call>",
           "content": {"type": "json_schema", "json_schema": parameters}}
    Grammar.structural_tag({"type": "structural_tag", "format": {
        "type": "tags_with_separator", "separator": "\\n", "tags": [tag, ...], "at_least_one": True}})

With ``"type": "triggered_tags", "triggers": ["<tool_call>"]`` text may stand around the calls, which is what
``tool_choice: auto`` with strict tools wants. Special tokens written out in a tag mean the token itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec

from headrace.base.errors import RequestError

MAX_GRAMMAR_BYTES = 256 * 1024
"""Size of a schema, regular expression, grammar or structural tag."""
MAX_CHOICES = 4096
MAX_DIGITS, MAX_EXPONENT, MAX_NUMBER = 2**53, 22, 2**63 - 1
"""Limits of numbers in a schema that libraries enforce exactly. They read numbers as float64, which is exact if the
significant digits, as an integer, are at most the first and the power of ten at most the second. The third is the
largest int64 (llguidance crashes at the smallest)."""
UNWRITTEN = re.compile("[\0-\x07\x0b\x0e-\x1f\x7f]")
"""Control characters without a short escape in JSON; grammars do not allow them in strings."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A grammar as its source; equality of the fields decides whether a compiled grammar is shared. ``kind`` is the
    name of the constructor, ``text`` the source: a regular expression, a grammar, or JSON.

    Constructors check form and size and raise `RequestError` naming ``param``. What else is wrong (a keyword that
    cannot be enforced, a syntax error) ends the request with the same error when the engine compiles the grammar.
    """

    kind: str
    text: str = ""

    @classmethod
    def json_schema(cls, schema: str | dict[str, Any] | bool, *, param: str = "grammar") -> Grammar:
        """JSON that a schema allows; the schema is text or a value. Properties come in the schema's order."""
        if not isinstance(schema, str | dict | bool):
            raise RequestError(f"{param} must be a JSON schema: an object, true, or its text", param=param)
        text = _json_text(schema, param)
        if not text.startswith(("{", "true", "false")):
            raise RequestError(
                f"{param} must be a JSON schema: an object, true or false; its text is another JSON value", param=param
            )
        return cls._sized("json_schema", text, param)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str, *, param: str = "grammar") -> Grammar:
        """Text that the regular expression matches from beginning to end."""
        return cls._source("regex", pattern, param)

    @classmethod
    def ebnf(cls, text: str, *, param: str = "grammar") -> Grammar:
        """Text that a context-free grammar derives: in GBNF (``root ::= ...``) or Lark's form (``start: ...``)."""
        return cls._source("ebnf", text, param)

    @classmethod
    def choice(cls, choices: Sequence[str], *, param: str = "grammar") -> Grammar:
        """One of the strings."""
        choices = [choices] if isinstance(choices, str) else list(choices)
        if not 0 < len(choices) <= MAX_CHOICES or not all(isinstance(c, str) for c in choices) or not any(choices):
            raise RequestError(f"{param} takes 1 to {MAX_CHOICES} strings that are not all empty", param=param)
        return cls._sized("choice", _json_text(list(dict.fromkeys(choices)), param), param)

    @classmethod
    def structural_tag(cls, tag: str | dict[str, Any], *, param: str = "grammar") -> Grammar:
        """Free text with structured parts: the ``{"type": "structural_tag", "format": ...}`` of vLLM, or
        SGLang's older ``structures`` and ``triggers``. Text or a value."""
        if not isinstance(tag, str | dict):
            raise RequestError(f"{param} must be a structural tag: an object or its text", param=param)
        return cls._sized("structural_tag", _json_text(tag, param), param)

    @classmethod
    def _source(cls, kind: str, text: str, param: str) -> Grammar:
        if not isinstance(text, str) or not text:
            raise RequestError(f"{param} must be a non-empty string", param=param)
        return cls._sized(kind, text, param)

    @classmethod
    def _sized(cls, kind: str, text: str, param: str) -> Grammar:
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(f"{param} is not valid Unicode: {error}", param=param) from error
        if size > MAX_GRAMMAR_BYTES:
            raise RequestError(f"{param} has {size} bytes; at most {MAX_GRAMMAR_BYTES} are taken", param=param)
        return cls(kind, text)


def _json_text(value: Any, param: str) -> str:
    """JSON in one canonical spelling, so that equal schemas compare equal. The order of keys is kept: properties must
    be written in it."""
    try:
        parsed = msgspec.json.decode(value) if isinstance(value, str) else value
        return msgspec.json.encode(parsed).decode()
    except (msgspec.DecodeError, UnicodeError, TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{param} is not valid JSON: {error}", param=param) from error


def is_exact(value: Any) -> bool:
    """Whether grammar libraries enforce this value of a schema (a constant, an enumeration, or a bound) exactly:
    numbers to the last digit, strings to the last character."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, list | dict):
            pending.extend(part if isinstance(part, list) else part.values())
        elif (
            (isinstance(part, str) and UNWRITTEN.search(part) is not None)
            or (type(part) in (int, float) and not _is_exact_number(part))
        ):
            return False
    return True


def _is_exact_number(number: float) -> bool:
    if not abs(number) <= MAX_NUMBER:
        return False
    _, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    return int("".join(map(str, digits))) <= MAX_DIGITS and isinstance(exponent, int) and abs(exponent) <= MAX_EXPONENT


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as grammars see it. ``tokens[i]``: the bytes that token i adds to the text (may be empty).
    ``special_ids``: control tokens, which do not match text. ``encode`` tokenizes a text as the model does, for text
    that the grammar forces (jump-forward); without it no text is forced ahead."""

    tokens: list[bytes]
    special_ids: frozenset[int]
    encode: Callable[[str], Sequence[int]] | None = None

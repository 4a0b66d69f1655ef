"""Words of the Lark dialect that grammars are handed to llguidance in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.execution.structured.schema import reword

HEADER = '%llguidance {"no_forcing": true}\n'
"""Text that is forced is not tokenized on every step, at a cost that grows with its length: any tokens may spell it."""

_RESPELLED = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


def quote(text: str) -> str:
    """A constant."""
    return msgspec.json.encode(text).decode()


def slash(pattern: str) -> str:
    """A regular expression between slashes; those in it that are not escaped are."""
    return "/" + re.sub(r"\\.|/|\n", lambda found: _RESPELLED.get(found[0], found[0]), pattern, flags=re.DOTALL) + "/"


def embed_json(schema: Mapping[str, Any] | bool, options: Mapping[str, Any]) -> str:
    """JSON by a schema, checked before."""
    fields = reword(schema) if isinstance(schema, Mapping) else {}
    return "%json " + msgspec.json.encode({**fields, "x-guidance": dict(options)}).decode()

"""`ToolSchemas`: argument names and types of a request's tools, and conversion of values to the declared types.

Needed for formats that write values as bare text (XML, positional Python). It never rejects: a value that fits no
declared type stays a string, so that nothing the model wrote is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.base.grammar import is_exact
from headrace.service.parsing.json_text import LITERALS, copy_json, quote
from headrace.service.parsing.python_text import copy_python
from headrace.service.parsing.reader import read_whole

MAX_DEPTH = 8
"""How far references and alternatives are followed."""
MAX_NESTING = 64
STRING = frozenset({"string"})
_PLAIN_WORDS, _VALUES = ("type", "required"), ("enum", "const")
_MAPS = ("properties", "$defs", "definitions")
_SINGLES = ("items", "additionalProperties")
BOUNDS = {
    "integer": (("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")),
    "number": (("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")),
    "string": (("minLength", "maxLength"),), "array": (("minItems", "maxItems"),),
}
"""``(lower, upper)`` bounds by type, as keywords of JSON schema."""
MAX_BOUNDS = {"integer": 10**9, "number": 10**9, "string": 1000, "array": 64}
"""Bounds beyond these are left out of a loosened schema."""
_TYPE_OF_FIRST = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_TYPE_OF_PYTHON = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"
}


class ToolSchemas:
    """Names, argument names and argument types of tools given as ``(name, JSON schema of the arguments)``."""

    def __init__(self, tools: Iterable[tuple[str, Mapping[str, Any] | None]] = ()):
        self._schemas = {name: schema or {} for name, schema in tools}

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def keys_of(self, name: str) -> list[str]:
        """Names of the tool's arguments in the order of its schema."""
        properties = self._schemas.get(name, {}).get("properties")
        return list(properties) if isinstance(properties, Mapping) else []

    def types_of(self, name: str, key: str) -> frozenset[str]:
        """JSON types that an argument may have; empty when the schema leaves it open."""
        root = self._schemas.get(name, {})
        properties = root.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return frozenset(_types(schema, root, MAX_DEPTH))

    def to_json(self, name: str, key: str, text: str) -> str:
        """A value written as bare text, as JSON of a declared type."""
        return value_as_json(text, self.types_of(name, key))


def value_as_json(text: str, types: frozenset[str]) -> str:
    """The text as JSON of one of ``types``, or as a string when it fits none. An empty set allows every type: the text
    decides by its look."""
    if types == STRING:
        return quote(text)
    bare = text.strip()
    spelled = LITERALS.get(bare.lower(), bare)
    # JSON first; models also write lists and dicts as Python literals, with single quotes.
    for read in (copy_json, copy_python):
        found = read_whole(read, spelled)
        fitting = None if found is None else _fit(found, types)
        if fitting is not None:
            return fitting
    return quote(text)


def _fit(value: str, types: frozenset[str]) -> str | None:
    """A JSON value that is no string, converted to one of the types (an empty set: any); None when it fits none. An
    integer written as a float (``3.0``) becomes an integer."""
    kind = _TYPE_OF_FIRST.get(value[0], "number")
    if kind == "string":
        return None
    if kind != "number":
        return value if not types or kind in types else None
    is_integer = value.lstrip("-").isdigit()
    if not is_integer and not math.isfinite(float(value)):
        return None
    if not types or "number" in types or ("integer" in types and is_integer):
        return value
    if "integer" in types and float(value).is_integer():
        return str(int(float(value)))
    return None


def loosen(schema: Any, depth: int = MAX_NESTING) -> Any:
    """A copy of the schema with only the keywords that every grammar library can enforce, for tools that are not
    ``strict``: what is dropped allows more. Objects whose properties are listed, also as none, get
    ``additionalProperties: false`` unless the schema says otherwise."""
    if not isinstance(schema, Mapping) or depth == 0:
        return {} if schema is not False else False
    kept: dict[str, Any] = {word: schema[word] for word in _PLAIN_WORDS if word in schema}
    kept |= {word: schema[word] for word in _VALUES if word in schema and is_exact(schema[word])}
    kept |= {
        word: {k: loosen(v, depth - 1) for k, v in schema[word].items()}
        for word in _MAPS if isinstance(schema.get(word), Mapping)
    }
    kept |= {word: loosen(schema[word], depth - 1) for word in _SINGLES if isinstance(schema.get(word), Mapping | bool)}
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list) and schema[word]:
            kept["anyOf"] = [loosen(option, depth - 1) for option in schema[word]]
    if not {"enum", "const", "$ref", "anyOf", "oneOf"} & kept.keys():
        kept |= _bounds(schema)
    if str(schema.get("$ref", "")).startswith(("#/$defs/", "#/definitions/")):
        kept["$ref"] = schema["$ref"]
    if kept.get("properties") or _is_empty(schema):
        kept.setdefault("additionalProperties", False)
    return kept


def _is_empty(schema: Mapping[str, Any]) -> bool:
    """Whether an object lists no properties and asks for none, as that of a function without arguments."""
    asked = ("required", "minProperties", "patternProperties")
    return schema.get("properties") == {} and not any(schema.get(word) for word in asked)


def _bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema's bounds on a number, length or count that a grammar can enforce; none when they contradict each other
    or leave nothing between."""
    kind = schema.get("type")
    if not isinstance(kind, str) or kind not in BOUNDS:
        return {}
    pairs, most = BOUNDS[kind], MAX_BOUNDS[kind]
    found = {
        word: schema[word] for pair in pairs for word in pair
        if type(schema.get(word)) in (int, float) and abs(schema[word]) <= most and is_exact(schema[word])
    }
    if kind in ("string", "array") and not all(type(value) is int and value >= 0 for value in found.values()):
        return {}
    # Inclusive and exclusive bounds are compared alike: with a distance of 2, an integer lies between in any case.
    low = max((found[low] for low, _ in pairs if low in found), default=-math.inf)
    high = min((found[high] for _, high in pairs if high in found), default=math.inf)
    return found if low + len(pairs) <= high or (low <= high and len(pairs) == 1) else {}


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return set()
    declared = schema.get("type")
    found = {t for t in (declared if isinstance(declared, list) else [declared]) if isinstance(t, str)}
    if isinstance(schema.get("$ref"), str):
        found |= _types(_resolve(schema["$ref"], root), root, depth - 1)
    for word in ("anyOf", "oneOf", "allOf"):
        options = schema.get(word)
        for option in options if isinstance(options, list) else ():
            found |= _types(option, root, depth - 1)
    if not found:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        found = (
            {_TYPE_OF_PYTHON[type(v)] for v in values if type(v) in _TYPE_OF_PYTHON} if isinstance(values, list)
            else set()
        )
    return found


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """The target of a local reference ``#/a/b``; None for one that leaves the schema."""
    target: Any = root
    for step in reference.removeprefix("#/").split("/"):
        target = target.get(step) if isinstance(target, Mapping) else None
    return target

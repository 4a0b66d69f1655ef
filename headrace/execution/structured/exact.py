"""Which grammars the fast library enforces exactly. Conservative: whatever is not known to be exact is not in here. The
formats around the schemas of a structural tag: ``exact_tags.py``.

It is wrong, silently, about patterns, lengths of strings (an escaped surrogate pair counts twice), allOf, overlapping
oneOf, tuples, names beside ``properties``, and everything that JSON schema calls an assertion across values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.base.grammar import Grammar
from headrace.execution.structured.exact_tags import tag_inexactness
from headrace.execution.structured.schema import MAX_DEPTH

MAX_NODES = 2000
MAX_ITEMS = 64
MAX_ENUM = 512
ANNOTATIONS = frozenset(
    {
        "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "$schema",
        "$comment", "$id"
    }
)
OF_TYPE = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "string": frozenset(), "integer": frozenset(), "number": frozenset(), "boolean": frozenset(), "null": frozenset(),
}


def inexactness(grammar: Grammar) -> str | None:
    """None when the grammar is in the exact part, else what is not."""
    if grammar.kind == "json_object":
        return None
    if grammar.kind == "json_schema":
        return _Reader().read_root(msgspec.json.decode(grammar.text))
    if grammar.kind == "structural_tag":
        return tag_inexactness(msgspec.json.decode(grammar.text), _Reader().read_root)
    return f"a {grammar.kind} is left to the other library"


class _Reader:
    """Walks a schema; the first thing that is not known to be exact ends the walk."""

    def __init__(self) -> None:
        self._num_nodes = 0
        self._defs: Mapping[str, Any] = {}

    def read_root(self, root: Any) -> str | None:
        """The reason against a whole schema."""
        if not isinstance(root, dict):
            return self._read(root, 1)
        self._defs = {
            f"#/{place}/{name}": value for place in ("$defs", "definitions") for name,
            value in dict(root.get(place) or {}).items()
        }
        if any(isinstance(schema, dict) and "$ref" in schema for schema in self._defs.values()):
            return "a '$ref' to another, which may be to itself"
        rest = {name: value for name, value in root.items() if name not in ("$defs", "definitions")}
        for schema in (*self._defs.values(), rest):
            if (reason := self._read(schema, 1)) is not None:
                return reason
        return None

    def _read(self, schema: Any, depth: int) -> str | None:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES or depth > MAX_DEPTH:
            return "a large schema"
        if not isinstance(schema, dict):
            return None if schema is True else "a schema that is no object"
        keys = schema.keys() - ANNOTATIONS
        if not keys:
            return None
        if "$ref" in keys:
            return (
                None if keys == {"$ref"} and schema["$ref"] in self._defs
                else "the keyword '$ref' beside others, or elsewhere"
            )
        if "anyOf" in keys:
            return self._read_any(schema, keys, depth)
        if keys <= {"enum", "const", "type"} and keys & {"enum", "const"}:
            return _read_values(schema, keys)
        return self._read_typed(schema, keys, depth)

    def _read_any(self, schema: dict[str, Any], keys: set[str], depth: int) -> str | None:
        if keys != {"anyOf"} or not isinstance(schema["anyOf"], list) or not schema["anyOf"]:
            return "the keyword 'anyOf' beside others"
        return next(
            (reason for branch in schema["anyOf"] if (reason := self._read(branch, depth + 1)) is not None), None
        )

    def _read_typed(self, schema: dict[str, Any], keys: set[str], depth: int) -> str | None:
        kind = schema.get("type")
        if not isinstance(kind, str) or kind not in OF_TYPE:
            return "a schema without one type"
        strange = keys - OF_TYPE[kind] - {"type"}
        if strange:
            return f"the keyword {min(strange)!r}"
        if kind == "object":
            return self._read_object(schema, depth)
        return self._read_array(schema, depth) if kind == "array" else None

    def _read_object(self, schema: dict[str, Any], depth: int) -> str | None:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        if properties == {} and required == []:
            return None if others is False else self._read(others, depth + 1)
        if not isinstance(properties, dict) or others is not False:
            return "an object with other properties"
        if (
            not isinstance(required, list) or not set(map(str, required)) <= properties.keys()
            or not all(_is_plain(name) for name in properties)
        ):
            return "unusual names of properties"
        return next(
            (reason for value in properties.values() if (reason := self._read(value, depth + 1)) is not None), None
        )

    def _read_array(self, schema: dict[str, Any], depth: int) -> str | None:
        low, high = schema.get("minItems", 0), schema.get("maxItems", 0)
        if (
            type(low) is not int or type(high) is not int or not 0 <= low <= MAX_ITEMS or not 0 <= high <= MAX_ITEMS
            or ("maxItems" in schema and high < max(1, low))
        ):
            return "the keyword 'minItems' or 'maxItems'"
        return self._read(schema.get("items", True), depth + 1)


def _read_values(schema: dict[str, Any], keys: set[str]) -> str | None:
    values = schema["enum"] if "enum" in keys else [schema["const"]]
    if {"enum", "const"} <= keys or not isinstance(values, list) or not 0 < len(values) <= MAX_ENUM:
        return "the keyword 'enum'"
    if "type" in keys and not (schema["type"] == "string" and all(isinstance(value, str) for value in values)):
        return "the keyword 'type' beside 'enum' or 'const'"
    return (
        None
        if all(
            value is None or isinstance(value, bool) or (isinstance(value, str) and _is_plain(value))
            for value in values
        )
        else "the keyword 'enum'"
    )


def _is_plain(text: str) -> bool:
    """Written the same by every JSON encoder."""
    return text.isascii() and text.isprintable() and not set(text) & set('"\\/<>&')

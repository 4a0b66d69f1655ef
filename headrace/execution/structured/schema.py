"""Checks of JSON schemas before they are compiled: size, and keywords that no grammar here can enforce.

What the grammar library refuses by itself is left to it. Refuses: changing what a schema allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.base.errors import RequestError
from headrace.execution.structured.bounds import check_whole

MAX_DEPTH = 64
MAX_NODES = 20_000
MAX_REFERRED_DEPTH = 512
"""Levels of all schemas that others refer to, taken together: libraries follow references by recursion."""
MAX_MULTIPLE = 10_000
"""A multiple is found by an automaton with as many states."""

NOT_ENFORCED = frozenset({
    "uniqueItems", "contains", "minContains", "maxContains", "if", "then", "else", "not", "dependentRequired", "dependentSchemas", "dependencies",
    "propertyNames", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor",
    "disallow", "extends", "$anchor", "divisibleBy", "x-guidance",
})
"""Keywords that restrict values (or change how the library reads the schema) and cannot be enforced token by token."""

_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_DATA = frozenset({"const", "enum", "default", "example", "examples"})
FREE_FORMATS = frozenset({"password", "binary", "path", "file-path", "directory-path"})
"""Formats of strings that any string has (as OpenAPI and pydantic use them): they tell people something."""


def leave_out_free_formats(schema: Any) -> Any:
    """The schema, checked before, without formats that restrict nothing: libraries refuse those that they do not know."""
    if isinstance(schema, list):
        return [leave_out_free_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            kept[name] = {key: leave_out_free_formats(child) for key, child in value.items()}
        elif name in _LISTED or name in _SINGLE or (isinstance(value, dict) and name not in _DATA):
            kept[name] = leave_out_free_formats(value)
        elif not (name == "format" and isinstance(value, str) and value in FREE_FORMATS):
            kept[name] = value
    return kept


def check_schema(schema: Any, param: str) -> None:
    """Raise `RequestError` naming the keyword when a schema holds what cannot be enforced, or is too large."""
    pending, num_nodes, targets = [(schema, 1)], 0, set()
    while pending:
        node, depth = pending.pop()
        num_nodes += 1
        if depth > MAX_DEPTH or num_nodes > MAX_NODES:
            raise RequestError(f"{param}: the schema is too large: at most {MAX_DEPTH} levels and {MAX_NODES} subschemas are taken", param=param)
        if isinstance(node, dict):
            _check_keywords(node, param)
            targets.update(target for target in (node.get("$ref"),) if isinstance(target, str))
            pending.extend((child, depth + 1) for child in _subschemas(node))
    if sum(_measure_depth(_find(schema, target)) for target in targets) > MAX_REFERRED_DEPTH:
        raise RequestError(f"{param}: the keyword '$ref' leads too deep: at most {MAX_REFERRED_DEPTH} levels of schemas may be referred to in all", param=param)


def _find(schema: Any, target: str) -> Any:
    """What a reference within the schema leads to, None for any other."""
    if not target.startswith("#"):
        return None
    for part in filter(None, target[1:].split("/")):
        key = part.replace("~1", "/").replace("~0", "~")
        schema = schema.get(key) if isinstance(schema, dict) else None
    return schema


def _measure_depth(schema: Any) -> int:
    deepest, pending = 0, [(schema, 1)]
    while pending:
        node, depth = pending.pop()
        deepest = max(deepest, depth)
        if isinstance(node, dict):
            pending.extend((child, depth + 1) for child in _subschemas(node))
    return deepest


def _subschemas(node: dict[str, Any]) -> Iterator[Any]:
    for name in _NAMED:
        if isinstance(node.get(name), dict):
            yield from node[name].values()
    for name in _LISTED:
        if isinstance(node.get(name), list):
            yield from node[name]
    for name in _SINGLE:
        value = node.get(name)
        yield from value if isinstance(value, list) else (value,)
    yield from (value for name, value in node.items() if isinstance(value, dict) and name not in _DATA and name not in (*_NAMED, *_SINGLE))


def _check_keywords(node: dict[str, Any], param: str) -> None:
    for name in sorted(NOT_ENFORCED.intersection(node)):
        raise RequestError(f"{param}: the keyword {name!r} cannot be enforced; leave it out and check the output yourself", param=param)
    for pattern in (node.get("pattern"), *(node["patternProperties"] if isinstance(node.get("patternProperties"), dict) else ())):
        if isinstance(pattern, str):
            check_whole(pattern, param)
    multiple = node.get("multipleOf")
    if isinstance(multiple, int | float) and not 0 < multiple <= MAX_MULTIPLE:
        raise RequestError(f"{param}: the keyword 'multipleOf' must be above 0 and at most {MAX_MULTIPLE}, got {multiple}", param=param)
    if _may_repeat_keys(node):
        raise RequestError(
            f"{param}: the keyword 'minProperties' cannot be enforced where other properties are allowed (names could repeat); "
            "set additionalProperties to false or name the properties in 'required'", param=param,
        )


def _may_repeat_keys(node: dict[str, Any]) -> bool:
    """Properties without a name of their own are not told apart, so that counting them can count one twice."""
    least, required = node.get("minProperties", 0), node.get("required", ())
    if not isinstance(least, int | float) or not isinstance(required, list | tuple) or least <= len(set(map(str, required))):
        return False
    return node.get("additionalProperties", True) is not False or bool(node.get("patternProperties"))

"""Checks of JSON schemas before they are compiled: size, and keywords and values that no grammar here can enforce.

What the grammar library refuses by itself is left to it. Refuses: changing what a schema allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from headrace.base.errors import RequestError
from headrace.base.grammar import MAX_NUMBER, is_exact
from headrace.execution.structured.patterns import FORMATS, reword_pattern
from headrace.execution.structured.sources import check_whole

MAX_DEPTH = 64
MAX_NODES = 20_000
MAX_REFERRED_DEPTH = 512
"""Depths of all schemas that ``$ref`` leads to, summed: libraries follow references by recursion, on a finite stack."""
MAX_MULTIPLE = 10_000
"""The largest ``multipleOf``: the grammar for it is an automaton with as many states."""

NOT_ENFORCED = frozenset({
    "uniqueItems", "contains", "minContains", "maxContains", "if", "then", "else", "not", "dependentRequired",
    "dependentSchemas", "dependencies",
    "propertyNames", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$dynamicAnchor", "$recursiveRef",
    "$recursiveAnchor",
    "disallow", "extends", "$anchor", "divisibleBy", "x-guidance",
})
"""Keywords that restrict values (or change how the library reads the schema) and cannot be enforced token by token."""

_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_BOUNDS = _LOWER + _UPPER
_DATA = frozenset({"const", "enum", "default", "example", "examples"})
FREE_FORMATS = frozenset({"password", "binary", "path", "file-path", "directory-path"})
"""String formats that restrict nothing (of OpenAPI and pydantic): they are hints for people."""


def embed_schema(schema: Mapping[str, Any] | bool, options: Mapping[str, Any]) -> str:
    """The right side of a rule in llguidance's dialect of Lark: JSON of a checked schema. ``options`` are set as its
    ``x-guidance``."""
    fields = reword(schema) if isinstance(schema, Mapping) else {}
    return "%json " + msgspec.json.encode({**fields, "x-guidance": dict(options)}).decode()


def reword(schema: Any) -> Any:
    """A checked schema rewritten so that llguidance enforces it exactly: without formats that restrict nothing (it
    refuses those that it does not know), with patterns in its syntax, and with patterns in place of formats that it
    checks too loosely.
    """
    if isinstance(schema, list):
        return [reword(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            kept[name] = {
                reword_pattern(key) if name == "patternProperties" else key: reword(child) for key,
                child in value.items()
            }
        elif name in _LISTED or name in _SINGLE or (isinstance(value, dict) and name not in _DATA):
            kept[name] = reword(value)
        elif name == "pattern" and isinstance(value, str):
            kept[name] = reword_pattern(value)
        elif not (name == "format" and isinstance(value, str) and value in FREE_FORMATS | FORMATS.keys()):
            kept[name] = value
    pattern = FORMATS.get(str(schema.get("format")))
    if pattern is None:
        return kept
    # The format's pattern; a schema has one ``pattern`` only, so a second goes into ``allOf``.
    parts = kept.get("allOf", [])
    return (
        {**kept, "allOf": [*parts, {"pattern": pattern}]} if "pattern" in kept and isinstance(parts, list)
        else {**kept, "pattern": pattern}
    )


def check_schema(schema: Any, param: str) -> None:
    """Raise `RequestError` naming the keyword when a schema holds what cannot be enforced, or is too large."""
    # Iterative: the depth is checked before anything recurses over the schema.
    targets = set[str]()
    pending, num_nodes = [(schema, 1)], 0
    while pending:
        node, depth = pending.pop()
        num_nodes += 1
        if depth > MAX_DEPTH or num_nodes > MAX_NODES:
            raise RequestError(
                f"{param}: the schema is too large: at most {MAX_DEPTH} levels and {MAX_NODES} subschemas are taken",
                param=param
            )
        if isinstance(node, dict):
            _check_keywords(node, param)
            _check_values(node, param)
            targets.update(target for target in (node.get("$ref"),) if isinstance(target, str))
            pending.extend((child, depth + 1) for child in _subschemas(node))
    # After the loop: the size is bounded now, and so is the cost of following references.
    for target in targets:
        _check_end(schema, target, param)
    if sum(_measure_depth(_find(schema, target)) for target in targets) > MAX_REFERRED_DEPTH:
        raise RequestError(
            f"{param}: the keyword '$ref' leads too deep: at most {MAX_REFERRED_DEPTH} levels of schemas may be "
            "referred to in all",
            param=param
        )


def _find(schema: Any, target: str) -> Any:
    """The node that a JSON pointer (RFC 6901) within the schema leads to; None if there is none."""
    if not target.startswith("#"):
        return None
    for part in filter(None, target[1:].split("/")):
        key = part.replace("~1", "/").replace("~0", "~")
        schema = schema.get(key) if isinstance(schema, dict) else None
    return schema


def _check_end(schema: Any, target: str, param: str) -> None:
    """Raise `RequestError` for a chain of references that leads back to itself."""
    passed, found = {target}, _find(schema, target)
    while isinstance(found, dict) and isinstance(following := found.get("$ref"), str):
        if following in passed:
            raise RequestError(f"{param}: the keyword '$ref' leads back to itself: {following[:80]!r}", param=param)
        passed.add(following)
        found = _find(schema, following)


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
        if name in node:
            yield from node[name] if isinstance(node[name], list) else (node[name],)
    yield from (
        value for name,
        value in node.items() if isinstance(value, dict) and name not in _DATA and name not in (*_NAMED, *_SINGLE)
    )


def _check_keywords(node: dict[str, Any], param: str) -> None:
    for name in sorted(NOT_ENFORCED.intersection(node)):
        raise RequestError(
            f"{param}: the keyword {name!r} cannot be enforced; leave it out and check the output yourself", param=param
        )
    for pattern in (
        node.get("pattern"), *(node["patternProperties"] if isinstance(node.get("patternProperties"), dict) else ())
    ):
        if isinstance(pattern, str):
            check_whole(pattern, param)
    multiple = node.get("multipleOf")
    if isinstance(multiple, int | float) and not 0 < multiple <= MAX_MULTIPLE:
        raise RequestError(
            f"{param}: the keyword 'multipleOf' must be above 0 and at most {MAX_MULTIPLE}, got {multiple}", param=param
        )
    if _may_repeat_keys(node):
        raise RequestError(
            f"{param}: the keyword 'minProperties' cannot be enforced where other properties are allowed (names could "
            "repeat); "
            "set additionalProperties to false or name the properties in 'required'", param=param,
        )


def _may_repeat_keys(node: dict[str, Any]) -> bool:
    """Whether ``minProperties`` could be satisfied by one name twice: the library does not tell names apart that the
    schema does not list."""
    least, required = node.get("minProperties", 0), node.get("required", ())
    if (
        not isinstance(least, int | float) or not isinstance(required, list | tuple)
        or least <= len(set(map(str, required)))
    ):
        return False
    return node.get("additionalProperties", True) is not False or bool(node.get("patternProperties"))


def _check_values(node: dict[str, Any], param: str) -> None:
    """Raise `RequestError` for numbers and strings that the grammar could not represent exactly."""
    for name in ("const", "enum", *_BOUNDS, "multipleOf"):
        value = node.get(name)
        if (
            name in node and not is_exact(value)
            and not (name in _UPPER and isinstance(value, int | float) and value >= MAX_NUMBER)
        ):
            raise RequestError(
                f"{param}: the keyword {name!r} cannot be enforced to the letter: numbers can have up to 15 digits "
                "(longer ones can be strings), strings no control characters but those that JSON has short escapes "
                f"for; got {str(value)[:80]}", param=param,
            )
    bounds = [list(_read_bounds(node, names)) for names in (_LOWER, _UPPER)]
    if any(
        _lets_bound_through(lower, upper) or _lets_bound_through((-upper[0], upper[1]), (-lower[0], lower[1]))
        for lower in bounds[0]
        for upper in bounds[1]
    ):
        raise RequestError(
            f"{param}: the keyword '{_LOWER[1]}' or '{_UPPER[1]}' cannot be enforced where it is a whole number, and "
            "the other bound less than one away; take another bound", param=param,
        )


def _read_bounds(node: dict[str, Any], names: tuple[str, ...]) -> Iterator[tuple[float, bool]]:
    """The bounds ``(number, whether it is excluded)`` that a schema has by itself or by ``allOf``."""
    is_older = node.get(names[1]) is True  # draft 4
    yield from ((node[name], is_older or name == names[1]) for name in names if type(node.get(name)) in (int, float))
    branches = node.get("allOf")
    for branch in branches if isinstance(branches, list) else ():
        if isinstance(branch, dict):
            yield from _read_bounds(branch, names)


def _lets_bound_through(lower: tuple[float, bool], upper: tuple[float, bool]) -> bool:
    """Whether llguidance would let an excluded bound through: it takes 1 as a number above 1 and at most 1.5."""
    (least, is_excluded), (most, _) = lower, upper
    return is_excluded and least >= 0 and least == int(least) and least < most < least + 1

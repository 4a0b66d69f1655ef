"""What a JSON schema allows, as far as `json_automaton` needs it: `read_schema`. It is conservative, as merged states
would share bitmasks: schemas in which more matters than an automaton remembers are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.execution.structured.lazy_dfa import NotReadError
from headrace.execution.structured.regex_automaton import RegexAutomaton

ANNOTATIONS = frozenset({
    "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "$schema",
    "$comment", "$id",
})
SCALARS = {
    "string": frozenset({"pattern", "minLength", "maxLength", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format"}),
}
KNOWN = frozenset({
    "type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "enum", "const",
}).union(*SCALARS.values())
MAX_LENGTH = 4096
"""The largest minLength or maxLength that is counted."""


@dataclass(eq=False, slots=True)
class StringSpec:
    """A string. ``is_free``: its content never matters. Else a configuration has its text so far or, with ``limits``,
    its length and its configuration in ``pattern``. ``limits``: minLength and maxLength, 0 for no limit."""

    is_free: bool
    pattern: RegexAutomaton | None = None
    limits: tuple[int, int] | None = None


@dataclass(eq=False, slots=True)
class NumberSpec:
    """A number. ``is_free``: any number, or any integer; else its digits so far matter."""

    is_free: bool


@dataclass(eq=False, slots=True)
class ObjectSpec:
    """An object: the values of listed properties, and of all others (None: none are allowed)."""

    named: dict[str, ValueSpec] = field(default_factory=dict)
    others: ValueSpec | None = None


@dataclass(eq=False, slots=True)
class ArraySpec:
    """An array. ``bounds``: minItems and maxItems, the numbers of items at which bitmasks change."""

    items: ValueSpec
    bounds: frozenset[int] = frozenset()


@dataclass(eq=False, slots=True)
class ValueSpec:
    """The kinds that a value may be of; its first character tells which. Literals are true, false and null."""

    object: ObjectSpec | None = None
    array: ArraySpec | None = None
    string: StringSpec | None = None
    number: NumberSpec | None = None
    has_literals: bool = False


def read_schema(schema: Any) -> ValueSpec:
    """What a schema allows, as far as `JsonAutomaton` needs it; raises `NotReadError` for other keywords or forms."""
    return _SchemaReader(schema).read(schema)


class _SchemaReader:
    def __init__(self, root: Any):
        self._root = root
        # By identity: the same subschema, reached twice or by recursion, is one value.
        self._values: dict[int, ValueSpec] = {}

    def read(self, schema: Any) -> ValueSpec:
        value = self._values.get(id(schema))
        if value is None:
            value = self._values[id(schema)] = ValueSpec()  # first: a schema may hold itself
            self._add(value, schema)
        return value

    def _add(self, value: ValueSpec, schema: Any) -> None:
        """Add what a schema allows to a value: branches of ``anyOf`` are merged into one `ValueSpec`."""
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise NotReadError
        keys = schema.keys() - ANNOTATIONS - {"$defs", "definitions"}
        if keys & {"$ref", "anyOf", "oneOf"}:
            if len(keys) > 1:
                raise NotReadError
            for branch in [self._resolve(schema["$ref"])] if "$ref" in keys else schema[keys.pop()]:
                self._add(value, branch)
        elif not keys <= KNOWN:
            raise NotReadError
        elif keys & {"enum", "const"}:
            _add_constants(value, schema["enum"] if "enum" in keys else [schema["const"]])
        else:
            types = schema.get("type", ["object", "array", "string", "number", "boolean", "null"])
            for kind in [types] if isinstance(types, str) else types:
                self._add_type(value, kind, schema)

    def _resolve(self, name: Any) -> Any:
        _, *path = name.split("/") if isinstance(name, str) else ("",)
        node = self._root
        for part in path:
            if not isinstance(node, Mapping) or part not in node:
                raise NotReadError
            node = node[part]
        if not path or path[0] not in ("$defs", "definitions") or node is self._root:
            raise NotReadError
        return node

    def _add_type(self, value: ValueSpec, kind: Any, schema: dict[str, Any]) -> None:
        match kind:
            case "object":
                _require_new(value.object)
                spec = value.object = ObjectSpec()
                spec.named = {name: self.read(child) for name, child in schema.get("properties", {}).items()}
                others = schema.get("additionalProperties", True)
                spec.others = None if others is False else self.read(others)
            case "array":
                _require_new(value.array)
                bounds = [schema[name] for name in ("minItems", "maxItems") if name in schema]
                items = schema.get("items", True)
                if not all(type(bound) is int for bound in bounds) or not isinstance(items, bool | dict):
                    raise NotReadError
                value.array = ArraySpec(self.read(items), frozenset(bounds))
            case "string":
                _require_new(value.string)
                value.string = _read_string(schema)
            case "integer" | "number":
                _require_new(value.number)
                value.number = NumberSpec(is_free=not schema.keys() & SCALARS["number"])
            case "boolean" | "null":
                value.has_literals = True
            case _:
                raise NotReadError


def _require_new(spec: object) -> None:
    """Refuse two branches of one kind: the first character of a value would not tell which it is in."""
    if spec is not None:
        raise NotReadError


def _add_constants(value: ValueSpec, constants: list[Any]) -> None:
    kinds = {type(constant) for constant in constants}
    if not kinds <= {str, int, float, bool, type(None)}:
        raise NotReadError
    if str in kinds:
        _require_new(value.string)
        value.string = StringSpec(is_free=False)
    if kinds & {int, float}:
        _require_new(value.number)
        value.number = NumberSpec(is_free=False)
    value.has_literals |= bool(kinds & {bool, type(None)})


def _read_string(schema: dict[str, Any]) -> StringSpec:
    keys = schema.keys() & SCALARS["string"]
    if not keys:
        return StringSpec(is_free=True)
    least, most = schema.get("minLength", 0), schema.get("maxLength", 0)
    if type(least) is not int or type(most) is not int or not 0 <= least <= MAX_LENGTH or not 0 <= most <= MAX_LENGTH:
        return StringSpec(is_free=False)
    if "format" in keys:
        return StringSpec(is_free=False)
    pattern = None
    if "pattern" in keys and (pattern := _read_pattern(schema["pattern"])) is None:
        return StringSpec(is_free=False)
    return StringSpec(is_free=False, pattern=pattern, limits=(least, most))


def _read_pattern(pattern: Any) -> RegexAutomaton | None:
    """The automaton of a pattern anchored at both ends; None for any other, also for one whose anchors belong to one
    alternative (``^a|b$``)."""
    if not isinstance(pattern, str) or not (pattern.startswith("^") and pattern.endswith("$")):
        return None
    if pattern.endswith("\\$") or ("|" in pattern and not _is_nested(pattern[1:-1])):
        return None
    try:
        return RegexAutomaton(pattern[1:-1])
    except NotReadError:
        return None


def _is_nested(pattern: str) -> bool:
    """Whether every ``|`` is within parentheses."""
    depth, is_escaped, is_class = 0, False, False
    for character in pattern:
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif is_class:
            is_class = character != "]"
        elif character == "[":
            is_class = True
        elif character == "|" and depth == 0:
            return False
        else:
            depth += (character == "(") - (character == ")")
    return True

"""What JSON a schema allows where, read as far as `JsonAutomaton` needs it. Conservative: schemas that say more are not
read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.execution.structured.exact import ANNOTATIONS
from headrace.execution.structured.reach import Reach
from headrace.execution.structured.regex_states import RegexAutomaton, read_regex

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
SCALARS = {
    "string": frozenset({"pattern", "minLength", "maxLength", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format"}),
}
KNOWN = frozenset(
    {"type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "enum", "const"}
).union(*SCALARS.values())
MAX_LENGTH = 4096
"""Of strings whose characters are counted one by one."""


class NotReadError(Exception):
    """The schema holds something beyond the part that is read."""


@dataclass(eq=False, slots=True)
class Text:
    """A string. ``is_free``: whatever it holds, the same may follow. Else what is written of it tells, or its length
    and where it stands in ``pattern``; ``limits`` are the least and the greatest length that mean anything."""

    is_free: bool
    pattern: RegexAutomaton | None = None
    limits: tuple[int, int] | None = None


@dataclass(eq=False, slots=True)
class Number:
    """A number. ``is_free``: any that JSON can write, or any integer."""

    is_free: bool


@dataclass(eq=False, slots=True)
class Place:
    """What may stand in a place, by what it begins with: an object, an array, a string, a number, or a word (`null`,
    and the like)."""

    record: Record | None = None
    listing: Listing | None = None
    text: Text | None = None
    number: Number | None = None
    has_words: bool = False


@dataclass(eq=False, slots=True)
class Record:
    """An object: the places of the properties that have names, and of ``others``."""

    named: dict[str, Place] = field(default_factory=dict)
    others: Place | None = None


@dataclass(eq=False, slots=True)
class Listing:
    """An array. ``bounds``: numbers of items at which something changes."""

    items: Place
    bounds: frozenset[int] = frozenset()


def read_place(schema: Any, reach: Reach) -> Place:
    """The place of a whole output; raises `NotReadError`."""
    return _Reader(schema, reach).read(schema)


class _Reader:
    def __init__(self, root: Any, reach: Reach):
        self._root, self._reach = root, reach
        self._known: dict[int, Place] = {}

    def read(self, schema: Any) -> Place:
        known = self._known.get(id(schema))
        if known is None:
            known = self._known[id(schema)] = Place()  # first: a schema may hold itself
            self._add(known, schema)
        return known

    def _add(self, place: Place, schema: Any) -> None:
        """Let a schema be one of what may stand in a place."""
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise NotReadError
        keys = schema.keys() - ANNOTATIONS - {"$defs", "definitions"}
        if keys & {"$ref", "anyOf", "oneOf"}:
            if len(keys) > 1:
                raise NotReadError
            for branch in [self._refer(schema["$ref"])] if "$ref" in keys else schema[keys.pop()]:
                self._add(place, branch)
            return
        if not keys <= KNOWN:
            raise NotReadError
        if keys & {"enum", "const"}:
            self._add_values(place, schema["enum"] if "enum" in keys else [schema["const"]])
            return
        types = schema.get("type", ["object", "array", "string", "number", "boolean", "null"])
        for kind in [types] if isinstance(types, str) else types:
            self._add_type(place, kind, schema)

    def _refer(self, name: Any) -> Any:
        _, *path = name.split("/") if isinstance(name, str) else ("",)
        node = self._root
        for part in path:
            if not isinstance(node, Mapping) or part not in node:
                raise NotReadError
            node = node[part]
        if not path or path[0] not in ("$defs", "definitions") or node is self._root:
            raise NotReadError
        return node

    def _add_values(self, place: Place, values: list[Any]) -> None:
        kinds = {type(value) for value in values}
        if str in kinds:
            _fill(place, "text", Text(is_free=False))
        if kinds & {int, float}:
            _fill(place, "number", Number(is_free=False))
        if kinds & {bool, type(None)}:
            self._add_words(place)
        if not kinds <= {str, int, float, bool, type(None)}:
            raise NotReadError

    def _add_type(self, place: Place, kind: Any, schema: dict[str, Any]) -> None:
        match kind:
            case "object":
                record = Record()
                _fill(place, "record", record)
                record.named = {name: self.read(value) for name, value in schema.get("properties", {}).items()}
                others = schema.get("additionalProperties", True)
                record.others = None if others is False else self.read(others)
            case "array":
                bounds = [schema[name] for name in ("minItems", "maxItems") if name in schema]
                if (
                    not all(type(bound) is int for bound in bounds)
                    or not isinstance(schema.get("items", True), bool | dict)
                ):
                    raise NotReadError
                items = self.read(schema.get("items", True))
                _fill(place, "listing", Listing(items, frozenset(bounds)))
            case "string":
                _fill(place, "text", _read_text(schema, self._reach))
            case "integer" | "number":
                _fill(place, "number", Number(is_free=not schema.keys() & SCALARS["number"]))
            case "boolean" | "null":
                self._add_words(place)
            case _:
                raise NotReadError

    def _add_words(self, place: Place) -> None:
        place.has_words = True  # they are told apart by what is written of them


def _fill(place: Place, name: str, value: Any) -> None:
    """What a value begins with must tell which branch it is in."""
    if getattr(place, name) is not None:
        raise NotReadError
    setattr(place, name, value)


def _read_text(schema: dict[str, Any], reach: Reach) -> Text:
    keys = schema.keys() & SCALARS["string"]
    if not keys:
        return Text(is_free=True)
    pattern = None
    if "format" in keys:
        return Text(is_free=False)
    if "pattern" in keys:
        pattern = _read_pattern(schema["pattern"], reach)
        if pattern is None:
            return Text(is_free=False)
    least, most = schema.get("minLength", 0), schema.get("maxLength", 0)
    if type(least) is not int or type(most) is not int or not 0 <= least <= MAX_LENGTH or not 0 <= most <= MAX_LENGTH:
        return Text(is_free=False)
    return Text(is_free=False, pattern=pattern, limits=(least, most) if keys & {"minLength", "maxLength"} else (0, 0))


def _read_pattern(pattern: Any, reach: Reach) -> RegexAutomaton | None:
    """Of an expression for a whole string. Anchors that bind one branch of it alone are not read."""
    if (
        not isinstance(pattern, str) or not pattern.startswith("^") or not pattern.endswith("$")
        or pattern.endswith("\\$")
    ):
        return None
    return None if "|" in pattern and not _is_bound(pattern[1:-1]) else read_regex(pattern[1:-1], reach, is_quoted=True)


def _is_bound(pattern: str) -> bool:
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

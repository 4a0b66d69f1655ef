"""Fields of a body that its record does not have: dropped if they request nothing (`is_neutral`), refused by name, or
dropped and listed for servers that are lenient."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
from msgspec import inspect

from headrace.base.errors import RequestError, UnsupportedFeature
from headrace.base.option import suggest
from headrace.serving.http.protocol.fields import DEFERRED
from headrace.serving.http.protocol.neutral import is_neutral


def names_of(record: type[msgspec.Struct]) -> frozenset[str]:
    """The names of a record's fields, as bodies have them."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(record))


def drop_fields(
    document: dict[str, Any], known: frozenset[str], ignored: list[str] | None, *, within: str = ""
) -> None:
    """Delete the fields that are not ``known``. Raises `UnsupportedFeature` for those of unsupported features, and
    `RequestError` for unknown ones unless there is a list ``ignored``, which then gets their names."""
    # a copy of the names: fields are deleted in the loop
    for name in [n for n in document if n not in known]:
        value = document[name]
        if not is_neutral(name, value):
            if name in DEFERRED:
                raise UnsupportedFeature(f"{within}{name} is not supported: {DEFERRED[name]}", param=within + name)
            if ignored is None:
                shown = within + name[:64]
                raise RequestError(f"unknown field {shown!r}{suggest(name, known)}", param=shown)
            ignored.append(within + name)
        del document[name]


def drop_inner_fields(document: dict[str, Any], record: type[msgspec.Struct], ignored: list[str] | None) -> None:
    """Delete the unknown fields of the objects inside a body, and add the names of those that request something to
    ``ignored``, once for all elements of a list. Without a list these stay, and decoding refuses them."""
    found: dict[str, None] = {}
    for name, kind in _field_types(record).items():
        _drop_within(document.get(name), kind, name, None if ignored is None else found)
    if ignored is not None:
        ignored += found


@lru_cache(maxsize=64)  # one for each route
def _field_types(record: type[msgspec.Struct]) -> dict[str, inspect.Type]:
    described = inspect.type_info(record)
    assert isinstance(described, inspect.StructType)
    return {field.encode_name: field.type for field in described.fields}


def _drop_within(value: Any, kind: inspect.Type, where: str, found: dict[str, None] | None) -> None:
    """The depth is that of the type, whatever the client sends."""
    kinds = alternatives([kind])
    if isinstance(value, list):
        for item_type in [each.item_type for each in kinds if isinstance(each, inspect.ListType)]:
            for item in value:
                _drop_within(item, item_type, where, found)
    if not isinstance(value, dict):
        return
    records = [each for each in kinds if isinstance(each, inspect.StructType)]
    if len(records) > 1:  # told apart by their tags
        records = [each for each in records if value.get(each.tag_field) == each.tag]
    for one in records:
        types = {field.encode_name: field.type for field in one.fields}
        if one.forbid_unknown_fields:
            for name in [n for n in value if n not in types and n != one.tag_field]:
                if not is_neutral(name, value[name]):
                    if found is None:
                        continue
                    found[f"{where}.{name}"] = None
                del value[name]
        for name, inner in types.items():
            _drop_within(value.get(name), inner, f"{where}.{name}", found)


def alternatives(types: list[inspect.Type]) -> list[inspect.Type]:
    """The types, those of unions one by one."""
    return [part for found in types for part in (found.types if isinstance(found, inspect.UnionType) else (found,))]

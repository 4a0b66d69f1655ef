"""Which structural tags the fast library enforces exactly, and their wording for it.

Left out: regular expressions, schemas that it is not exact for, and tags of which one must come (it wants it at once).
Special tokens in a tag's text are looked for where the vocabulary is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from headrace.execution.structured.structural_tag import MAX_DEPTH, is_open, modernise

MAX_TAGS = 128
FIELDS = {
    "const_string": {"value"}, "json_schema": {"json_schema"}, "any_text": set(), "sequence": {"elements"},
    "or": {"elements"}, "optional": {"content"},
    "plus": {"content"}, "star": {"content"}, "tag": {"begin", "content", "end"},
    "triggered_tags": {"triggers", "tags"},
    "tags_with_separator": {"tags", "separator"},
}
OPTIONAL = {
    "triggered_tags": {"stop_after_first"}, "tags_with_separator": {"stop_after_first", "at_least_one"},
    "json_schema": {"style"}
}

ReadSchema = Callable[[Any], str | None]
"""What is not known to be exact in a JSON schema, or None."""


def tag_inexactness(tag: Any, read_schema: ReadSchema) -> str | None:
    """None when a structural tag is in the exact part, else what is not. What is wrong with a tag is for the other
    library to say."""
    if isinstance(tag, dict) and tag.keys() <= {"structures", "triggers", "type"} >= {"type"} and "structures" in tag:
        if (
            not isinstance(tag["structures"], list)
            or not all(isinstance(s, dict) and s.keys() == {"begin", "schema", "end"} for s in tag["structures"])
        ):
            return "an unusual structure"
        tag = modernise(tag)
    if not isinstance(tag, dict) or tag.keys() != {"type", "format"} or tag["type"] != "structural_tag":
        return "an unusual structural tag"
    return _Reader(read_schema).read(tag["format"], 1)


class _Reader:
    """Walks a tree of formats; the first that is not known to be exact ends the walk."""

    def __init__(self, read_schema: ReadSchema):
        self._read_schema = read_schema
        self._num_tags = 0

    def read(self, node: Any, depth: int, *, is_last: bool = True) -> str | None:
        """The reason against a format. ``is_last``: nothing comes after it, so that it may end in free text."""
        kind = node.get("type") if isinstance(node, dict) else None
        if depth > MAX_DEPTH or not isinstance(kind, str) or kind not in FIELDS:
            return f"the format {str(kind)[:40]!r}"
        keys = node.keys() - {"type"}
        if not FIELDS[kind] <= keys or keys - FIELDS[kind] - OPTIONAL.get(kind, set()):
            return f"an unusual {kind}"
        if is_open(node) and not is_last:
            return "free text that does not come last"
        match kind:
            case "const_string":
                return None if isinstance(node["value"], str) else "a const_string"
            case "json_schema":
                return (
                    self._read_schema(node["json_schema"]) if node.get("style", "json") == "json" else "a style of JSON"
                )
            case "sequence" | "or":
                return self._read_elements(node["elements"], depth, is_sequence=kind == "sequence", is_last=is_last)
            case "optional" | "plus" | "star":
                return self.read(node["content"], depth + 1, is_last=kind == "optional" and is_last)
            case "tag":
                return self._read_tag(node, depth, is_last=is_last)
            case "triggered_tags" | "tags_with_separator":
                return self._read_tags(node, depth, is_last=is_last)
        return None

    def _read_elements(self, elements: Any, depth: int, *, is_sequence: bool, is_last: bool) -> str | None:
        if not isinstance(elements, list) or not elements:
            return "an empty sequence"
        may_be_open = [is_last and (not is_sequence or place == len(elements) - 1) for place in range(len(elements))]
        return next(
            (
                r for e,
                may in zip(elements, may_be_open, strict=True)
                if (r := self.read(e, depth + 1, is_last=may)) is not None
            ),
            None
        )

    def _read_tag(self, tag: Any, depth: int, *, is_last: bool) -> str | None:
        self._num_tags += 1
        if (
            self._num_tags > MAX_TAGS or not isinstance(tag, dict) or tag.keys() - {"type"} != FIELDS["tag"]
            or tag.get("type", "tag") != "tag"
        ):
            return "an unusual tag"
        ends = tag["end"] if isinstance(tag["end"], list) else [tag["end"]]
        if not isinstance(tag["begin"], str) or not ends or not all(isinstance(end, str) for end in ends):
            return "an unusual tag"
        content = tag["content"]
        if isinstance(content, dict) and content == {"type": "any_text"}:
            return None if all(ends) else "free text without an end"
        return self.read(content, depth + 1, is_last=is_last and not any(ends))

    def _read_tags(self, node: dict[str, Any], depth: int, *, is_last: bool) -> str | None:
        is_triggered = node["type"] == "triggered_tags"
        triggers = node["triggers"] if is_triggered else [node["separator"]]
        if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
            return "an unusual trigger or separator"
        if (
            not isinstance(node["tags"], list) or not node["tags"]
            or not all(type(node.get(name, False)) is bool for name in OPTIONAL[node["type"]])
        ):
            return "unusual tags"
        for tag in node["tags"]:
            if (
                reason := self._read_tag(tag, depth + 1, is_last=is_last and bool(node.get("stop_after_first")))
            ) is not None:
                return reason
            if is_triggered and sum(tag["begin"].startswith(trigger) for trigger in triggers) != 1:
                return "a tag without a trigger of its own"
        return None


def word_tag(tag: dict[str, Any], json_options: Mapping[str, Any]) -> dict[str, Any]:
    """A tag in the exact part as the fast library takes it, ``json_options`` added to every JSON schema."""
    return _word(modernise(tag), json_options)


def _word(node: Any, json_options: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [_word(child, json_options) for child in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": node["json_schema"], **json_options}
    return {name: _word(value, json_options) for name, value in node.items()}


def texts_of(tag: Any) -> Iterator[str]:
    """The texts written out in a tag, those in its schemas excepted."""
    if isinstance(tag, str):
        yield tag
    elif isinstance(tag, list):
        for child in tag:
            yield from texts_of(child)
    elif isinstance(tag, dict):
        for name, value in tag.items():
            if name not in ("type", "json_schema", "schema"):
                yield from texts_of(value)

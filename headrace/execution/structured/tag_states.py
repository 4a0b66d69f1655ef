"""`TagAutomaton`: where an output stands in free text with tags in it, each around the JSON of a schema: tool calls as
they are written. Refuses: other formats, and texts of which one could be taken for another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.execution.structured.json_states import JsonAutomaton, follow_text
from headrace.execution.structured.json_values import NotReadError, read_place
from headrace.execution.structured.reach import Reach

MAX_TAGS = 64
PARTS = {"type", "begin", "content", "end"}

Inside = tuple[str, int, Any]
"""The phase, the tag, and what is written: of a trigger or a character (``text``), of a beginning, or of an end; or
where the JSON stands."""


@dataclass(frozen=True, slots=True)
class Tag:
    """One of the tags. ``json`` reads what is between ``begin`` and ``end``."""

    begin: bytes
    json: JsonAutomaton
    end: bytes


class TagAutomaton:
    """An `Automaton`. ``triggers``: after one of them a tag must follow that begins with it."""

    start: Inside = ("text", -1, b"")
    classes = None

    def __init__(self, triggers: list[bytes], tags: list[Tag]):
        self._triggers, self._tags = triggers, tags

    def advance(self, inside: Inside, byte: int) -> Inside | None:
        """See `Automaton`."""
        phase, place, written = inside
        if phase == "text":
            return self._write_text(written, byte)
        if phase == "begin":
            return self._begin(written + bytes([byte]))
        tag = self._tags[place]
        if phase == "json":
            within, part, _ = written
            if within is not None or part != "next" or byte != tag.end[0]:
                after = tag.json.advance(written, byte)
                return None if after is None else ("json", place, after)
            written = b""
        return self._end(place, tag, written + bytes([byte]))

    def summarise(self, inside: Inside) -> Inside:
        """See `Automaton`."""
        phase, place, written = inside
        return (phase, place, self._tags[place].json.summarise(written)) if phase == "json" else inside

    def weigh(self, inside: Inside) -> int:
        """See `Automaton`."""
        return 12

    def _write_text(self, written: bytes, byte: int) -> Inside | None:
        if byte > 127 or written[:1] > b"\x7f":
            after = follow_text(written if written[:1] > b"\x7f" else b"", byte)
            return None if after is None else ("text", -1, after)
        written += bytes([byte])
        while written and not any(trigger.startswith(written) for trigger in self._triggers):
            written = written[1:]
        return self._begin(written) if written in self._triggers else ("text", -1, written)

    def _begin(self, written: bytes) -> Inside | None:
        for place, tag in enumerate(self._tags):
            if tag.begin == written:
                return "json", place, tag.json.start
        return ("begin", -1, written) if any(tag.begin.startswith(written) for tag in self._tags) else None

    def _end(self, place: int, tag: Tag, written: bytes) -> Inside | None:
        if written == tag.end:
            return self.start
        return ("end", place, written) if tag.end.startswith(written) else None


def read_tags(format_: Any, reach: Reach, count: Callable[[bytes, int], bytes]) -> TagAutomaton:
    """The automaton of a format; raises `NotReadError`. ``count``: see `JsonAutomaton`."""
    if (
        not isinstance(format_, dict) or format_.keys() != {"type", "triggers", "tags"}
        or format_["type"] != "triggered_tags"
    ):
        raise NotReadError
    triggers = [_read_ascii(trigger) for trigger in format_["triggers"]]
    tags = [_read_tag(tag, reach, count) for tag in format_["tags"]]
    begins = [tag.begin for tag in tags]
    if len(tags) > MAX_TAGS or _overlap(triggers, in_any=True) or _overlap(begins, in_any=False):
        raise NotReadError
    return TagAutomaton(triggers, tags)


def _read_tag(tag: Any, reach: Reach, count: Callable[[bytes, int], bytes]) -> Tag:
    if not isinstance(tag, dict) or tag.keys() | {"type"} != PARTS or tag.get("type", "tag") != "tag":
        raise NotReadError
    content = tag["content"]
    if not isinstance(content, dict) or content.keys() != {"type", "json_schema"} or content["type"] != "json_schema":
        raise NotReadError
    begin, end, place = _read_ascii(tag["begin"]), _read_ascii(tag["end"]), read_place(content["json_schema"], reach)
    if place.number is not None or end[:1].isspace():  # what ends a number may be the end
        raise NotReadError
    return Tag(begin, JsonAutomaton(place, reach, count), end)


def _read_ascii(text: Any) -> bytes:
    if not isinstance(text, str) or not text or not text.isascii():
        raise NotReadError
    return text.encode()


def _overlap(texts: list[bytes], *, in_any: bool) -> bool:
    """Whether one begins another, or is anywhere in it."""
    pairs = [(one, other) for i, one in enumerate(texts) for j, other in enumerate(texts) if i != j]
    return any(one in other if in_any else other.startswith(one) for one, other in pairs)

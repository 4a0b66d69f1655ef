"""Structural tags to a Lark grammar: free text with structured parts in it, as tool calls are written.

Accepts the tree of formats that vLLM takes (``{"type": "structural_tag", "format": ...}``) and SGLang's older
``structures`` and ``triggers``. Refuses unknown formats and fields. Embedded JSON schemas are checked as any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from headrace.base.errors import RequestError
from headrace.execution.structured.embedding import embed_lark
from headrace.execution.structured.schema import check_schema, embed_schema
from headrace.execution.structured.sources import check_regex, check_whole, quote, slash

PARAM = "structural_tag"
MAX_DEPTH = 32
OPEN_END = (
    "free text (any_text, triggered_tags) must come last, or be any_text as the content of a tag: otherwise its end is "
    "unknown"
)
ANY_TEXT = r"/(.|\n)*/"
"""Matches no special tokens: those are no text to llguidance."""


def to_lark(tag: Any, json_options: Mapping[str, Any], special_ids: Mapping[str, int]) -> str:
    """The grammar. ``special_ids`` maps the text of special tokens to their ids: written out in a tag, they mean the
    token. ``json_options`` are set for every JSON schema. Raises `RequestError`."""
    if not isinstance(tag, dict):
        raise _wrong("it must be an object")
    tag = modernise(tag)
    _check_keys(tag, {"type", "format"}, optional=())
    if tag["type"] != "structural_tag":
        raise _wrong(f"type must be 'structural_tag', got {tag['type']!r}")
    writer = _LarkWriter(json_options, special_ids)
    start = writer.write(tag["format"])
    return "\n".join([f"start: {start}", *writer.rules])


def modernise(tag: dict[str, Any]) -> dict[str, Any]:
    """The newer form of a tag in either form; one with ``structures`` is in the older. Raises `RequestError`."""
    if "structures" not in tag:
        return tag
    _check_keys(tag, {"structures", "triggers"}, optional=("type",))
    tags = []
    for structure in _list(tag, "structures"):
        _check_keys(structure, {"begin", "end"}, optional=("schema",))
        content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
        tags.append({"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]})
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}}


class _LarkWriter:
    """Turns formats into Lark expressions; what needs a rule or terminal of its own is added to ``rules``."""

    def __init__(self, json_options: Mapping[str, Any], special_ids: Mapping[str, int]):
        self.rules: list[str] = []
        self._json_options = dict(json_options)
        self._special_ids = special_ids
        texts = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._depth = 0
        self._writers: dict[str, Callable[[dict[str, Any]], str]] = {
            "const_string": self._const_string, "json_schema": self._json_schema, "regex": self._regex,
            "any_text": self._any_text, "lark": self._lark,
            "sequence": self._sequence, "or": self._or, "tag": self._tag, "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator, "optional": self._repeated, "plus": self._repeated,
            "star": self._repeated,
        }

    def write(self, node: Any) -> str:
        """The expression of a format."""
        kind = node.get("type") if isinstance(node, dict) else None
        if kind not in self._writers:
            raise _wrong(f"a format must have one of the types {', '.join(self._writers)}; got {kind!r}")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _wrong(f"formats are nested more than {MAX_DEPTH} deep")
        written = self._writers[kind](node)
        self._depth -= 1
        return written

    def _const_string(self, node: dict[str, Any]) -> str:
        _check_keys(node, {"value"})
        return self._literal(node["value"])

    def _json_schema(self, node: dict[str, Any]) -> str:
        _check_keys(node, {"json_schema"}, optional=("style",))
        if node.get("style", "json") != "json":
            raise _wrong(f"the style {node['style']!r} of json_schema is not served")
        schema = {} if node["json_schema"] is True else node["json_schema"]
        if not isinstance(schema, dict):
            raise _wrong("json_schema must be an object or true")
        check_schema(schema, PARAM)
        return self._rule(embed_schema(schema, self._json_options))

    def _regex(self, node: dict[str, Any]) -> str:
        _check_keys(node, {"pattern"})
        check_regex(_text(node, "pattern"), PARAM)
        return self._terminal(slash(_text(node, "pattern")))

    def _lark(self, node: dict[str, Any]) -> str:
        """The inside of a JSON string, whose value follows a grammar in Lark."""
        _check_keys(node, {"definition"})
        return self._rule(embed_lark(_text(node, "definition"), PARAM))

    def _any_text(self, node: dict[str, Any]) -> str:
        _check_keys(node, set())
        return self._terminal(ANY_TEXT)

    def _sequence(self, node: dict[str, Any]) -> str:
        _check_keys(node, {"elements"})
        elements = _list(node, "elements")
        for element, after in pairwise(elements):
            if is_open(element) and not self._is_special(after):
                raise _wrong(OPEN_END)
        return "(" + " ".join(map(self.write, elements)) + ")"

    def _or(self, node: dict[str, Any]) -> str:
        _check_keys(node, {"elements"})
        return "(" + " | ".join(map(self.write, _list(node, "elements"))) + ")"

    def _repeated(self, node: dict[str, Any]) -> str:
        _check_keys(node, {"content"})
        if is_open(node["content"]) and node["type"] != "optional":
            raise _wrong(OPEN_END)
        return f"({self.write(node['content'])})" + {"optional": "?", "plus": "+", "star": "*"}[node["type"]]

    def _tag(self, node: dict[str, Any], trigger: str = "") -> str:
        """A tag; ``trigger`` is the part of ``begin`` that the text before it has consumed."""
        _check_keys(node, {"begin", "content", "end"})
        ends = node["end"] if isinstance(node["end"], list) else [node["end"]]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise _wrong("the end of a tag must be a string or a list of strings")
        begin = self._literal(_text(node, "begin")[len(trigger) :])
        if isinstance(node["content"], dict) and node["content"].get("type") == "any_text":
            _check_keys(node["content"], set())
            body = "(" + " | ".join(self._text_until(end, ends) for end in ends) + ")"
        elif self._is_bounded(node["content"], ends):
            pattern = node["content"]["pattern"]
            body = "(" + " | ".join(self._text_until(end, ends, pattern) for end in ends) + ")"
        else:
            if is_open(node["content"]) and any(ends):
                raise _wrong(OPEN_END)
            body = self.write(node["content"]) + " (" + " | ".join(map(self._literal, ends)) + ")"
        return f"({begin} {body})"

    def _triggered_tags(self, node: dict[str, Any]) -> str:
        _check_keys(node, {"triggers", "tags"}, optional=("at_least_one", "stop_after_first"))
        triggers = _list(node, "triggers")
        branches = []
        for tag in _list(node, "tags"):
            begin = _text(tag, "begin")
            found = [t for t in triggers if isinstance(t, str) and t and begin.startswith(t)]
            if len(found) != 1:
                raise _wrong(
                    f"the tag that begins with {begin!r} must have exactly one trigger, its beginning; it has "
                    f"{len(found)}"
                )
            branches.append(f"{self._text_until(found[0], triggers)} {self._tag(tag, found[0])}")
        tags, rest = "(" + " | ".join(branches) + ")", self._text_without(triggers)
        if node.get("stop_after_first"):
            return tags if node.get("at_least_one") else f"({tags} | {rest})"
        return f"({tags}{'+' if node.get('at_least_one') else '*'} {rest})"

    def _tags_with_separator(self, node: dict[str, Any]) -> str:
        _check_keys(node, {"tags", "separator"}, optional=("at_least_one", "stop_after_first"))
        tags = "(" + " | ".join(map(self._tag, _list(node, "tags"))) + ")"
        more = "" if node.get("stop_after_first") else f" ({self._literal(_text(node, 'separator'))} {tags})*"
        return f"({tags}{more})" + ("" if node.get("at_least_one") else "?")

    def _text_without(self, markers: list[str]) -> str:
        """Any text in which none of the markers occurs."""
        spelled = [re.escape(marker) for marker in markers if marker not in self._special_ids]
        if not spelled:
            return self._terminal(ANY_TEXT)
        return self._terminal(f"{ANY_TEXT} & ~" + slash(r"(.|\n)*(" + "|".join(spelled) + r")(.|\n)*"))

    def _is_bounded(self, content: Any, ends: list[str]) -> bool:
        """Whether the content of a tag is a regular expression that could match the ends, which are text, too."""
        if not isinstance(content, dict) or content.get("type") != "regex" or not all(ends):
            return False
        self._regex(content)
        check_whole(content["pattern"], PARAM)
        return not any(end in self._special_ids for end in ends)

    def _text_until(self, end: str, markers: list[str], pattern: str = r"(.|\n)*") -> str:
        """Text that ``pattern`` matches up to and including the first of the markers, which is ``end``: all texts that
        end with it, less those in which some marker ends earlier. One terminal: those before ``end`` are greedy."""
        if not end:
            raise _wrong("free text needs a non-empty end or trigger")
        if end in self._special_ids:
            return f"({self._text_without(markers)} {self._literal(end)})"
        spelled = [re.escape(marker) for marker in markers if marker not in self._special_ids]
        earlier = slash(r"(.|\n)*(" + "|".join(spelled) + r")(.|\n)+")
        return self._terminal(slash(f"({pattern})" + re.escape(end)) + f" & ~{earlier}")

    def _is_special(self, node: Any) -> bool:
        """Whether a format begins with a special token, which no text before it can swallow."""
        text = node.get("value" if node.get("type") == "const_string" else "begin") if isinstance(node, dict) else None
        return isinstance(text, str) and self._special is not None and self._special.match(text) is not None

    def _literal(self, text: Any) -> str:
        """A constant string; special tokens in it are the tokens."""
        if not isinstance(text, str):
            raise _wrong(f"expected a string, got {text!r}")
        if not text:
            return '""'
        parts, done = [], 0
        for match in self._special.finditer(text) if self._special is not None else ():
            parts += [quote(text[done : match.start()])] if match.start() > done else []
            parts.append(f"<[{self._special_ids[match[0]]}]>")
            done = match.end()
        return " ".join(parts + ([quote(text[done:])] if done < len(text) else []))

    def _rule(self, body: str, attribute: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attribute}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        line = next((line for line in self.rules if line.endswith(f": {body}") and line[0] == "T"), None)
        if line is not None:
            return line.split(":", 1)[0]
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name


def is_open(node: Any) -> bool:
    """Whether a format ends in free text."""
    if not isinstance(node, dict):
        return False
    match node.get("type"):
        case "any_text" | "triggered_tags":
            return not node.get("stop_after_first") or not node.get("at_least_one")
        case "sequence":
            return bool(node.get("elements")) and isinstance(node["elements"], list) and is_open(node["elements"][-1])
        case "or":
            return isinstance(node.get("elements"), list) and any(map(is_open, node["elements"]))
        case "optional" | "plus" | "star":
            return is_open(node.get("content"))
    return False


def _wrong(reason: str) -> RequestError:
    return RequestError(f"{PARAM}: {reason}", param=PARAM)


def _check_keys(node: Any, needed: set[str], optional: tuple[str, ...] = ("type",)) -> None:
    """Fields that are there and mean nothing (null, false, empty) are let pass."""
    if not isinstance(node, dict):
        raise _wrong(f"expected an object, got {node!r}")
    for name in needed - node.keys():
        raise _wrong(f"the field {name!r} is missing{' of a ' + str(node['type']) if 'type' in node else ''}")
    for name in node.keys() - needed - {*optional, "type"}:
        if node[name]:
            raise _wrong(f"the field {name!r} is not served")


def _list(node: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(node[name], list) or not node[name]:
        raise _wrong(f"{name} must be a list with something in it")
    return node[name]


def _text(node: Any, name: str) -> str:
    if not isinstance(node, dict) or not isinstance(node.get(name), str):
        raise _wrong(f"{name} must be a string")
    return node[name]

"""Grammars for tool calls, as structural tags: for forced calls (``tool_choice``), and for optional calls of strict
tools. A node is a dict in the ``format`` language of vLLM's structural tags.

Made from a format's `Writing` and the tools' schemas. Refuses: compiling and enforcing (``execution/structured``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.base.errors import RequestError, UnsupportedFeature
from headrace.base.grammar import Grammar
from headrace.service.parsing.choice import Formats
from headrace.service.parsing.format import ReasoningFormat, ToolFormat, Writing
from headrace.service.parsing.inputs import ARGUMENT, find_whole
from headrace.service.parsing.schemas import STRING, ToolSchemas, loosen

Node = dict[str, Any]

MAX_PROPERTIES = 128
"""Arguments of one tool that a grammar covers, in formats that write them one by one; the rest cannot be written."""
ANY_OBJECT: Node = {"type": "object"}
ANY_TEXT: Node = {"type": "any_text"}
ANSWER_KINDS = frozenset({"json_schema", "json_object", "regex", "choice"})
"""Kinds of grammars that can bind an answer while calls remain possible instead."""
NO_CALL = r"([^\s{\[](.|\n)*)?"
"""Text that cannot be a call without a marker: it begins with neither a bracket nor white space."""
_SLOT = re.compile(r"\$(name|arguments|index|key|value)")
_LOCAL = ("$defs", "definitions")


def confine_output(
    formats: Formats, wanted: Grammar | None, tools: Sequence[Mapping[str, Any]], prompt: str, *,
    is_parallel: bool = True,
    is_forced: bool = False, is_narrowed: bool = False, continued: str | None = None,
) -> Grammar | None:
    """The grammar of an output that follows ``prompt``; None when it is free.

    ``wanted``: the request's own grammar, which binds the answer. ``tools``: those that may be called;
    ``is_narrowed``: the prompt shows more than these. Calls may come instead of the answer if the format marks them and
    the grammar is one of `ANSWER_KINDS`; they must come if ``is_forced``. Reasoning stays free, except under grammars
    in EBNF. Raises typed errors for combinations that are not possible.
    """
    writing = None if formats.tools is None else formats.tools.writing
    # Without a marker a call could not be told from an answer that keeps to the grammar.
    can_call = bool(tools) and writing is not None and bool(writing.answer or _trigger(writing))
    if is_forced:
        if wanted is not None and wanted.kind not in ("json_schema", "json_object"):
            raise RequestError(
                f"a forced tool call cannot be combined with a {wanted.kind}: each fixes the whole output; leave one "
                "out",
                param="tool_choice"
            )
    elif wanted is not None and not (can_call and wanted.kind in ANSWER_KINDS):
        reasoning = None if formats.is_closed(prompt) else formats.reasoning
        return delay_grammar(wanted, reasoning, is_open=formats.begins_open(prompt, continued=continued))
    elif wanted is None and not is_narrowed and not any(tool["function"].get("strict") for tool in tools):
        return None
    return grammar_of_calls(
        formats, tools, prompt, is_parallel=is_parallel, is_forced=is_forced, continued=continued, instead=wanted
    )


def grammar_of_calls(
    formats: Formats, tools: Sequence[Mapping[str, Any]], prompt: str, *, is_parallel: bool = True,
    is_forced: bool = True,
    continued: str | None = None, instead: Grammar | None = None,
) -> Grammar:
    """`force_calls` in a served model's formats, for an output that follows ``prompt``. Unless ``is_forced``, output
    may also be ``instead``, one of `ANSWER_KINDS`. Raises `UnsupportedFeature` when the model's format is unknown or
    cannot be forced."""
    if formats.tools is None or formats.tools.writing is None:
        known = "of an unknown format" if formats.tools is None else f"in the format {formats.tools.name}"
        raise UnsupportedFeature(
            f"calls {known} cannot be forced; another format is named with --tool-parser", param="tool_choice"
        )
    reasoning = None if formats.is_closed(prompt) else formats.reasoning
    is_open = formats.begins_open(prompt, continued=continued)
    answer = None if instead is None else _as_node(instead)
    tag = force_calls(
        tools, formats.tools, reasoning, is_open=is_open, is_parallel=is_parallel, is_forced=is_forced, answer=answer
    )
    return Grammar.structural_tag(tag, param="tools")


def force_calls(
    tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat, reasoning: ReasoningFormat | None = None, *,
    is_open: bool = False,
    is_parallel: bool = True, is_forced: bool = True, answer: Node | None = None,
) -> Node:
    """The structural tag for calls of these tools (one, or several with ``is_parallel``), after the reasoning if there
    is some. ``is_open``: the prompt has begun the reasoning.

    ``tools`` are in OpenAI's form; ``lark`` beside a function's name is a grammar of its only argument, a text. If
    ``is_forced``, the output is calls and nothing else. Otherwise it is calls or ``answer``, if that is given, else
    text with or without calls. Schemas of tools that are not ``strict`` are enforced as far as every grammar
    library can (`loosen`). The format must have a `Writing`.
    """
    writing = tool_format.writing
    assert writing is not None
    writer = _CallWriter(writing, tools)
    can_repeat = is_parallel and writing.between is not None
    if is_forced:
        body = writer.write_calls(can_repeat)
    elif answer is None:
        body = _allow_text(writer, writing, can_repeat)
    else:
        body = _either([writer.write_calls(can_repeat), _sequence([_text(writing.answer), answer])])
    return {
        "type": "structural_tag",
        "format": after_reasoning(body, reasoning, is_open=is_open, has_space=not writing.begin.startswith("\n"))
    }


def after_reasoning(body: Node, reasoning: ReasoningFormat | None, *, is_open: bool, has_space: bool = True) -> Node:
    """``body`` behind the reasoning: reasoning that the prompt has begun must end first; otherwise it is optional.
    ``has_space``: up to two line breaks are allowed between reasoning and body."""
    if reasoning is None:
        return body
    starts, ends = ([t] for t in reasoning.writing) if reasoning.writing else (reasoning.starts, reasoning.ends)
    marks = [_split_end(end) for end in ends]
    tags = [
        {"type": "tag", "begin": start, "content": ANY_TEXT, "end": [mark for mark, _ in marks]}
        for start in ([""] if is_open else starts)
    ]
    thought = _sequence(
        [
            _either(tags), _text(marks[0][1]),
            *([_optional(_either([_text("\n\n"), _text("\n")]))] if has_space and not reasoning.channels else [])
        ]
    )
    return _sequence([thought if is_open else _optional(thought), body])


def delay_grammar(grammar: Grammar, reasoning: ReasoningFormat | None, *, is_open: bool) -> Grammar:
    """The grammar, applied behind the reasoning only. A grammar in EBNF has no form as a node: it is returned unchanged
    and binds the reasoning too."""
    if reasoning is None:
        return grammar
    body = _as_node(grammar)
    if body is None:
        return grammar
    answer = _sequence([_text(reasoning.answer), body])
    return Grammar.structural_tag(
        {"type": "structural_tag", "format": after_reasoning(answer, reasoning, is_open=is_open)}
    )


def _as_node(grammar: Grammar) -> Node | None:
    """A grammar as a node; None if there is no such node."""
    if grammar.kind == "regex":
        return {"type": "regex", "pattern": grammar.text}
    if grammar.kind == "json_object":
        return _json(ANY_OBJECT)
    if grammar.kind == "choice":
        return _either([_text(choice) for choice in json.loads(grammar.text)])
    value = json.loads(grammar.text) if grammar.kind in ("json_schema", "structural_tag") else None
    if grammar.kind == "json_schema" and value is not False:
        return _json(value)
    return value.get("format") if isinstance(value, dict) else None


def _allow_text(writer: _CallWriter, writing: Writing, can_repeat: bool) -> Node:
    """A node for text that may contain calls."""
    if writing.answer:
        return _either([writer.write_calls(can_repeat), _sequence([_text(writing.answer), ANY_TEXT])])
    trigger = _trigger(writing)
    if not trigger:
        return _either([writer.write_calls(can_repeat), {"type": "regex", "pattern": NO_CALL}])
    if writing.token:  # a special token in the trigger cannot be searched for as text: an expression for what precedes
        before = trigger.partition(writing.token)[0]
        calls = writer.write_calls(can_repeat, cut=len(before))
        return _either([_sequence([{"type": "regex", "pattern": r"(.|\n)*" + re.escape(before)}, calls]), ANY_TEXT])
    # Without a section around the calls (``begin``) each call has the trigger: further calls are tags of their own.
    tag = {
        "type": "tag", "begin": trigger,
        "content": writer.write_calls(can_repeat and bool(writing.begin), cut=len(trigger)), "end": ""
    }
    return {"type": "triggered_tags", "triggers": [trigger], "tags": [tag], "stop_after_first": not can_repeat}


def _trigger(writing: Writing) -> str:
    """The text that every call begins with; empty unless it is a marker that other text does not contain."""
    begin = (writing.begin + writing.call.split("$", 1)[0]).lstrip()
    return begin if begin.startswith(("<", "[TOOL")) else ""


class _CallWriter:
    """Writes calls of given tools as nodes of a structural tag."""

    def __init__(self, writing: Writing, tools: Sequence[Mapping[str, Any]]):
        self._writing = writing
        given = {
            f["name"]: (f.get("parameters") or ANY_OBJECT, f.get("strict"))
            for f in (tool["function"] for tool in tools)
        }
        self._schemas: dict[str, Mapping[str, Any]] = {
            n: {**ANY_OBJECT, **(s if is_strict else loosen(s))} for n, (s, is_strict) in given.items()
        }
        self._types = ToolSchemas(self._schemas.items())
        self._larks = {f["name"]: f["lark"] for f in (tool["function"] for tool in tools) if "lark" in f}

    def write_calls(self, can_repeat: bool, *, cut: int = 0) -> Node:
        """One call, or several. ``cut``: how many characters of the beginning a trigger has written already."""
        writing = self._writing
        lead = writing.begin.lstrip() if cut else writing.begin  # as `_trigger` strips it
        first = self._write_call(cut=max(0, cut - len(lead)))
        more = (
            [_repeat(_sequence([_text(writing.between), self._write_call()]))]
            if can_repeat and writing.between is not None else []
        )
        return _sequence([_text(lead[cut:]), first, *more, _text(writing.end)])

    def _write_call(self, cut: int = 0) -> Node:
        return _either(
            [
                self._fill(self._writing.call, {"name": _text(name), "arguments": self._write_arguments(name)}, cut)
                for name in self._schemas
            ]
        )

    def _fill(self, template: str, values: Mapping[str, Node], cut: int = 0) -> Node:
        """A template with its slots filled, without its first ``cut`` characters (which contain no slot)."""
        parts = _SLOT.split(template[cut:])
        values = {**values, "index": {"type": "regex", "pattern": "[0-9]{1,3}"}}
        return _sequence([values[part] if at % 2 else _text(part) for at, part in enumerate(parts)])

    def _write_arguments(self, name: str) -> Node:
        schema, writing = self._schemas[name], self._writing
        if name in self._larks and enforces_lark(writing):
            return self._write_input(self._larks[name])
        if not writing.pair:
            return _json(schema)
        found = schema.get("properties")
        properties = dict(list(found.items())[:MAX_PROPERTIES]) if isinstance(found, Mapping) else {}
        if writing.comma:
            return self._join(name, properties)
        required = schema.get("required") or ()
        pairs = {key: self._write_pair(name, key) for key in properties}
        return _sequence([pair if key in required else _optional(pair) for key, pair in pairs.items()])

    def _write_input(self, lark: str) -> Node:
        """The only argument of a custom tool, whose text follows a grammar."""
        value = _sequence([_text('"'), {"type": "lark", "definition": lark}, _text('"')])
        pair = self._writing.pair or f'{{"{ARGUMENT}": $value}}'
        return self._fill(pair, {"key": _text(ARGUMENT), "value": value})

    def _join(self, name: str, properties: Mapping[str, Any]) -> Node:
        """Pairs separated by commas: the required ones first, then any of the others, in the schema's order."""
        required = [key for key in properties if key in (self._schemas[name].get("required") or ())]
        comma, nodes = _text(self._writing.comma), {key: self._write_pair(name, key) for key in properties}
        others = [nodes[key] for key in properties if key not in required]
        head = [part for at, key in enumerate(required) for part in ([comma] if at else []) + [nodes[key]]]
        if required or not others:
            return _sequence([*head, *(_optional(_sequence([comma, node])) for node in others)])
        # Nothing is required: one alternative per pair that may come first, as the first has no comma before it.
        tails = [
            _sequence([node, *(_optional(_sequence([comma, later])) for later in others[at + 1 :])]) for at,
            node in enumerate(others)
        ]
        return _optional(_either(tails))

    def _write_pair(self, name: str, key: str) -> Node:
        writing = self._writing
        types, schema = self._types.types_of(name, key), self._schemas[name]["properties"][key]
        values = schema.get("enum") if isinstance(schema, Mapping) else None
        if types == STRING and isinstance(values, list) and not writing.quotes:  # a JSON schema would quote the values
            return self._fill(writing.pair, {"key": _text(key), "value": _either([_text(v) for v in values])})
        may_be_text = not writing.quotes and (not types or "string" in types)
        before, _, after = writing.pair.partition("$value")
        pattern = find_whole(schema) if types == STRING else None
        bare = _sequence([self._fill(before, {"key": _text(key)}), *_text_up_to(after, writing.token, pattern)])
        if may_be_text and (types == STRING or not writing.json_pair):
            return bare
        spelled = self._fill(
            writing.json_pair or writing.pair, {"key": _text(key), "value": _json(self._with_definitions(name, schema))}
        )
        return _either([bare, spelled] if may_be_text else [spelled])

    def _with_definitions(self, name: str, schema: Any) -> Any:
        """A property's schema with the definitions it may refer to."""
        outer = {word: self._schemas[name][word] for word in _LOCAL if word in self._schemas[name]}
        return {**outer, **schema} if isinstance(schema, Mapping) else schema


def enforces_lark(writing: Writing | None) -> bool:
    """Whether grammars bind inputs of custom tools. Where values are bare text, a terminal of the grammar would take
    what ends the value for its own."""
    return writing is not None and (not writing.pair or writing.quotes)


def _text_up_to(end: str, token: str, pattern: str | None) -> list[Node]:
    """Any text (with ``pattern``, that which it matches), then ``end``. If ``end`` contains the special token
    ``token``, which cannot be searched for as text, the characters before it must end the value."""
    marker, rest = _split_end(end)
    if token and token in end:
        marker, rest = end[: end.index(token)], end[end.index(token) :]
        if pattern is None:
            return [{"type": "regex", "pattern": r"(.|\n)*" + re.escape(marker)}, _text(rest)]
    content = ANY_TEXT if pattern is None else {"type": "regex", "pattern": pattern}
    return [{"type": "tag", "begin": "", "content": content, "end": marker}, _text(rest)]


def _split_end(end: str) -> tuple[str, str]:
    """Split an end text behind its first ``>``: the first part may be one special token, and is searched for alone."""
    at = end.find(">") + 1 or len(end)
    return end[:at], end[at:]


def _json(schema: Any) -> Node:
    return {"type": "json_schema", "json_schema": dict(schema) if isinstance(schema, Mapping) else True}


def _text(text: str | None) -> Node:
    return {"type": "const_string", "value": text or ""}


def _sequence(nodes: Sequence[Node]) -> Node:
    """The nodes one after the other; empty texts are left out."""
    kept = [n for n in nodes if n != _text("")]
    return kept[0] if len(kept) == 1 else {"type": "sequence", "elements": kept} if kept else _text("")


def _either(nodes: Sequence[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else {"type": "or", "elements": list(nodes)}


def _optional(node: Node) -> Node:
    return {"type": "optional", "content": node}


def _repeat(node: Node) -> Node:
    return {"type": "star", "content": node}


def write_call(writing: Writing, name: str, arguments: Mapping[str, Any], to_json: Callable[[Any], str]) -> str:
    """One call as text, as the model would write it; ``to_json`` encodes values."""
    text = writing.call.replace("$index", "0").replace("$name", name)
    if not writing.pair:
        return text.replace("$arguments", to_json(arguments))
    pairs = []
    for key, value in arguments.items():
        is_bare = isinstance(value, str) and not writing.quotes
        pair = writing.pair if is_bare else writing.json_pair or writing.pair
        pairs.append(pair.replace("$key", key).replace("$value", value if is_bare else to_json(value)))
    return text.replace("$arguments", writing.comma.join(pairs))

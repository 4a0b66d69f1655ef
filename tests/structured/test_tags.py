"""Structural tags against regular expressions as an oracle: formats as users write them, and formats at random."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
from walks import EOS, accepts, allowed, library, walk, walks

from headrace.base.errors import RequestError
from headrace.base.grammar import Grammar

ARGUMENTS = {
    "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False
}
NODE = {
    "type": "object", "properties": {"v": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, "required": ["v"],
    "additionalProperties": False
}
JSON = {"type": "json_schema", "json_schema": ARGUMENTS}


def tagged(format_: Any) -> Grammar:
    return Grammar.structural_tag({"type": "structural_tag", "format": format_})


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(**more: Any) -> Grammar:
    listed = [tag("<f=a>", JSON, "</f>"), tag("<f=b>", {"type": "any_text"}, ["</f>", "</g>"])]
    return tagged({"type": "triggered_tags", "triggers": ["<f"], "tags": listed, **more})


CALLS = re.compile(
    r"""((?!<f)(.|\n))*((<f=a>\{\s*"x"\s*:\s*-?\d+\s*\}</f>|<f=b>((?!</[fg]>)(.|\n))*</[fg]>)((?!<f)(.|\n))*)*"""
)


def test_tags_in_free_text():
    for text in walks(triggered(), 12, limit=80):
        assert CALLS.fullmatch(text), text
    pieces = ["<f", "<f=a>", '{"x": 1}', "</f>", "<f=b>", "hm ", "<", "</g>", "\n"]
    draw, found = random.Random(5), set()
    for _ in range(60):
        text = "".join(draw.choices(pieces, k=draw.randrange(7)))
        found.add(accepts(triggered(), text))
        assert accepts(triggered(), text) is bool(CALLS.fullmatch(text)), text
    assert found == {True, False}
    once = triggered(stop_after_first=True)
    assert accepts(once, 'a <f=a>{"x": 1}</f>') and not accepts(once, 'a <f=a>{"x": 1}</f>b')


def test_the_older_form_is_the_same_grammar():
    grammar = Grammar.structural_tag(
        {
            "type": "structural_tag", "structures": [{"begin": "<f=a>", "schema": ARGUMENTS, "end": "</f>"}],
            "triggers": ["<f="]
        }
    )
    assert accepts(grammar, 'x <f=a>{"x": 1}</f> y') and not accepts(grammar, "x <f=b>")


def test_schemas_in_tags_are_enforced():
    for schema in (
        ARGUMENTS, {"$defs": {"n": NODE}, "$ref": "#/$defs/n"},
        {"type": "array", "items": {"enum": ["a b", None]}, "minItems": 2, "maxItems": 3}, {"type": "object"}
    ):
        found = [
            json.loads(text[1:-1])
            for text in walks(tagged(tag("<", {"type": "json_schema", "json_schema": schema}, ">")), 12)
        ]
        assert found
        for value in found:
            jsonschema.Draft202012Validator(schema).validate(value)
    assert not accepts(tagged(tag("", JSON, "")), '{"x":' + " " * 60 + "1}"), "no blanks without end"


class Inventor:
    """Formats at random, from pieces that overlap."""

    PIECES = ("", "<f=a>", "<f=b>", "</f>", "<g>", "</g>", "<", "a", "ab", "<f", "aa")

    def __init__(self, seed: int):
        self.draw = random.Random(seed)

    def json(self) -> dict[str, Any]:
        return {
            "type": "json_schema",
            "json_schema": self.draw.choice([ARGUMENTS, {"type": "integer"}, {"enum": ["a", "ab"]}])
        }

    def closed(self, depth: int) -> dict[str, Any]:
        draw = self.draw
        kind = draw.choice(
            [
                "const_string", "json_schema",
                *(["sequence", "or", "tag", "optional", "plus", "star", "tags_with_separator"] if depth < 3 else [])
            ]
        )
        if kind == "const_string":
            return {"type": kind, "value": draw.choice(self.PIECES)}
        if kind == "json_schema":
            return self.json()
        if kind in ("sequence", "or"):
            return {"type": kind, "elements": [self.closed(depth + 1) for _ in range(draw.randint(1, 3))]}
        if kind == "tag":
            return self.tag(depth, draw.choice(["<f=a>", "<g>", "a", ""]))
        if kind == "tags_with_separator":
            tags = [self.tag(depth, draw.choice(["<f=a>", "a"])) for _ in range(draw.randint(1, 2))]
            return {
                "type": kind, "tags": tags, "separator": draw.choice([",", "a"]), "at_least_one": draw.random() < 0.5
            }
        return {"type": kind, "content": self.closed(depth + 1)}

    def tag(self, depth: int, begin: str) -> dict[str, Any]:
        content = self.draw.choice([self.json, lambda: {"type": "any_text"}, lambda: self.closed(depth + 1)])()
        return tag(begin, content, self.draw.choice(["</f>", "</g>", "a", ["</f>", "</g>"]]))

    def any(self) -> dict[str, Any]:
        draw, rest = self.draw, {"type": "any_text"}
        if draw.random() < 0.5:
            triggers = draw.choice([["<f"], ["<f", "<g"], ["a"], ["a", "<f"]])
            tags = [
                self.tag(1, trigger + draw.choice(["=a>", ">", "x", ""]))
                for trigger in triggers
                for _ in range(draw.randint(1, 2))
            ]
            rest = {
                "type": "triggered_tags", "triggers": triggers, "tags": tags, "stop_after_first": draw.random() < 0.4
            }
        return draw.choice([self.closed(0), rest, {"type": "sequence", "elements": [self.closed(1), rest]}])


PATTERNS = {
    json.dumps(ARGUMENTS): r'\{"x":-?(0|[1-9][0-9]*)\}', '{"type": "integer"}': "-?(0|[1-9][0-9]*)",
    '{"enum": ["a", "ab"]}': '("a"|"ab")',
}


def spell(node: dict[str, Any]) -> str:
    """The format as a regular expression, for JSON without blanks."""
    match node["type"]:
        case "const_string":
            return re.escape(node["value"])
        case "json_schema":
            return PATTERNS[json.dumps(node["json_schema"])]
        case "sequence":
            return "".join(map(spell, node["elements"]))
        case "or":
            return "(" + "|".join(map(spell, node["elements"])) + ")"
        case "optional" | "plus" | "star":
            return f"({spell(node['content'])})" + {"optional": "?", "plus": "+", "star": "*"}[node["type"]]
        case "any_text":
            return r"(.|\n)*"
        case "tag":
            return spell_tag(node, node["begin"])
        case "tags_with_separator":
            tags = "(" + "|".join(map(spell, node["tags"])) + ")"
            return f"({tags}({re.escape(node['separator'])}{tags})*)" + ("" if node["at_least_one"] else "?")
    # Text without triggers, then tags; what of a trigger stands at the end of a text belongs to the text.
    triggers = "|".join(map(re.escape, node["triggers"]))
    text = rf"((?!{triggers})(.|\n))*"
    tags = "|".join(spell_tag(tag, tag["begin"]) for tag in node["tags"])
    return f"({text}({tags})|{text})" if node["stop_after_first"] else f"{text}(({tags}){text})*"


def spell_tag(tag: dict[str, Any], begin: str) -> str:
    ends = "|".join(map(re.escape, tag["end"] if isinstance(tag["end"], list) else [tag["end"]]))
    if tag["content"]["type"] == "any_text":
        return rf"{re.escape(begin)}((?!{ends})(.|\n))*({ends})"
    return f"{re.escape(begin)}{spell(tag['content'])}({ends})"


def test_formats_allow_what_their_expressions_match():
    """What a grammar allows beyond that would be a wrong answer. It may allow less where its lexer is greedy."""
    pieces = [*Inventor.PIECES, "1", '{"x":1}', '"a"', '"ab"', ",", "=a>", "x", ">"]
    counts = {True: 0, False: 0}
    for seed in range(60):
        invent = Inventor(seed)
        format_ = invent.any()
        try:
            compiled = library().compile(tagged(format_))
        except RequestError:
            continue
        pattern = re.compile(f"(?:{spell(format_)})")
        texts = {"".join(invent.draw.choices(pieces, k=invent.draw.randrange(6))) for _ in range(15)}
        texts |= {text for i in range(4) if (text := walk(library(), compiled, i, 40)) is not None}
        for text in texts:
            if set(text) & set(" \n\r\t\ufffd"):
                continue
            is_right, is_allowed = pattern.fullmatch(text) is not None, takes(compiled, text)
            counts[is_right] += 1
            assert is_right or not is_allowed, (text, format_)
            is_greedy = re.search("star|plus|optional|integer|separator", json.dumps(format_)) is not None
            assert is_right == is_allowed or is_greedy, (text, format_)
    assert min(counts.values()) > 100


def takes(compiled: Any, text: str) -> bool:
    matcher = compiled.start()
    matcher.accept(list(text.encode()))
    return matcher.error is None and EOS in allowed(library(), matcher)

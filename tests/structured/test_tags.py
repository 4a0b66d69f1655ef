"""Structural tags by the fast library: what is left to it, its outputs against regular expressions and schemas, and the
two libraries against each other on formats made up at random."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

pytest.importorskip("llguidance")
pytest.importorskip("xgrammar")

from walks import EOS, TOKENS, accepts, allowed, library, walk, walks

from headrace.base.errors import RequestError
from headrace.base.grammar import Grammar, Vocabulary
from headrace.execution.structured.exact import inexactness
from headrace.execution.structured.library import LeftToOthers, choose_library
from headrace.execution.structured.store import GrammarStore
from headrace.execution.structured.xgrammar import XgrammarGrammar

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
    assert choose_library(triggered())[0] == "xgrammar"
    for text in walks("xgrammar", triggered(), 12, limit=80):
        assert CALLS.fullmatch(text), text
    pieces = ["<f", "<f=a>", '{"x": 1}', "</f>", "<f=b>", "hm ", "<", "</g>", "\n"]
    draw, found = random.Random(5), set()
    for _ in range(60):
        text = "".join(draw.choices(pieces, k=draw.randrange(7)))
        found.add(accepts("xgrammar", triggered(), text))
        assert accepts("xgrammar", triggered(), text) is bool(CALLS.fullmatch(text)), text
    assert found == {True, False}
    once = triggered(stop_after_first=True)
    assert accepts("xgrammar", once, 'a <f=a>{"x": 1}</f>') and not accepts("xgrammar", once, 'a <f=a>{"x": 1}</f>b')


def test_the_older_form_is_the_same_grammar():
    grammar = Grammar.structural_tag(
        {
            "type": "structural_tag", "structures": [{"begin": "<f=a>", "schema": ARGUMENTS, "end": "</f>"}],
            "triggers": ["<f="]
        }
    )
    assert choose_library(grammar)[0] == "xgrammar"
    assert accepts("xgrammar", grammar, 'x <f=a>{"x": 1}</f> y') and not accepts("xgrammar", grammar, "x <f=b>")


def test_schemas_in_tags_are_enforced():
    for schema in (
        ARGUMENTS, {"$defs": {"n": NODE}, "$ref": "#/$defs/n"},
        {"type": "array", "items": {"enum": ["a b", None]}, "minItems": 2, "maxItems": 3}, {"type": "object"}
    ):
        found = [
            json.loads(text[1:-1])
            for text in walks("xgrammar", tagged(tag("<", {"type": "json_schema", "json_schema": schema}, ">")), 12)
        ]
        assert found
        for value in found:
            jsonschema.Draft202012Validator(schema).validate(value)
    assert not accepts("xgrammar", tagged(tag("", JSON, "")), '{"x":' + " " * 60 + "1}"), "no blanks without end"


@pytest.mark.parametrize("format_", [
    {"type": "regex", "pattern": "a"}, {"type": "json_schema", "json_schema": {"type": "object", "required": ["a"]}},
    {"type": "json_schema", "json_schema": {"uniqueItems": True}},
    {"type": "json_schema", "json_schema": ARGUMENTS, "style": "qwen_xml"},
    {"type": "json_schema", "json_schema": ARGUMENTS, "any_order": True},
    {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag("<f>", JSON, "")], "at_least_one": True},
    {"type": "triggered_tags", "triggers": ["<f", "<"], "tags": [tag("<f>", JSON, "")]},
    {"type": "triggered_tags", "triggers": [], "tags": []},
    {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string", "value": "a"}]},
    {"type": "star", "content": {"type": "any_text"}},
    tag("a", {"type": "any_text"}, ["b", ""]), {"type": "grammar", "grammar": "root ::= root"},
    {"type": "any_text", "max_tokens": 5}, 5, None, {"type": []},
    {"type": "sequence", "elements": []}, {"type": "or", "elements": 3}, {"type": "const_string", "value": 3},
    tag("a", None, 3),
    {"type": "tags_with_separator", "tags": [tag("a", JSON, "b")] * 200, "separator": ","},
], ids=lambda f: str(f)[:50])  # fmt: skip
def test_the_rest_is_left_to_the_other_library(format_: Any):
    assert inexactness(tagged(format_)) is not None and choose_library(tagged(format_))[0] == "llguidance"


def test_special_tokens_go_to_the_other_library():
    grammar = tagged(
        {"type": "triggered_tags", "triggers": ["<|call|>"], "tags": [tag("<|call|>f:", JSON, "<|call|>")]}
    )
    assert inexactness(grammar) is None
    with pytest.raises(LeftToOthers):
        library("xgrammar").compile(grammar)
    special = frozenset([EOS, TOKENS.index(b"<|call|>")])
    store = GrammarStore(lambda: Vocabulary(TOKENS, special), len(TOKENS), [EOS])
    assert not isinstance(store.find(grammar), XgrammarGrammar) and isinstance(store.find(triggered()), XgrammarGrammar)
    store.close()


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


def test_both_libraries_allow_the_same():
    """Blanks aside, which JSON allows and each library bounds in its own way. What the other one alone allows would be
    a wrong answer; the reverse happens where its lexer is greedy (three integers in a row)."""
    pieces = [*Inventor.PIECES, "1", '{"x":1}', '"a"', '"ab"', ",", "=a>", "x", ">"]
    counts = {True: 0, False: 0}
    for seed in range(40):
        invent = Inventor(seed)
        grammar = tagged(invent.any())
        if inexactness(grammar) is not None:
            continue
        fast = library("xgrammar").compile(grammar)
        try:
            exact = library("llguidance").compile(grammar)
        except RequestError:
            continue
        texts = {"".join(invent.draw.choices(pieces, k=invent.draw.randrange(6))) for _ in range(15)}
        texts |= {
            text for lib,
            c in (("xgrammar", fast), ("llguidance", exact)) for i in range(3) if (text := walk(library(lib), c, i, 40))
        }
        for text in texts:
            if set(text) & set(" \n\r\t\ufffd"):
                continue
            verdicts = [_takes(name, c, text) for name, c in (("xgrammar", fast), ("llguidance", exact))]
            counts[verdicts[0]] += 1
            assert verdicts[0] or not verdicts[1], (text, grammar.text)
            assert verdicts[0] == verdicts[1] or any(
                word in grammar.text for word in ("star", "plus", "optional", "integer")
            ), (text, grammar.text)
    assert min(counts.values()) > 100


def _takes(name: str, compiled: Any, text: str) -> bool:
    matcher = compiled.start()
    matcher.accept(list(text.encode()))
    return matcher.error is None and EOS in allowed(library(name), matcher)

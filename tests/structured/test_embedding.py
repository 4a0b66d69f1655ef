"""Grammars in Lark for the inside of JSON strings: they allow what is written of the texts that they allow."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import RequestError
from headrace.base.grammar import Grammar, Vocabulary
from headrace.execution.structured.embedding import embed_lark
from headrace.execution.structured.llguidance import GuidanceLibrary

TOKENS = [bytes([i]) for i in range(256)] + [b"</s>"]
EOS = 256


@functools.cache
def library() -> GuidanceLibrary:
    return GuidanceLibrary(Vocabulary(TOKENS, frozenset({EOS})), len(TOKENS), [EOS])


@functools.cache
def compiled(definition: str, in_json: bool):
    if not in_json:
        return library().compile(Grammar.ebnf(definition))
    mark, node = {"type": "const_string", "value": '"'}, {"type": "lark", "definition": definition}
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [mark, node, mark]}}
    return library().compile(Grammar.structural_tag(tag))


def allows(definition: str, text: str, *, in_json: bool) -> bool:
    written = json.dumps(text, ensure_ascii=False) if in_json else text
    matcher = compiled(definition, in_json).start()
    matcher.accept(list(written.encode()))
    if matcher.error:
        return False
    mask = np.zeros((1, -(-len(TOKENS) // 32)), dtype=np.int32)
    library().fill([matcher], mask)
    return bool(mask[0, EOS // 32] >> (EOS % 32) & 1)


EDITS = r'''
start: begin file+ "*** End" LF?  // of a patch
begin: "*** Begin" LF
file: "*** File: " name LF line+
name: /(.+)/
line: ("+" | "-" | " ") /(.*)/ LF -> text
%import common.LF
'''


def test_edits_of_files():
    right = '*** Begin\n*** File: a "b"\\c.py\n+x = "\\n" # 日\n-\n *** End\n*** End'
    for text, is_right in (
        (right, True), (right + "\n", True), (right.replace("+x", "x"), False), (right + "\n\n", False),
        ("*** Begin\n*** End", False), (right.replace("*** Begin\n", "*** Begin\\n"), False),
    ):
        assert allows(EDITS, text, in_json=False) is allows(EDITS, text, in_json=True) is is_right, text


GRAMMARS = [
    'start: /./', 'start: /./s', r'start: /[^"]*/', r'start: /[^\\n]+/', r'start: /[\n\t"a]*x?/', r'start: /\s*\S?/',
    r'start: /\D{1,3}/', r'start: /\w|\W\W/', 'start: "a\\"\\\\\\n"i | /n"/i', r'start: /(a|\\|")*?n/',
    'start: A "x"\nA: " ".."~"', r'start: /\p{L}\P{L}?/', 'start: /n\\n|[\\x08-\\x0a]|()/i',
    r'start: /^"\/\/[^\n]*$/ // "',
    'start: WS? (ESCAPED_STRING | INT) NEWLINE?\n%import common (WS, ESCAPED_STRING, INT, NEWLINE)',
    'start: "\\t" b~1..2 /[\\/]/\nb: "é" | "{" | "}"',
]
CHARACTERS = [*'a"\\\n\t\r\b\f/nNx {}~é日0', "aN", '""', "\\n"]


@given(st.sampled_from(GRAMMARS), st.lists(st.sampled_from(CHARACTERS), max_size=4))
def test_strings_are_allowed_where_their_values_are(definition: str, parts: list[str]):
    text = "".join(parts)
    assert allows(definition, text, in_json=True) is allows(definition, text, in_json=False)


def test_every_grammar_allows_something():
    texts = [
        '"', "\n", 'é"', "a", "n", "\t", " ", "1\n", "ab", 'A"\\\n', "ax", "é1", '"a\\n"', "N\n", "\té/", '"//n', "\\n",
    ]
    for definition in GRAMMARS:
        assert any(allows(definition, text, in_json=True) for text in texts), definition


@pytest.mark.parametrize("definition", [
    'start: "a"\n}\nr0: "b"', "start: A & ~B\nA: /a/\nB: /b/", "start: <[7]>", "start: %json {}", r"start: /\p{Greek}/",
    "start: /(?s).*/", "start: @other", "start: A\n%ignore A\nA: /a/", r"start: /a\bb/", "start: /a(?=b)/",
    r"start: /[z-a]/", 'start: "\\x41"',
])
def test_what_cannot_be_embedded_is_refused(definition: str):
    with pytest.raises(RequestError, match=r"^tools: ") as caught:
        embed_lark(definition, "tools")
    assert caught.value.param == "tools"

"""Patterns that end an output: the same match as an exhaustive search finds, however the text is divided."""

from __future__ import annotations

import re
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import RequestError
from headrace.service.tokenization.detokenizer import BothScanners, StopScanner
from headrace.service.tokenization.stop_patterns import MAX_STATES, StopPatterns, compile_stops

PATTERNS = [
    "b", "ab", "a+b", "a*b", "(ab|ba)c", "[^a]b", "a{2}", "a{2,3}c", "b{2,}", "a.c", "(?:a|b){2}c", r"\d+", r"\n\n",
    "(?i)AB", "^b", "(?m)^c", r"a\.c", "[a-b]+?c", "é", "(a|)c", r"a\s", "(?s)a.b", "c$", "x{0,2}c",
    r"[\]a]c", "[]a]c", r"\x61b", "(?P<n>a)c", "(a(b|c)?){2}b", "a?b?c",
]


def first_match(pattern: str, text: str) -> tuple[int, int] | None:
    """The match that ends first, of those the longest; by Python's engine, at every place."""
    whole = re.compile(pattern.removesuffix("$"))
    for end in range(1, len(text) + 1):
        for start in range(end):
            if whole.fullmatch(text, start, end):
                return start, end
    return None


def scan_parts(scanner, parts: list[str]) -> tuple[str, str | None]:
    """The text before the match, and what matched; what is given out must never be taken back."""
    given = ""
    for part in parts:
        held = scanner.tail
        found = scanner.scan(part)
        window = held + part
        if found is not None:
            return given + window[: found[1]], window[found[1] : found[2]]
        given += window[: len(window) - len(scanner.tail)]
    return given + scanner.tail, None


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(PATTERNS), st.text("abcé. \n1", max_size=12), st.lists(st.integers(0, 12), max_size=4))
def test_the_match_is_that_of_an_exhaustive_search(pattern: str, text: str, cuts: list[int]):
    places = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    parts = [text[a:b] for a, b in pairwise(places)]
    before, matched = scan_parts(StopPatterns(compile_stops((pattern,))), parts)
    expected = first_match(pattern, text)
    if expected is None:
        assert (before, matched) == (text, None)
    else:
        assert (before, matched) == (text[: expected[0]], text[expected[0] : expected[1]])


@settings(max_examples=200, deadline=None)
@given(st.text("abc1", max_size=12), st.lists(st.integers(0, 12), max_size=4))
def test_strings_and_patterns_together(text: str, cuts: list[int]):
    places = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    parts = [text[a:b] for a, b in pairwise(places)]
    scanner = BothScanners([StopScanner(["abc", "cc"]), StopPatterns(compile_stops(("b+c", r"\d\d")))])
    before, matched = scan_parts(scanner, parts)
    found = [m for m in (first_match(p, text) for p in ("abc", "cc", "b+c", r"\d\d")) if m is not None]
    if not found:
        assert (before, matched) == (text, None)
    else:
        start, end = min(found, key=lambda m: (m[1], m[0]))
        assert (before, matched) == (text[:start], text[start:end])


def test_text_is_held_back_only_where_a_match_may_have_begun():
    scanner = StopPatterns(compile_stops((r"\n#+ ", "END")))
    assert scanner.scan("hello EN") is None and scanner.tail == "EN"
    assert scanner.scan("X\n##") is None and scanner.tail == "\n##"
    assert scanner.scan(" x") == (r"\n#+ ", 0, 4)


@pytest.mark.parametrize("pattern, words", [
    ("a*", "empty"), ("", "empty"), ("^", "empty"), ("(a", "not closed"), ("a)", "not open"), ("[a", "not closed"),
    (r"(a)\1", "back reference"), (r"\bx", "escape"), ("(?=a)b", "look-around"), ("(?<=a)b", "look-around"),
    ("*a", "repeats"), ("a**", "follows another"), ("a$b", "end of the text"), ("a{3,2}", "repeats nothing"),
    ("[z-a]", "bad character range"),
    ("a{600}", "1024 states"), ("((a{20}){20}){20}", "1024 states"), ("(" * 200 + ")" * 200, ""), ("\\", "escape"),
])
def test_what_cannot_be_searched_is_said(pattern: str, words: str):
    with pytest.raises(RequestError) as caught:
        compile_stops((pattern,))
    assert caught.value.param == "stop_regex" and words in caught.value.message


def test_no_pattern_makes_the_search_slow():
    """The classic bombs, on texts that nearly match."""
    for pattern in ("(a+)+$b", "(a|aa)+b", "(a?){30}a{30}b", "(.*)*x", "([a-z]+)*!", f"a{{1,{MAX_STATES // 4}}}b"):
        try:
            scanner = StopPatterns(compile_stops((pattern,)))
        except RequestError:
            continue
        begin = time.perf_counter()
        assert scanner.scan("a" * 2000) is None
        assert time.perf_counter() - begin < 2.0, pattern

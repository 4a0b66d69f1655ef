"""States of regular expressions: outputs in one state have the same bitmask and forced text, whatever led there."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from walks import EOS, allowed, check_states, library

from headrace.base.grammar import Grammar
from headrace.execution.structured.lazy_dfa import LazyDfa, NotReadError
from headrace.execution.structured.regex_automaton import MAX_ACTIVE, RegexAutomaton
from headrace.execution.structured.rows import Constraint

atoms = st.sampled_from([
    "a", "b", "ab", ".", r"\d", r"\w", r"\s", r"\S", r"\W", r"\D", r"\.", r"\-", "[a-c]", "[^a]", r"[\d_-]", r"[^\w]",
    "é", "-", " ", "[a\\]b]", "[é-ü0-3]", r"\n", "<", "#",
])
counts = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,3}", "{2,}", "{0,2}", "{0,}"])
patterns = st.recursive(
    st.builds("{}{}".format, atoms, counts),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map("".join) | st.builds("({}){}".format, inner, counts)
    | st.builds("(?:{}|{}){}".format, inner, inner, counts),
    max_leaves=6,
)


def states_of(pattern: str, **options) -> LazyDfa:
    return LazyDfa(RegexAutomaton(pattern), [bytes([i]) for i in range(256)], **options)


def check(pattern: str, seed: int, **options: int) -> tuple[int, int]:
    compiled = library().compile(Grammar.regex(pattern))
    assert compiled.states is not None
    return check_states(Grammar.regex(pattern), seed, compiled=compiled, **options)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(patterns, st.integers(0, 99))
def test_bitmasks_of_states_are_those_of_the_library(pattern: str, seed: int):
    check(pattern, seed, count=6, length=12)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    patterns,
    st.lists(st.sampled_from(["a", "b", "-", " ", "_", "1", "12", "é", ".", "<", "\n", "ab", "#"]), max_size=6)
)
def test_states_reach_what_the_expression_matches(pattern: str, pieces: list[str]):
    """A text in ASCII that Python's own matcher takes as a whole never leaves the states."""
    states = states_of(pattern)
    text, state = "".join(pieces), states.start
    for byte in text.encode():
        state = None if state is None else states.step(state, byte)
    if text.isascii() and re.fullmatch(pattern, text, re.ASCII):
        assert state is not None


large = st.sampled_from(["{12}", "{15,19}", "{9,}", "{0,16}", "{1,40}", "{11,11}", "{2,14}", "{20,30}"])
counted = st.builds(
    "{}(?:{}){}{}".format, st.sampled_from(["", "[ab]*", "-?"]), st.sampled_from(["a", "[ab]", "ab?", "1|12", "a{2}"]),
    large, st.sampled_from(["", "a", "1+", "[^a]"])
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(counted | st.builds("(?:{}|{})".format, counted, counted), st.integers(0, 99))
def test_counts(pattern: str, seed: int):
    """Long walks, so that all counts come by."""
    check(pattern, seed, count=3, length=60)


def test_what_is_seen_again_is_known():
    assert check("([A-Z][a-z]+ ?)+", 1)[1] > 30
    assert check(r"\d{3,5}(-\d{2})*", 2)[1] > 20
    assert check_states(Grammar.choice(["red", "re(d)", "new\nline", "12 ab"]), 3)[1] > 5


@pytest.mark.parametrize("pattern", [
    "a+?", "(?i)a", r"\bx", "^a", "a$", r"\p{L}", "[[:alpha:]]", "[a&&b]", r"\x41", "(?=a)", "(?P<n>a)", "a{,3}", "a**",
    "[]a]", "a)", "(a", r"(a)\1", "a{1000000}", "[a", "",
][:-1])  # fmt: skip
def test_what_is_not_read(pattern: str):
    with pytest.raises(NotReadError):
        RegexAutomaton(pattern)


@pytest.mark.parametrize(
    "pattern", ["(a{0,90}){0,90}", "(a?){300}", "|".join(f"a{i}" for i in range(500)), "(" * 90 + "a" + "){1,9}" * 90]
)
def test_expressions_with_many_active_nodes_are_not_read(pattern: str):
    with pytest.raises(NotReadError):
        RegexAutomaton(pattern)


def test_states_are_bounded():
    """Outputs keep the states that they are in."""
    states = states_of("[ab]*a[ab]{7}(x[ab]{200})*", max_weight=2000)
    draw = np.random.default_rng(1)
    for _ in range(60):
        state = states.start
        for byte in b"a" + bytes(draw.choice(list(b"ab"), 300).tolist()):
            state = None if state is None else states.step(state, int(byte))
        assert state is not None and len(state.config) <= MAX_ACTIVE
    assert len(states) < 2000 / 5 and states._weight <= 2000


def test_a_text_beyond_ascii_goes_on_without_states():
    for seed in range(4):
        check("(?:a|[é-ü0-3]*)é", seed)  # a class beyond ASCII and a character of it
    lib = library()
    constraint = Constraint.begin(0, lib.compile(Grammar.regex(".{3}")), 0)
    for byte in "é".encode():
        constraint.accept(byte, is_end=False)
    assert constraint.state is None and constraint.error is None
    for byte in b"ab":
        constraint.accept(byte, is_end=False)
    assert allowed(lib, constraint.matcher).tolist() == [EOS]

"""Numbered states of regular expressions: outputs in one state have one mask, whatever led there."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from walks import EOS, NUM_WORDS, TOKENS, library

from headrace.base.grammar import Grammar
from headrace.execution.structured.constraint import Constraint
from headrace.execution.structured.reach import Reach
from headrace.execution.structured.regex_states import MAX_PLACES, read_regex
from headrace.execution.structured.states import States

pytest.importorskip("llguidance")

REACH = Reach(TOKENS)

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


def states_of(pattern: str, **options) -> States:
    automaton = read_regex(pattern, REACH)
    assert automaton is not None
    return States(automaton, [bytes([i]) for i in range(256)], **options)


def mask_of(matcher) -> np.ndarray:
    mask = np.zeros((1, NUM_WORDS), dtype=np.int32)
    library("llguidance").fill([matcher], mask)
    return mask[0]


def check_walks(
    grammar: Grammar, seed: int, *, count: int = 6, length: int = 12, share_ascii: float = 0.8, is_certain: bool = True
) -> int:
    """Walk at random by a matcher with states and one without; returns how many masks were known."""
    lib, num_known = library("llguidance"), 0
    compiled, draw = lib.compile(grammar), np.random.default_rng(seed)
    masks: dict[object, np.ndarray] = {}
    for _ in range(count):
        told, ours = compiled.start(), Constraint(0, compiled)
        for _ in range(length):
            expected, again = mask_of(told), mask_of(ours.matcher)
            if not is_certain and (told.error or ours.matcher.error):
                return num_known  # at its limit on work, which all matchers of a grammar share
            assert np.array_equal(again, expected)
            if ours.mask_key is not None:
                num_known += ours.mask_key in masks
                assert np.array_equal(masks.setdefault(ours.mask_key, expected), expected)
            one, other = sorted([ours.read_forced(), told.read_forced()], key=len)
            # at its limits the library sees less of it
            assert other.startswith(one) and (not is_certain or one == other)
            ids = np.flatnonzero(np.unpackbits(expected.view(np.uint8), bitorder="little")[: len(TOKENS)])
            ids = ids[ids != EOS]
            if not len(ids):
                break
            token = int(draw.choice(ids[ids < 128] if (ids < 128).any() and draw.random() < share_ascii else ids))
            told.accept([token])
            ours.accept(token, is_end=False)
            assert not is_certain or (told.error is None and ours.error is None)
    return num_known


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(patterns, st.integers(0, 99))
def test_masks_of_states_are_those_of_the_library(pattern: str, seed: int):
    assert read_regex(pattern, REACH) is not None
    check_walks(Grammar.regex(pattern), seed)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    patterns,
    st.lists(st.sampled_from(["a", "b", "-", " ", "_", "1", "12", "é", ".", "<", "\n", "ab", "#"]), max_size=6)
)
def test_states_reach_what_the_expression_matches(pattern: str, pieces: list[str]):
    """A text that python's own matcher takes as a whole is never out of the states, if it is of ASCII."""
    states = states_of(pattern)
    text, state = "".join(pieces), states.start
    for byte in text.encode():
        state = None if state is None else states.step(state, byte)
    if text.isascii() and re.fullmatch(pattern, text, re.ASCII):
        assert state is not None


large = st.sampled_from(["{12}", "{15,19}", "{9,}", "{0,16}", "{1,40}", "{11,11}", "{2,14}", "{20,30}"])
counted = st.builds(
    "{}(?:{}){}{}".format, st.sampled_from(["", "[ab]*", "-?", "é"]), patterns, large,
    st.sampled_from(["", "a", "1+", "[^a]", "é?"])
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    counted | st.builds("(?:{}|{})".format, counted, counted) | st.builds("({}-){}".format, counted, large),
    st.integers(0, 99)
)
def test_counts_are_alike_only_while_no_token_reaches_a_bound(pattern: str, seed: int):
    """Long walks, mostly within ASCII, where counts run, so that all of them come by; some of them with long tokens."""
    assume(read_regex(pattern, REACH) is not None)
    check_walks(
        Grammar.regex(pattern), seed, count=3, length=60, share_ascii=(0.5, 0.9, 0.99)[seed % 3], is_certain=False
    )


@pytest.mark.parametrize(
    ("pattern", "num_masks"),
    [
        ("([A-Z][a-z]+ ){300}", 40), (".{1,4000}", 30), ("(?:[ab]{30,}-){40}", 60), ("(?:a[01]{2,60}){50}b", 120),
        (r"\d{10000}", 20)
    ]
)
def test_counts_far_from_their_bounds_share_masks(pattern: str, num_masks: int):
    states, lib, draw = states_of(pattern), library("llguidance"), np.random.default_rng(1)
    compiled = lib.compile(Grammar.regex(pattern))
    masks: dict[object, np.ndarray] = {}
    for _ in range(2):
        told, state = compiled.start(), states.start
        for position in range(400):
            expected = mask_of(told)
            assert state is not None and np.array_equal(
                masks.setdefault(states.find_key(state), expected), expected
            ), position
            ids = np.flatnonzero(np.unpackbits(expected.view(np.uint8), bitorder="little")[:128])
            if not len(ids):
                break
            token = int(draw.choice(ids))
            told.accept([token])
            state = states.step(state, token)
    assert len(masks) <= num_masks


def test_counts_of_what_may_be_nothing_are_told_apart():
    """Nothing is known of what classes hold beyond ASCII: this one is empty, and the other branch is the only one."""
    automaton = read_regex(r"(?:a{40}[^\d\D]|b{40})c", REACH)
    assert automaton is None or not automaton._may_round
    for seed in range(3):
        check_walks(Grammar.regex("(?:[ab]{30}[é]|a{40})c"), seed, count=3, length=50)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.binary(max_size=6) | st.text("ab,\"\\ é", max_size=9).map(str.encode), max_size=30),
    st.sets(st.sampled_from(b'ab,"\\ '))
)
def test_how_far_tokens_go_within_an_alphabet(tokens: list[bytes], alphabet: set[int]):
    reach, known = Reach(tokens), {*alphabet, *range(128, 256)}
    lengths = [next((i for i, byte in enumerate(token) if byte not in known), len(token)) for token in tokens]
    assert reach.find_longest(bytes(alphabet)) == max(lengths, default=0)
    assert (
        reach.find_longest(bytes(alphabet)) <= reach.find_longest(bytes(alphabet), is_quoted=True) <= reach.longest
        == max(map(len, tokens), default=0)
    )


def test_what_is_seen_again_is_known():
    assert check_walks(Grammar.regex("([A-Z][a-z]+ ?)+"), 1) > 30
    assert check_walks(Grammar.regex(r"\d{3,5}(-\d{2})*"), 2) > 20
    assert check_walks(Grammar.choice(["red", "re(d)", "new\nline", "12 ab"]), 3) > 5


@pytest.mark.parametrize("pattern", [
    "a+?", "(?i)a", r"\bx", "^a", "a$", r"\p{L}", "[[:alpha:]]", "[a&&b]", r"\x41", "(?=a)", "(?P<n>a)", "a{,3}", "a**",
    "[]a]", "a)", "(a", r"(a)\1", "a{1000000}", "[a", "",
][:-1])  # fmt: skip
def test_what_is_not_read_has_no_states(pattern: str):
    assert read_regex(pattern, REACH) is None


@pytest.mark.parametrize(
    "pattern", ["(a{0,90}){0,90}", "(a?){300}", "|".join(f"a{i}" for i in range(500)), "(" * 90 + "a" + "){1,9}" * 90]
)
def test_expressions_that_are_in_many_places_at_once_have_no_states(pattern: str):
    assert read_regex(pattern, REACH) is None


def test_states_are_bounded():
    """Older ones stay with the outputs that are in them."""
    states = states_of("[ab]*a[ab]{7}(x[ab]{200})*", max_weight=2000)
    draw = np.random.default_rng(1)
    for _ in range(60):
        state = states.start
        for byte in b"a" + bytes(draw.choice(list(b"ab"), 300).tolist()):
            state = None if state is None else states.step(state, int(byte))
        assert state is not None and len(state.inside) <= MAX_PLACES
    assert len(states) < 2000 / 5 and states._weight <= 2000


def test_a_text_beyond_ascii_goes_on_without_states():
    lib = library("llguidance")
    for seed in range(4):
        check_walks(Grammar.regex("(?:a|[é-ü0-3]*)é"), seed)  # a class beyond ASCII and a character of it
    constraint = Constraint(0, lib.compile(Grammar.regex(".{3}")))
    for byte in "é".encode():
        constraint.accept(byte, is_end=False)
    assert constraint.state is None and constraint.error is None
    for byte in b"ab":
        constraint.accept(byte, is_end=False)
    assert np.flatnonzero(
        np.unpackbits(mask_of(constraint.matcher).view(np.uint8), bitorder="little")
    ).tolist() == [EOS]

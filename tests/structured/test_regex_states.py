"""Numbered states of regular expressions: outputs in one state have one mask, whatever led there."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from walks import EOS, NUM_WORDS, TOKENS, library

from headrace.base.grammar import Grammar
from headrace.execution.structured.regex_states import MAX_PLACES_IN_ALL, MAX_STEPS, START, read_states

pytest.importorskip("llguidance")

atoms = st.sampled_from([
    "a", "b", "ab", ".", r"\d", r"\w", r"\s", r"\S", r"\W", r"\D", r"\.", r"\-", "[a-c]", "[^a]", r"[\d_-]", r"[^\w]", "é", "-", " ", "[a\\]b]", "[é-ü0-3]", r"\n", "<", "#",
])
counts = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,3}", "{2,}", "{0,2}", "{0,}"])
patterns = st.recursive(
    st.builds("{}{}".format, atoms, counts),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map("".join) | st.builds("({}){}".format, inner, counts) | st.builds("(?:{}|{}){}".format, inner, inner, counts),
    max_leaves=6,
)


def mask_of(matcher) -> np.ndarray:
    """As the library computes it, whatever is known."""
    lib, mask = library("llguidance"), np.zeros((1, NUM_WORDS), dtype=np.int32)
    lib._pool.unsafe_compute_mask_ptr([(matcher.inner, 0)], mask.ctypes.data, mask.nbytes, 1)
    return mask[0]


def check_walks(grammar: Grammar, seed: int) -> int:
    """Walk at random by a matcher with states and one without; returns how many masks were known."""
    lib, num_known = library("llguidance"), 0
    compiled, draw = lib.compile(grammar), np.random.default_rng(seed)
    for _ in range(6):
        told, ours = compiled.start(), compiled.start()
        told._state = None
        for _ in range(12):
            expected, mask = mask_of(told), np.zeros((1, NUM_WORDS), dtype=np.int32)
            num_known += ours.key is not None and lib._known.find(ours.key) is not None
            lib.fill([ours], mask)
            assert np.array_equal(mask[0], expected)
            assert ours.read_forced() == told.read_forced()
            ids = np.flatnonzero(np.unpackbits(expected.view(np.uint8), bitorder="little")[: len(TOKENS)])
            ids = ids[ids != EOS]
            if not len(ids):
                break
            token = int(draw.choice(ids[ids < 128] if (ids < 128).any() and draw.random() < 0.8 else ids))
            told.accept([token])
            ours.accept([token])
            assert told.error is None and ours.error is None
    return num_known


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(patterns, st.integers(0, 99))
def test_masks_of_states_are_those_of_the_library(pattern: str, seed: int):
    assert read_states(pattern, TOKENS) is not None
    check_walks(Grammar.regex(pattern), seed)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(patterns, st.lists(st.sampled_from(["a", "b", "-", " ", "_", "1", "12", "é", ".", "<", "\n", "ab", "#"]), max_size=6))
def test_states_reach_what_the_expression_matches(pattern: str, pieces: list[str]):
    """A text that python's own matcher takes as a whole is never out of the states, if it is of ASCII."""
    states = read_states(pattern, [bytes([i]) for i in range(256)])
    assert states is not None
    text, state = "".join(pieces), START
    for byte in text.encode():
        state = None if state is None else states.step(state, byte)
    if text.isascii() and re.fullmatch(pattern, text, re.ASCII):
        assert state is not None


def test_what_is_seen_again_is_known():
    assert check_walks(Grammar.regex("([A-Z][a-z]+ ?)+"), 1) > 30
    assert check_walks(Grammar.regex(r"\d{3,5}(-\d{2})*"), 2) > 20
    assert check_walks(Grammar.choice(["red", "re(d)", "new\nline", "12 ab"]), 3) > 5


@pytest.mark.parametrize("pattern", [
    "a+?", "(?i)a", r"\bx", "^a", "a$", r"\p{L}", "[[:alpha:]]", "[a&&b]", r"\x41", "(?=a)", "(?P<n>a)", "a{,3}", "a**", "[]a]", "a)", "(a", r"(a)\1", "a{9999}", "[a", "",
][:-1])  # fmt: skip
def test_what_is_not_read_has_no_states(pattern: str):
    assert read_states(pattern, TOKENS) is None


@pytest.mark.parametrize("pattern", ["(a{0,90}){0,90}", "(a?){300}", "|".join(f"a{i}" for i in range(500)), "(" * 90 + "a" + "){1,9}" * 90])
def test_expressions_that_are_in_many_places_at_once_have_no_states(pattern: str):
    assert read_states(pattern, TOKENS) is None


def test_states_are_bounded():
    states = read_states("[ab]*a[ab]{7}(x[ab]{200})*", [bytes([i]) for i in range(256)])
    assert states is not None
    draw = np.random.default_rng(1)
    for _ in range(60):
        state = START
        for byte in (b"a" + bytes(draw.choice(list(b"ab"), 300))):
            state = None if state is None else states.step(state, int(byte))
    assert states._num_places <= MAX_PLACES_IN_ALL and len(states._steps) <= MAX_STEPS


def test_a_text_beyond_ascii_goes_on_without_states():
    lib = library("llguidance")
    for seed in range(4):
        check_walks(Grammar.regex("(?:a|[é-ü0-3]*)é"), seed)  # a class beyond ASCII and a character of it
    matcher = lib.compile(Grammar.regex(".{3}")).start()
    matcher.accept(list("é".encode()))
    assert matcher._state is None and matcher.error is None
    matcher.accept(list(b"ab"))
    mask = np.zeros((1, NUM_WORDS), dtype=np.int32)
    lib.fill([matcher], mask)
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [EOS]

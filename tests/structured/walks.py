"""Random walks through a grammar's masks over a vocabulary of bytes: what a model of random weights would write."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.base.grammar import Grammar, Vocabulary
from headrace.execution.structured.library import GRAMMAR_LIBRARIES, GrammarLibrary
from headrace.execution.structured.rows import Constraint

LONGER = [
    '": "', '", "', '"}', '{"', '": ', ", ", "}]", '[{"', "true", "null", "false", "\\u00", "\\ud8", "\\n", "  ", "ab",
    "12", "-1", ".5", "e3", '""', "é", "😀", "<a>"
]
TOKENS = [*(bytes([i]) for i in range(256)), *(text.encode() for text in LONGER), b"<eos>", b"<|call|>"]
EOS = TOKENS.index(b"<eos>")
CALL = TOKENS.index(b"<|call|>")
NUM_WORDS = -(-len(TOKENS) // 32)
STRUCTURE = np.array([bool(t) and all(b in b'"}],: \n01ab\\u' for b in t) for t in TOKENS])


@functools.cache
def library() -> GrammarLibrary:
    return GRAMMAR_LIBRARIES.load("llguidance")(Vocabulary(TOKENS, frozenset([EOS, CALL])), len(TOKENS), [EOS])


def allowed(lib: GrammarLibrary, matcher: Any) -> np.ndarray:
    """Ids the matcher allows next."""
    masks = np.zeros((1, NUM_WORDS), dtype=np.int32)
    lib.fill([matcher], masks)
    return np.flatnonzero(np.unpackbits(masks[0].astype("<i4").view(np.uint8), bitorder="little")[: len(TOKENS)])


def walk(lib: GrammarLibrary, compiled: Any, seed: int, limit: int = 150) -> str | None:
    """What random choices write; None when it does not end within ``limit`` tokens."""
    draw = np.random.default_rng(seed)
    weights = np.where(STRUCTURE, draw.choice([1.0, 5.0, 40.0]), 1.0)
    weights[128:256] *= 0.05
    stop = draw.choice([0.05, 0.3, 0.9])
    matcher, written = compiled.start(), []
    for _ in range(limit):
        ids = allowed(lib, matcher)
        assert matcher.error is None and len(ids), (
            f"stuck after {b''.join(TOKENS[i] for i in written)!r}: {matcher.error}"
        )
        if EOS in ids and (len(ids) == 1 or draw.random() < stop):
            return b"".join(TOKENS[i] for i in written).decode("utf-8", "replace")
        ids = ids[ids != EOS]
        token = int(draw.choice(ids, p=weights[ids] / weights[ids].sum()))
        written.append(token)
        matcher.accept([token])
    return None


def bitmask_of(lib: GrammarLibrary, matcher: Any) -> np.ndarray:
    bitmask = np.zeros((1, NUM_WORDS), dtype=np.int32)
    lib.fill([matcher], bitmask)
    return bitmask[0]


def check_states(
    grammar: Grammar, seed: int, *, count: int = 8, length: int = 60, begin: bytes = b"", compiled: Any = None
) -> tuple[int, int]:
    """Walk at random by a matcher that sees every token, and by states, from ``begin`` on every other time: outputs in
    one state have the same bitmask and forced text. How many bitmasks there were, and how many were known."""
    lib, draw = library(), np.random.default_rng(seed)
    compiled = compiled or lib.compile(grammar)
    assert compiled.states is not None
    known: dict[Any, tuple[np.ndarray, str]] = {}
    forced: dict[Any, tuple[bytes, str]] = {}
    num_asked = num_known = 0
    for attempt in range(count):
        oracle, ours, written = compiled.start(), Constraint.begin(0, compiled, 0), begin if attempt % 2 else b""
        for byte in written:
            oracle.accept([byte])
            ours.accept(byte, is_end=False)
        weights = np.where(STRUCTURE, draw.choice([1.0, 8.0, 40.0]), 1.0)
        weights[128:256] *= 0.2
        for _ in range(length):
            expected, text = bitmask_of(lib, oracle), written.decode("utf-8", "replace")
            num_asked += 1
            if ours.state is not None:
                num_known += ours.bitmask_key in known
                bitmask, before = known.setdefault(ours.bitmask_key, (expected, text))
                assert np.array_equal(bitmask, expected), f"{before!r} and {text!r} are not alike"
                run, before = forced.setdefault(ours.state, (oracle.forced_bytes(), text))
                assert run == oracle.forced_bytes(), f"after {before!r} and {text!r} different text is forced"
            ids = np.flatnonzero(np.unpackbits(expected.view(np.uint8), bitorder="little")[: len(TOKENS)])
            ids = ids[ids != EOS]
            if not len(ids):
                break
            token = int(draw.choice(ids, p=weights[ids] / weights[ids].sum()))
            written += TOKENS[token]
            oracle.accept([token])
            ours.accept(token, is_end=False)
            assert oracle.error is None and ours.error is None
    return num_asked, num_known


def walks(grammar: Grammar, count: int, limit: int = 150) -> Iterator[str]:
    """The outputs that ended, of ``count`` walks."""
    lib = library()
    compiled = lib.compile(grammar)
    for seed in range(count):
        text = walk(lib, compiled, seed, limit)
        if text is not None:
            yield text


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the grammar derives the text as a whole; ``<|call|>`` in it is the special token."""
    lib = library()
    matcher = lib.compile(grammar).start()
    for index, part in enumerate(text.split("<|call|>")):
        matcher.accept(([CALL] if index else []) + list(part.encode()))
    return matcher.error is None and EOS in allowed(lib, matcher)


def spellings(value: Any) -> list[str]:
    """JSON as models write it."""
    return [
        json.dumps(value, ensure_ascii=False), json.dumps(value, separators=(",", ":"), ensure_ascii=False),
        json.dumps(value, indent=2, ensure_ascii=False)
    ]

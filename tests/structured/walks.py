"""Random walks through a grammar's masks over a vocabulary of bytes: what a model of random weights would write."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.base.grammar import Grammar, Vocabulary
from headrace.execution.structured.library import GRAMMAR_LIBRARIES, GrammarLibrary

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
def library(name: str) -> GrammarLibrary:
    return GRAMMAR_LIBRARIES.load(name)(Vocabulary(TOKENS, frozenset([EOS, CALL])), len(TOKENS), [EOS])


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


def walks(name: str, grammar: Grammar, count: int, limit: int = 150) -> Iterator[str]:
    """The outputs that ended, of ``count`` walks."""
    lib = library(name)
    compiled = lib.compile(grammar)
    for seed in range(count):
        text = walk(lib, compiled, seed, limit)
        if text is not None:
            yield text


def accepts(name: str, grammar: Grammar, text: str) -> bool:
    """Whether the grammar derives the text as a whole; ``<|call|>`` in it is the special token."""
    lib = library(name)
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

"""Grammars by xgrammar: the fastest masks, for the grammars of which `inexactness` says that it enforces them exactly.

Refuses: bounding its work by itself; what is let through is small enough to compile in a second.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence

import msgspec
import numpy as np
import xgrammar

from headrace.base.errors import RequestError
from headrace.base.grammar import Grammar, Vocabulary
from headrace.execution.structured.exact_tags import texts_of, word_tag
from headrace.execution.structured.json_states import count_blanks
from headrace.execution.structured.library import LeftToOthers
from headrace.execution.structured.plain import PlainTokens, find_plain, read_breaks
from headrace.execution.structured.reach import Reach
from headrace.execution.structured.reading import read_automaton
from headrace.execution.structured.states import States

MAX_THREADS, MIN_SHARED = 4, 8
"""Threads that share in many masks; for fewer they cost more than they save."""
MAX_PLAIN = 16
"""Kinds of plain tokens kept, 0.2 MB each."""
MAX_WHITESPACE = 40
"""Blanks in a row: a model cannot be caught writing them for ever."""


class XgrammarMatcher:
    """A `Matcher`."""

    def __init__(self, inner: xgrammar.GrammarMatcher):
        self.inner = inner
        self.error: str | None = None

    def accept(self, token_ids: Sequence[int]) -> None:
        """See `Matcher`."""
        for token in token_ids:
            if not self.inner.accept_token(token):
                self.error = f"the grammar does not allow the token {token}"
                return

    def read_forced(self) -> bytes:
        """See `Matcher`."""
        try:
            return self.inner.find_jump_forward_string().encode()
        except UnicodeError:  # it begins in the middle of a character
            return b""


class XgrammarGrammar:
    """A `CompiledGrammar`."""

    def __init__(
        self, library: XgrammarLibrary, inner: xgrammar.CompiledGrammar, plain: PlainTokens | None,
        states: States | None
    ):
        self.library, self.plain, self.states = library, plain, states
        self._inner = inner

    def start(self) -> XgrammarMatcher:
        """See `CompiledGrammar`."""
        return XgrammarMatcher(xgrammar.GrammarMatcher(self._inner))


class XgrammarLibrary:
    """A `GrammarLibrary`."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_ids: Sequence[int]):
        specials = [
            vocabulary.tokens[i].decode("utf-8", "replace")
            for i in vocabulary.special_ids if i < len(vocabulary.tokens)
        ]
        self._special_texts = [text for text in specials if text]
        tokens = self._tokens = [
            b"" if i in vocabulary.special_ids else token for i, token in enumerate(vocabulary.tokens[:vocab_size])
        ]
        self._reach = Reach(tokens)
        info = xgrammar.TokenizerInfo(
            tokens, vocab_type=xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(eos_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        num_threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._batch, self._large_batch = xgrammar.BatchGrammarMatcher(1), xgrammar.BatchGrammarMatcher(num_threads)
        self._num_words = -(-vocab_size // 32)
        self._find_plain = functools.lru_cache(MAX_PLAIN)(functools.partial(find_plain, vocabulary, vocab_size))
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> XgrammarGrammar:
        """See `GrammarLibrary`."""
        assert grammar.kind in ("json_schema", "json_object", "structural_tag"), grammar.kind
        try:
            inner = self._compile_tag(grammar) if grammar.kind == "structural_tag" else self._compile_json(grammar)
        except (RuntimeError, ValueError) as error:
            raise RequestError(
                f"the {grammar.kind} cannot be used as a grammar: {error}"[:500], param=grammar.kind
            ) from error
        breaks = read_breaks(grammar)
        automaton = read_automaton(grammar, self._reach, count_blanks)
        states = None if automaton is None else States(automaton, self._tokens)
        compiled = XgrammarGrammar(self, inner, None if breaks is None else self._find_plain(breaks), states)
        mask = np.zeros((1, self._num_words), dtype=np.int32)
        self.fill([compiled.start()], mask)
        if not mask.any():
            raise RequestError(
                f"the {grammar.kind} cannot be used as a grammar: it allows no output", param=grammar.kind
            )
        return compiled

    def _compile_json(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        schema = grammar.text or '{"type":"object"}'
        with self._lock:
            return self._compiler.compile_json_schema(
                schema, any_whitespace=True, max_whitespace_cnt=MAX_WHITESPACE, strict_mode=False
            )

    def _compile_tag(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        tag = msgspec.json.decode(grammar.text)
        if any(special in text for text in texts_of(tag) for special in self._special_texts):
            raise LeftToOthers("special tokens in a structural tag")
        worded = msgspec.json.encode(word_tag(tag, {"max_whitespace_cnt": MAX_WHITESPACE})).decode()
        with self._lock:
            return self._compiler.compile_structural_tag(worded)

    def fill(self, matchers: Sequence[XgrammarMatcher], masks: np.ndarray) -> None:
        """See `GrammarLibrary`."""
        assert masks.dtype == np.int32 and masks.flags.c_contiguous and len(masks) == len(matchers)
        batch = self._large_batch if len(matchers) >= MIN_SHARED else self._batch
        batch.batch_fill_next_token_bitmask([matcher.inner for matcher in matchers], masks)

"""Grammars by llguidance (https://github.com/guidance-ai/llguidance). The library bounds its own work by fuel, releases
the interpreter lock, and refuses what it cannot enforce.

Refuses: sources that `sources` and `schema` refuse, among them those that llguidance 1.9 gets wrong or crashes on.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Sequence

import llguidance
import msgspec
import numpy as np
from llguidance.gbnf_to_lark import GbnfToLarkError

from headrace.base.errors import RequestError
from headrace.base.grammar import Grammar, Vocabulary
from headrace.execution.structured.lazy_dfa import LazyDfa, Reach
from headrace.execution.structured.schema import check_schema, embed_schema
from headrace.execution.structured.sources import HEADER, check_regex, quote, read_ebnf, slash
from headrace.execution.structured.structural_tag import to_lark
from headrace.execution.structured.tag_automaton import build_automaton
from headrace.execution.structured.trial import find_fault

JSON_OPTIONS = {
    "whitespace_flexible": True,
    # A space, or a line break and its indentation: a model cannot be caught writing blanks for ever.
    "whitespace_pattern": r" |\r?\n[ \t]{0,40}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
    # Without \u escapes: they would let a property be named twice, once in disguise.
    "json_allowed_escapes": '"\\bfnrt',
}
LIMITS = {
    "initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 20_000, "max_items_in_row": 10_000,
    "max_lexer_states": 100_000, "max_grammar_size": 200_000, "verbose_errors": False
}
"""Items are the ways to go on at one place of the output: about six for an alternative of ``anyOf``, four for an
optional property. 10,000 take about 20 ms a token. 100,000 states of the lexer hold a string of 10,000 characters."""
TRIAL_BYTES = 4096
"""Grammars of at least so many bytes are tried out, see `find_fault`; shorter ones hardly have so many alternatives."""
TOO_WIDE = ("many items", "Current row has", "too many expressions", "too many states", "fuel")
SLICES = [r"[a-z]+", *llguidance.LLTokenizer.general_slices()]
"""Regular expressions of parts of the vocabulary that llguidance allows as a whole where a grammar allows all that they
match. With lower-case letters among them, bitmasks of regular expressions take half the time."""
MAX_MESSAGE = 400
_LOCATION = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")
_GRAMMAR = re.compile(r"\s+1 \| ")
MAX_THREADS = 8
SHORT_S = 0.02
"""Seconds. A grammar that compiles in less is compiled once per thread, so that threads do not share a lexer."""


class _TokenizerAdapter:
    """A vocabulary with the attributes that `llguidance.TokenizerWrapper` reads."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_ids: Sequence[int]):
        known = vocabulary.tokens[:vocab_size]
        self.tokens = known + [b""] * (vocab_size - len(known))
        self.special_token_ids = sorted(i for i in vocabulary.special_ids | set(eos_ids) if i < vocab_size)
        self.eos_token_id, self.bos_token_id = eos_ids[0], None
        self.split_greedily: Callable[[str], list[int]] | None = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokenise a text. llguidance needs that for forced tokens only, which are off (`HEADER`): a greedy split will
        do. Empty until the tokenizer that splits has been built."""
        raw = text.encode() if isinstance(text, str) else text
        return self.split_greedily(raw.decode("utf-8", "replace")) if self.split_greedily is not None else []


class GuidanceMatcher:
    """A `Matcher`."""

    def __init__(self, inner: llguidance.LLMatcher):
        self.inner = inner

    def accept(self, token_ids: Sequence[int]) -> None:
        """See `Matcher`."""
        self.inner.consume_tokens(list(token_ids))

    def copy(self) -> GuidanceMatcher:
        """See `Matcher`."""
        return GuidanceMatcher(self.inner.deep_copy())

    def forced_bytes(self) -> bytes:
        """See `Matcher`. llguidance writes a special token with 0xFF before it, which no UTF-8 has: cut there."""
        return self.inner.compute_ff_bytes().split(b"\xff", 1)[0]

    @property
    def error(self) -> str | None:
        """See `Matcher`."""
        return f"the grammar cannot go on: {_first_line(self.inner.get_error())}" if self.inner.is_error() else None


class GuidanceGrammar:
    """A `CompiledGrammar`. Copies of one matcher share a lexer behind a lock, so bitmasks of theirs are not computed in
    parallel: outputs get copies of several ``origins`` in turn."""

    def __init__(self, library: GuidanceLibrary, origins: list[llguidance.LLMatcher], states: LazyDfa | None = None):
        self.library, self.states = library, states
        self._origins = itertools.cycle(origins)

    def start(self) -> GuidanceMatcher:
        """See `CompiledGrammar`."""
        return GuidanceMatcher(next(self._origins).deep_copy())


class GuidanceLibrary:
    """A `GrammarLibrary`."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_ids: Sequence[int]):
        adapter = _TokenizerAdapter(vocabulary, vocab_size, eos_ids)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(adapter), eos_token=list(eos_ids), slices=SLICES
        )
        adapter.split_greedily = self._tokenizer.greedy_tokenize
        special_ids = vocabulary.special_ids
        # special tokens are no text to an automaton
        self._texts = [b"" if i in special_ids else token for i, token in enumerate(adapter.tokens)]
        self._reach = Reach(self._texts)
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._num_threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._pool = llguidance.LLExecutor(num_threads=self._num_threads)
        specials = {i: vocabulary.tokens[i].decode("utf-8", "replace") for i in special_ids if i < len(adapter.tokens)}
        self._special_ids = {text: i for i, text in specials.items() if text}

    def compile(self, grammar: Grammar) -> GuidanceGrammar:
        """See `GrammarLibrary`. The first bitmask is computed here as well: it is the slowest, and is empty for a
        grammar that allows nothing."""
        try:
            text = HEADER + self._read(grammar)
        except RequestError:
            raise
        except (ValueError, RecursionError, GbnfToLarkError) as error:
            raise _complain(grammar, str(error)) from error
        began = time.perf_counter()
        origins = [self._open(grammar, text)]
        if time.perf_counter() - began < SHORT_S:
            # Only quick ones: for the others a request would wait too long.
            origins += [self._open(grammar, text) for _ in range(1, self._num_threads)]
        if len(text) >= TRIAL_BYTES and (fault := find_fault(origins[0], self._texts)) is not None:
            raise _complain(grammar, fault)
        automaton = build_automaton(grammar, self._reach, self._special_ids.keys())
        return GuidanceGrammar(self, origins, None if automaton is None else LazyDfa(automaton, self._texts))

    def _open(self, grammar: Grammar, text: str) -> llguidance.LLMatcher:
        """A matcher at the beginning of an output, its first bitmask computed; raises `RequestError`."""
        origin = llguidance.LLMatcher(
            self._tokenizer, llguidance.LLMatcher.grammar_from_lark(text), log_level=0, limits=self._limits
        )
        allowed = b"" if origin.is_error() else origin.compute_bitmask()
        if origin.is_error():
            raise _complain(grammar, origin.get_error())
        if not any(allowed):
            raise _complain(grammar, "it allows no output")
        return origin

    def _read(self, grammar: Grammar) -> str:
        """The grammar in llguidance's dialect of Lark; raises `RequestError` and what the parsers raise."""
        kind, text = grammar.kind, grammar.text
        match kind:
            case "json_schema":
                schema = msgspec.json.decode(text)
                if schema is False:
                    raise RequestError("the schema false allows no output", param=kind)
                check_schema(schema, kind)
                return "start: " + embed_schema(schema, JSON_OPTIONS)
            case "json_object":
                return "start: " + embed_schema({"type": "object"}, JSON_OPTIONS)
            case "regex":
                check_regex(text, kind)
                return "start: " + slash(text)
            case "ebnf":
                return read_ebnf(text, kind)
            case "choice":
                return _read_choices(msgspec.json.decode(text))
            case "structural_tag":
                return to_lark(msgspec.json.decode(text), JSON_OPTIONS, self._special_ids)
        raise RequestError(f"unknown kind of grammar {kind!r}", param="grammar")

    def fill(self, matchers: Sequence[GuidanceMatcher], bitmasks: np.ndarray) -> None:
        """See `GrammarLibrary`. Several are filled on the library's own threads, without the interpreter lock; this
        returns when all are done, so the raw addresses stay valid."""
        assert bitmasks.dtype == np.int32 and bitmasks.flags.c_contiguous and len(bitmasks) == len(matchers)
        size, address = bitmasks.shape[1] * bitmasks.itemsize, bitmasks.ctypes.data
        if self._num_threads > 1 and len(matchers) > 1:
            work = [(matcher.inner, i) for i, matcher in enumerate(matchers)]
            self._pool.unsafe_compute_mask_ptr(work, address, size, len(bitmasks))
        else:
            for i, matcher in enumerate(matchers):
                matcher.inner.unsafe_compute_mask_ptr(address + i * size, size)


def _read_choices(choices: Sequence[str]) -> str:
    """Constants as one terminal: as many rules would be as many items in the parser."""
    return f"start: CHOICE{'' if all(choices) else '?'}\nCHOICE: " + " | ".join(map(quote, filter(None, choices)))


def _complain(grammar: Grammar, reason: str) -> RequestError:
    if any(sign in reason for sign in TOO_WIDE):
        reason = (
            "at some place of the output it leaves more ways to go on than can be checked for every token; take fewer "
            "alternatives (anyOf, optional properties, free names beside them) there"
        )
    return RequestError(f"the {grammar.kind} cannot be used as a grammar: {_first_line(reason)}", param=grammar.kind)


def _first_line(text: str) -> str:
    """The useful part of llguidance's message, which goes on with the grammar and the state of the parser."""
    if "NoExtensionBias" in text:
        return "it cannot be begun; does a '$ref' refer to itself, or a rule to nothing but itself?"
    message = _GRAMMAR.split(_LOCATION.sub("", text.strip()), maxsplit=1)[0]
    return message.split("\n<state>", 1)[0].replace("\n", " ").removesuffix(" <non-verbose/>")[:MAX_MESSAGE]

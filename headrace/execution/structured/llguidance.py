"""Grammars by llguidance. It bounds its own work by fuel, lets other threads run, and refuses what it cannot enforce.

Refuses: sources that `bounds` and `check_schema` refuse.
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
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from headrace.base.errors import RequestError
from headrace.base.grammar import Grammar, Vocabulary
from headrace.execution.structured.bounds import check_ebnf, check_regex
from headrace.execution.structured.json_states import count_indentation
from headrace.execution.structured.lark import HEADER, embed_json, quote, slash
from headrace.execution.structured.reach import Reach
from headrace.execution.structured.reading import read_automaton
from headrace.execution.structured.schema import check_schema
from headrace.execution.structured.states import States
from headrace.execution.structured.structural_tag import to_lark

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
    "initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 5_000, "max_lexer_states": 50_000,
    "max_grammar_size": 200_000, "verbose_errors": False
}
MAX_MESSAGE = 400
_PLACE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")
_LARK = re.compile(r"^\s*[?!]?start\s*:(?!:=)", re.MULTILINE)
"""Tells Lark's notation from GBNF, in which a rule may have the same name."""
_GBNF = re.compile(r'"(?:\\.|[^"\\])*\\?(?:"|\Z)|\[(?:\\.|[^\]\\])*\\?(?:\]|\Z)|#[^\n]*|[\w-]+', re.DOTALL)
"""A text, a class, a comment or a name."""
_GRAMMAR = re.compile(r"\s+1 \| ")
MAX_THREADS = 8
SHORT_S = 0.02
"""A grammar that is compiled in less is compiled once for each thread."""


class _TokenizerFace:
    """A vocabulary in the shape llguidance asks for."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_ids: Sequence[int]):
        known = vocabulary.tokens[:vocab_size]
        self.tokens = known + [b""] * (vocab_size - len(known))
        self.special_token_ids = sorted(i for i in vocabulary.special_ids | set(eos_ids) if i < vocab_size)
        self.eos_token_id, self.bos_token_id = eos_ids[0], None
        self.split_greedily: Callable[[str], list[int]] | None = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of a text. Grammars do not force any (`HEADER`), so the longest will do."""
        raw = text.encode() if isinstance(text, str) else text
        return self.split_greedily(raw.decode("utf-8", "replace")) if self.split_greedily is not None else []


class GuidanceMatcher:
    """A `Matcher`."""

    def __init__(self, inner: llguidance.LLMatcher):
        self.inner = inner

    def accept(self, token_ids: Sequence[int]) -> None:
        """See `Matcher`."""
        self.inner.consume_tokens(list(token_ids))

    def read_forced(self) -> bytes:
        """See `Matcher`. A special token has a byte before it that no text holds."""
        return self.inner.compute_ff_bytes().split(b"\xff", 1)[0]

    @property
    def error(self) -> str | None:
        """See `Matcher`."""
        return f"the grammar cannot go on: {_first_line(self.inner.get_error())}" if self.inner.is_error() else None


class GuidanceGrammar:
    """A `CompiledGrammar`: matchers nobody advances. Copies of one share what has been computed of the grammar, and
    wait for one another as they compute: outputs take turns in being copies of each."""

    plain = None

    def __init__(self, library: GuidanceLibrary, origins: list[llguidance.LLMatcher], states: States | None):
        self.library, self.states = library, states
        self._origins = itertools.cycle(origins)

    def start(self) -> GuidanceMatcher:
        """See `CompiledGrammar`."""
        return GuidanceMatcher(next(self._origins).deep_copy())


class GuidanceLibrary:
    """A `GrammarLibrary`."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_ids: Sequence[int]):
        face = _TokenizerFace(vocabulary, vocab_size, eos_ids)
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(face), eos_token=list(eos_ids))
        face.split_greedily = self._tokenizer.greedy_tokenize
        self._tokens = [b"" if i in vocabulary.special_ids else token for i, token in enumerate(face.tokens)]
        self._reach = Reach(self._tokens)
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._num_threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._pool = llguidance.LLExecutor(num_threads=self._num_threads)
        texts = {
            i: vocabulary.tokens[i].decode("utf-8", "replace") for i in vocabulary.special_ids if i < len(face.tokens)
        }
        self._special_ids = {text: i for i, text in texts.items() if text}

    def compile(self, grammar: Grammar) -> GuidanceGrammar:
        """See `GrammarLibrary`. The first mask is computed too: it is the slowest, and shows a grammar that allows
        nothing."""
        try:
            text = HEADER + self._read(grammar)
        except RequestError:
            raise
        except (ValueError, RecursionError, GbnfToLarkError) as error:
            raise _complain(grammar, str(error)) from error
        began = time.perf_counter()
        origins = [self._open(grammar, text)]
        if time.perf_counter() - began < SHORT_S:
            origins += [self._open(grammar, text) for _ in range(1, self._num_threads)]
        automaton = read_automaton(grammar, self._reach, count_indentation)
        return GuidanceGrammar(self, origins, None if automaton is None else States(automaton, self._tokens))

    def _open(self, grammar: Grammar, text: str) -> llguidance.LLMatcher:
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
        kind, text = grammar.kind, grammar.text
        match kind:
            case "json_schema":
                schema = msgspec.json.decode(text)
                if schema is False:
                    raise RequestError("the schema false allows no output", param=kind)
                check_schema(schema, kind)
                return "start: " + embed_json(schema, JSON_OPTIONS)
            case "json_object":
                return "start: " + embed_json({"type": "object"}, JSON_OPTIONS)
            case "regex":
                check_regex(text, kind)
                return "start: " + slash(text)
            case "ebnf":
                check_ebnf(text, kind)
                return text if _LARK.search(text) else _from_gbnf(text)
            case "choice":
                return "start: " + " | ".join(map(quote, msgspec.json.decode(text)))
            case "structural_tag":
                return to_lark(msgspec.json.decode(text), JSON_OPTIONS, self._special_ids)
        raise RequestError(f"unknown kind of grammar {kind!r}", param="grammar")

    def fill(self, matchers: Sequence[GuidanceMatcher], masks: np.ndarray) -> None:
        """See `GrammarLibrary`."""
        assert masks.dtype == np.int32 and masks.flags.c_contiguous and len(masks) == len(matchers)
        if len(matchers) == 1:
            matchers[0].inner.unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
            return
        work = [(matcher.inner, place) for place, matcher in enumerate(matchers)]
        self._pool.unsafe_compute_mask_ptr(work, masks.ctypes.data, masks.shape[1] * masks.itemsize, len(masks))


def _from_gbnf(text: str) -> str:
    """In Lark's notation, where ``root`` is called ``start``: a rule that has that name gets another."""
    free = next(name for name in map("start-{}".format, itertools.count()) if name not in text)
    return gbnf_to_lark(_GBNF.sub(lambda found: free if found[0] == "start" else found[0], text))


def _complain(grammar: Grammar, reason: str) -> RequestError:
    return RequestError(f"the {grammar.kind} cannot be used as a grammar: {_first_line(reason)}", param=grammar.kind)


def _first_line(text: str) -> str:
    """Its messages go on with the grammar and the state of the parser."""
    if "NoExtensionBias" in text:
        return "it cannot be begun; does a '$ref' refer to itself, or a rule to nothing but itself?"
    told = _GRAMMAR.split(_PLACE.sub("", text.strip()), maxsplit=1)[0]
    return told.split("\n<state>", 1)[0].replace("\n", " ").removesuffix(" <non-verbose/>")[:MAX_MESSAGE]

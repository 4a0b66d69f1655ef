"""Grammars by llguidance. It bounds its own work by fuel, lets other threads run, and refuses what it cannot enforce.

Refuses: JSON schemas that `check_schema` refuses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import llguidance
import msgspec
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from headrace.base.errors import RequestError
from headrace.base.grammar import Grammar, Vocabulary
from headrace.execution.structured.schema import check_schema
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
LIMITS = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000, "max_lexer_states": 50_000, "max_grammar_size": 200_000, "verbose_errors": False}
MAX_MESSAGE = 400
MAX_THREADS = 8


class _TokenizerFace:
    """A vocabulary in the shape llguidance asks for."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_ids: Sequence[int]):
        known = vocabulary.tokens[:vocab_size]
        self.tokens = known + [b""] * (vocab_size - len(known))
        self.special_token_ids = sorted(i for i in vocabulary.special_ids | set(eos_ids) if i < vocab_size)
        self.eos_token_id, self.bos_token_id = eos_ids[0], None
        self._encode = vocabulary.encode
        self.split_greedily: Callable[[str], list[int]] | None = None

    def __call__(self, text: bytes | str) -> list[int]:
        """The usual tokens of a text that the grammar forces. Tokenizers that add or change characters are no use there:
        then the longest tokens are taken."""
        raw = text.encode() if isinstance(text, str) else text
        ids = self._encode(raw.decode("utf-8", "replace"))
        if all(i < len(self.tokens) for i in ids) and b"".join(self.tokens[i] for i in ids) == raw:
            return ids
        return self.split_greedily(raw.decode("utf-8", "replace")) if self.split_greedily is not None else []


class GuidanceMatcher:
    """A `Matcher`."""

    def __init__(self, inner: llguidance.LLMatcher):
        self.inner = inner

    def accept(self, token_ids: Sequence[int]) -> None:
        """See `Matcher`."""
        self.inner.consume_tokens(list(token_ids))

    @property
    def error(self) -> str | None:
        """See `Matcher`."""
        return _first_line(self.inner.get_error()) if self.inner.is_error() else None


class GuidanceGrammar:
    """A `CompiledGrammar`: a matcher nobody advances. Its copies share what has been computed of the grammar."""

    def __init__(self, library: GuidanceLibrary, origin: llguidance.LLMatcher):
        self.library = library
        self._origin = origin

    def start(self) -> GuidanceMatcher:
        """See `CompiledGrammar`."""
        return GuidanceMatcher(self._origin.deep_copy())


class GuidanceLibrary:
    """A `GrammarLibrary`."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_ids: Sequence[int]):
        face = _TokenizerFace(vocabulary, vocab_size, eos_ids)
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(face), eos_token=list(eos_ids))
        face.split_greedily = self._tokenizer.greedy_tokenize
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._pool = llguidance.LLExecutor(num_threads=min(MAX_THREADS, os.cpu_count() or 1))
        texts = {i: vocabulary.tokens[i].decode("utf-8", "replace") for i in vocabulary.special_ids if i < len(face.tokens)}
        self._special_ids = {text: i for i, text in texts.items() if text}

    def compile(self, spec: Grammar) -> GuidanceGrammar:
        """See `GrammarLibrary`. The first mask is computed too: it is the slowest, and shows a grammar that allows nothing."""
        try:
            grammar = self._read(spec)
        except (ValueError, RecursionError) as error:
            raise _complain(spec, str(error)) from error
        origin = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        allowed = b"" if origin.is_error() else origin.compute_bitmask()
        if origin.is_error():
            raise _complain(spec, origin.get_error())
        if not any(allowed):
            raise _complain(spec, "it allows no output")
        return GuidanceGrammar(self, origin)

    def _read(self, spec: Grammar) -> str:
        make = llguidance.LLMatcher
        match spec.kind:
            case "json_schema":
                return json_grammar(msgspec.json.decode(spec.text))
            case "json_object":
                return json_grammar({"type": "object"})
            case "regex":
                return make.grammar_from_regex(spec.text)
            case "ebnf":
                return make.grammar_from_lark(any_to_lark(spec.text))
            case "choice":
                return make.grammar_from_lark("start: " + " | ".join(msgspec.json.encode(c).decode() for c in msgspec.json.decode(spec.text)))
            case "structural_tag":
                return make.grammar_from_lark(to_lark(msgspec.json.decode(spec.text), JSON_OPTIONS, self._special_ids))
        raise RequestError(f"unknown kind of grammar {spec.kind!r}", param="grammar")

    def fill(self, matchers: Sequence[GuidanceMatcher], masks: np.ndarray) -> None:
        """See `GrammarLibrary`."""
        assert masks.dtype == np.int32 and masks.flags.c_contiguous and len(masks) == len(matchers)
        work = [(matcher.inner, place) for place, matcher in enumerate(matchers)]
        self._pool.unsafe_compute_mask_ptr(work, masks.ctypes.data, masks.shape[1] * masks.itemsize, len(masks))


def _complain(spec: Grammar, reason: str) -> RequestError:
    return RequestError(f"the {spec.kind} cannot be used as a grammar: {_first_line(reason)}", param=spec.kind)


def _first_line(text: str) -> str:
    """Its messages go on with the grammar and the state of the parser."""
    return text.strip().split("\n<state>", 1)[0].replace("\n", " ")[:MAX_MESSAGE]


def json_grammar(schema: Any) -> str:
    """The grammar of a JSON schema, checked; raises `RequestError`."""
    check_schema(schema, "json_schema")
    return llguidance.LLMatcher.grammar_from_json_schema(msgspec.json.encode(schema).decode(), overrides=JSON_OPTIONS)
